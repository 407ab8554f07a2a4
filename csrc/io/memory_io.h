// The deterministic engine: files in memory, time that only passes when somebody waits, everything on the
// waiting thread. Per file `depth` operations are served side by side, each for latency_ns + bytes *
// ns_per_byte, lengthened by up to `jitter` of itself as the seed says. The same seed gives the same order of
// completions, whatever the machine does.
#pragma once
#include <mutex>
#include <vector>

#include "io/io.h"

namespace teraio {
struct MemoryShape {
  int files = 1;
  uint64_t size_bytes = 1 << 26;  // per file; a write beyond it ends in ENOSPC
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
  std::mutex driving_;        // one driver at a time
  mutable std::mutex mutex_;  // the books; never held while a request's own functions run
  std::vector<File> files_;
  std::vector<Event> events_;  // a heap, earliest first
  uint64_t now_ns_ = 0, seed_;
};
}  // namespace teraio
