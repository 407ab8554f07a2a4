// A large-neighbourhood search that starts from a plan. An absence is the eviction of a tensor between two
// uses (absences.h). A stall is a wait of compute for a transfer. Every round has three parts. (1) The round
// changes a few absences near a stall. (2) It changes other absences until memory is within the budget. (3)
// It simulates the new plan. The search keeps the new plan if it is at least as good as the plan before. With
// `heat` above 0, the search also keeps plans that are a little worse.
//
// The same seed and the same calls give the same plan. The search makes its own random numbers, and uses the
// clock only for the deadline.
#pragma once
#include <cstdint>
#include <vector>

#include "planner/absences.h"
#include "planner/recurrence.h"

namespace teraio {
class Search {
 public:
  // Throws the exceptions of `Instance::check`, and of the constructors of `Absences` and `Recurrence`.
  Search(Instance instance, Sharing lanes, const std::vector<Absence>& absences,
         const std::vector<int32_t>& routes, uint64_t seed);
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  // Runs `rounds` rounds. Ends earlier when the steady clock shows `until_ns` (0: no limit), or when compute
  // waits for no transfer. `heat` in [0, 1] scales how much worse a new plan may be. Returns the number of
  // rounds that ran.
  int64_t run(int64_t rounds, int64_t until_ns, double heat);

  int64_t best_ns() const { return best_ns_; }
  int64_t evaluations() const { return evaluations_; }
  const std::vector<Absence>& best() const { return best_; }
  const std::vector<int32_t>& best_routes() const { return best_routes_; }

 private:
  void round(double heat);
  bool change(int32_t focus);
  void evaluate();
  void learn();

  // The kinds of random changes. `at` is an index into `transfers_`, the transfers of the current plan.
  void hasten(int32_t at);
  void postpone(int32_t at);
  void bring_home(int32_t at);
  void evict_something(int32_t tick);
  void rewrite(int32_t at);
  void reroute(int32_t at);

  bool make_room();
  bool tighten(int32_t tick);
  bool send(int32_t gap, int32_t tick);  // tick -1: the absence may cover any ticks
  void bring(int32_t gap);
  void write_anew(int32_t version);
  void widen(int32_t gap);
  bool find_tier(int32_t gap);

  uint64_t draw();
  int32_t below(int32_t count) { return static_cast<int32_t>(draw() % static_cast<uint64_t>(count)); }
  double share() { return static_cast<double>(draw() >> 11) * 0x1p-53; }
  int32_t stalled();
  int32_t near(int32_t at);
  int32_t gap_over(int32_t tick);
  int32_t unrolled(const Gap& gap, int32_t tick) const;

  int64_t entered(int32_t tick) const;
  int32_t last_before(int64_t time_ns) const;
  const Gap& gap(int32_t index) const { return instance_.gaps[static_cast<size_t>(index)]; }
  int64_t write_ns(int32_t gap) const;
  int64_t read_ns(int32_t gap) const;

  Instance instance_;
  Absences now_;
  Recurrence recurrence_;
  uint64_t seed_;
  std::vector<int64_t> sizes_;  // running sums of the gaps' sizes, to draw large gaps more often

  // The current plan: its transfers, with their ends, their order on each lane, and the stalls of compute.
  std::vector<Transfer> transfers_, trial_;
  std::vector<int32_t> gaps_, trial_gaps_;
  std::vector<int64_t> done_ns_, entered_ns_;
  std::vector<int32_t> in_order_, place_of_;
  std::vector<Stall> stalls_;
  std::vector<int32_t> touched_;
  int64_t now_ns_ = 0, now_score_ = 0, period_ns_ = 1;
  int64_t stalled_ns_ = 0;

  std::vector<Absence> best_;
  std::vector<int32_t> best_routes_;
  int64_t best_ns_ = 0, best_score_ = 0, evaluations_ = 0;
};
}  // namespace teraio
