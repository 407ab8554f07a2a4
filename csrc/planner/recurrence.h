// The duration of a step with a plan: a (max,+) recurrence over the plan's transfers, in whole nanoseconds.
//
// Compute enters tick k when kernel k-1 ends. Evictions of tick k are issued first, and compute waits for the
// evictions whose bytes must be free at k. Fetches are issued next, and compute waits for the fetches whose
// tensors kernel k needs. Kernel k runs last. A lane is an in-order queue of transfers on a link. It serves
// transfers in the order of their issue. The simulation ends when a step begins in the state in which an
// earlier step began. In this state, each lane has the same remaining time, and each transfer in flight has
// the same remaining bytes. All later steps then repeat the steps from the earlier step on.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "planner/sharing.h"

namespace teraio {
struct Transfer {
  int64_t ns = 0;  // time on its lane at the lane's own bandwidth
  int64_t bytes = 0;
  int32_t lane = 0;
  int32_t issue = 0;  // the tick at which the transfer is queued on its lane
  // The tick at which compute waits for the transfer. A tick below `issue` is in the next step.
  int32_t wait = 0;
  bool fetch = false;  // false: an eviction; evictions come before fetches within a tick
};

struct Times {
  int64_t start_ns = 0;  // the time at which the transfer becomes the first of its lane's queue
  int64_t end_ns = 0;
};

struct Stall {
  int32_t tick = 0;
  int32_t transfer = 0;  // the last transfer that compute waits for in this tick and direction
  int64_t ns = 0;
};

class Recurrence {
 public:
  static constexpr int kMostSteps = 24;
  // An upper limit for the sum of the times of all kernels and transfers. No step takes longer than this sum.
  static constexpr int64_t kTogetherNs = (int64_t{1} << 62) / (kMostSteps + 2);

  // Throws std::invalid_argument for a negative duration or more ticks than 2^30.
  Recurrence(std::span<const int64_t> duration_ns, Sharing lanes);

  // Returns the period: the time per step once the steps repeat. Transfers of one tick and direction are
  // issued in the given order. Throws std::invalid_argument for a tick, lane or time out of range, and
  // std::overflow_error if times could add up to 2^62.
  int64_t settle(std::span<const Transfer> transfers);

  // The times below count from the begin of the last step that settle() simulated.
  std::span<const int64_t> entered_ns() const { return entered_ns_; }  // entry time of each tick
  int64_t done_ns(int32_t transfer) const;  // the time at which a transfer of this step ends
  std::span<const Stall> stalls() const { return stalls_; }
  int64_t took_ns() const { return took_ns_.back(); }  // the end of the step
  // Returns the times of the transfers issued in this step. `transfers` is the argument of settle(). On lanes
  // that share bandwidths, one more step is simulated, in which the transfers in flight end.
  std::vector<Times> times(std::span<const Transfer> transfers) const;
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
  int64_t begun_ns_ = 0;  // begin of the last step

  // `sorted_` has the transfers by tick and by kind of event. The four kinds are issue and wait, of evictions
  // and of fetches. `first_[4 * tick + kind]` is the index of the first event of this tick and kind.
  std::vector<int32_t> first_, sorted_;
  std::vector<int64_t> lane_ns_, done_ns_, entered_ns_, took_ns_;
  std::vector<Times> waited_;  // on lanes that share bandwidths: the times of the transfers waited for last
  std::vector<std::vector<int64_t>> begun_;  // for each step: the lanes' remaining times at its begin
  std::vector<Stall> stalls_;
};
}  // namespace teraio
