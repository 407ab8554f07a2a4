// The deterministic I/O engine: files in memory, and virtual time. All work runs on the thread that waits for
// a transfer. Virtual time passes only during such a wait. Each file serves `depth` operations at a time. An
// operation takes `latency_ns + bytes * ns_per_byte`, and a random share of this time more. The share is at
// most `jitter`. The same seed gives the same order of completions on every machine.
#pragma once
#include <mutex>
#include <vector>

#include "io/io.h"

namespace teraio {
struct MemoryShape {
  int files = 1;
  uint64_t size_bytes = 1 << 26;  // size limit of each file; a write beyond the limit ends in ENOSPC
  int depth = 4;
  uint64_t latency_ns = 1000;
  double ns_per_byte = 1.0;
  double jitter = 0.0;
  uint64_t seed = 0;
};

class MemoryIo final : public Io {
 public:
  explicit MemoryIo(const MemoryShape& shape);
  int files() const override { return shape_.files; }
  int depth() const override { return shape_.depth; }
  std::string path(int file) const override { return "memory:" + std::to_string(file); }
  void submit(Request& request) override;
  bool close(uint64_t) override { return true; }
  uint64_t now_ns() const override;
  bool driven() const override { return true; }
  bool drive() override;
  void advance_to(uint64_t ns) override;
  std::string peek(int file, uint64_t offset, uint64_t bytes);
  void poke(int file, uint64_t offset, const std::string& bytes);

 private:
  struct Event {
    uint64_t at, order;
    Request* request;
    bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
  };
  struct File {
    std::vector<std::byte> bytes;
    RequestList queue[2];
    int serving = 0;
  };
  uint64_t random();
  bool start_one();
  Result operate(const Request& request);

  const MemoryShape shape_;
  std::mutex driving_;        // held by the thread that runs drive(); one thread at a time
  mutable std::mutex mutex_;  // guards the state; never held while a callback of a request runs
  std::vector<File> files_;
  std::vector<Event> events_;  // a heap with the earliest event first
  uint64_t now_ns_ = 0, seed_;
};
}  // namespace teraio
