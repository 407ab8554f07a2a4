// A shim around another engine that makes chosen operations go wrong. It counts the operations that pass, so
// a test can fail the first, the second, the third ... until a run is not hit any more: every operation, in
// turn.
//
//   error      ends with this errno, nothing was done
//   shorten    half is done, and said so
//   delay      comes `delay_ns` late
//   drop       is never completed (deliver() lets it, late)
//   stall      does not even begin until deliver(): a worker that hangs before it looks at its request
//   flip       one bit changes on the way
//   stale      a write is acknowledged, not done; a read brings what the block held before its last write
//   neighbour  the block beside it is read or written
//   kill       the process dies (SIGKILL) before the operation
//   killed     ... after it, before anyone is told
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
  Op op = Op::nothing;  // nothing: both directions
  int file = -1;        // -1: any
  uint64_t nth = 1;     // counted among the operations the rule matches, from 1
  bool sticky = false;  // the nth and all after it
  int error = 0;
  uint64_t delay_ns = 0;
  int64_t bit = -1;  // which bit of the buffer; -1: drawn from the count
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
  int deliver();  // completes what was dropped, operation and all: the late completions of a drive that hung

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
  uint64_t operations_[2] = {0, 0};  // [write]
  uint64_t hits_ = 0;
  std::atomic<bool> remembering_{false};
  std::map<std::pair<int, uint64_t>, Versions> versions_;
  std::vector<Request*> dropped_;  // begun, and never completed
  std::vector<Request*> stalled_;  // never begun
};
}  // namespace teraio
