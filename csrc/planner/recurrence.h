// How long a step takes: the (max,+) recurrence over a plan's transfers, in whole nanoseconds.
//
// At tick k, which is entered when kernel k-1 ends: evictions are issued, those that are free at k are waited
// for, fetches are issued, those that are ready at k are waited for, kernel k runs. A lane serves transfers
// in the order of their issue. Steps follow each other until one begins as an earlier one began: lanes
// occupied for as long, and transfers in flight with as much to go. From there on they repeat.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "planner/sharing.h"

namespace teraio {
struct Transfer {
  int64_t ns = 0;  // for which it occupies its lane, if that has its own bandwidth
  int64_t bytes = 0;
  int32_t lane = 0;
  int32_t issue = 0;   // the tick at which it joins its lane's queue
  int32_t wait = 0;    // the tick that waits for it; below `issue`: in the step after
  bool fetch = false;  // evictions come first within a tick
};

struct Stall {
  int32_t tick = 0;
  int32_t transfer = 0;  // the last one waited for in this tick and direction
  int64_t ns = 0;
};

class Recurrence {
 public:
  static constexpr int kMostSteps = 24;
  // Kernels and transfers one after another take less; no step takes longer than that.
  static constexpr int64_t kTogetherNs = (int64_t{1} << 62) / (kMostSteps + 2);

  // Throws std::invalid_argument for a negative duration or more ticks than 2^30.
  Recurrence(std::span<const int64_t> duration_ns, Sharing lanes);

  // The period. Transfers of one tick and direction are issued in the order given. Throws
  // std::invalid_argument for a tick, lane or time out of range, std::overflow_error if times could add up to
  // 2^62.
  int64_t settle(std::span<const Transfer> transfers);

  // Of the last step that `settle` ran: when each tick was entered, counted from its begin; its stalls.
  std::span<const int64_t> entered_ns() const { return entered_ns_; }
  // When a transfer issued in that step is done, counted from its begin too.
  int64_t done_ns(int32_t transfer) const;
  std::span<const Stall> stalls() const { return stalls_; }
  int steps() const { return static_cast<int>(took_ns_.size()); }

 private:
  enum class Kind : uint8_t { issue, wait };
  int64_t check(std::span<const Transfer> transfers) const;
  void sort(std::span<const Transfer> transfers);
  int64_t run(std::span<const Transfer> transfers, int64_t now_ns);
  int64_t run_sharing(std::span<const Transfer> transfers);
  void await(int32_t tick, int32_t first, int32_t end, int64_t& now_ns);
  void remember(int64_t now_ns);
  int repeats() const;

  std::vector<int64_t> duration_ns_;
  Sharing lanes_;
  int64_t compute_ns_ = 0;
  int64_t begun_ns_ = 0;  // of the last step

  // Transfers by (tick, one of four kinds of event), in order: `first_[4 * tick + kind]` is where they begin.
  std::vector<int32_t> first_, sorted_;
  std::vector<int64_t> lane_ns_, done_ns_, entered_ns_, took_ns_;
  std::vector<std::vector<int64_t>> begun_;  // how each step began
  std::vector<Stall> stalls_;
};
}  // namespace teraio
