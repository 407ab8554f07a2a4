// An I/O engine that wraps another I/O engine and injects faults into chosen operations. It numbers the
// operations. A test can therefore fail operation 1 in its first run, operation 2 in the next run, and so on,
// until a run ends without a fault.
//
//   error      the operation does nothing and ends with the rule's errno
//   shorten    the operation moves half of its bytes, and reports this count
//   delay      the operation begins `delay_ns` late
//   drop       the operation completes only after deliver()
//   stall      the operation begins only after deliver(), as with a worker that hangs
//   flip       one bit of the data changes
//   stale      a write does nothing and reports success, or a read returns the bytes before the last write
//   neighbour  the operation reads or writes the adjacent block in place of the requested block
//   kill       the process is killed (SIGKILL) before the operation
//   killed     the process is killed after the operation, before its completion is reported
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/io.h"

namespace teraio {
enum class Fault : uint8_t { none, error, shorten, delay, drop, stall, flip, stale, neighbour, kill, killed };

struct Rule {
  Fault fault = Fault::none;
  Op op = Op::nothing;  // `nothing` matches reads and writes
  int file = -1;        // -1: any file
  uint64_t nth = 1;     // the rule fires at its nth matching operation, counted from 1
  bool sticky = false;  // true: the rule also fires at all later matching operations
  int error = 0;
  uint64_t delay_ns = 0;
  int64_t bit = -1;  // index of the flipped bit in the buffer; -1: derived from the operation's number
  uint64_t seen = 0, hits = 0;
};

class FaultIo final : public Io {
 public:
  explicit FaultIo(std::shared_ptr<Io> inner) : inner_(std::move(inner)) {}
  int files() const override { return inner_->files(); }
  int depth() const override { return inner_->depth(); }
  std::string path(int file) const override { return inner_->path(file); }
  void submit(Request& request) override;
  bool close(uint64_t within_ns) override;
  uint64_t now_ns() const override { return inner_->now_ns(); }
  bool driven() const override { return inner_->driven(); }
  bool drive() override { return inner_->drive(); }
  void advance_to(uint64_t ns) override { inner_->advance_to(ns); }
  int buffered_files() const override { return inner_->buffered_files(); }

  void add(const Rule& rule);
  void clear();
  uint64_t hits() const;
  uint64_t operations(Op op) const;
  int dropped() const;
  int deliver();  // runs all dropped and stalled operations, as a drive does when it recovers from a hang

 private:
  struct Shadow;
  struct Versions {
    std::vector<std::byte> last, previous;
  };
  Rule match(const Request& request, uint64_t* number);
  void alter(Shadow& shadow, const Request& request);
  void remember(const Request& request);
  void recall(const Request& request);
  static bool before(Request& request);
  static void complete(Request& request, Result result);

  std::shared_ptr<Io> inner_;
  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  uint64_t operations_[2] = {0, 0};  // index 0: reads, index 1: writes
  uint64_t hits_ = 0;
  std::atomic<bool> remembering_{false};
  std::map<std::pair<int, uint64_t>, Versions> versions_;
  std::vector<Request*> dropped_;  // begun, but not completed
  std::vector<Request*> stalled_;  // not yet begun
};
}  // namespace teraio
