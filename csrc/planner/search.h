// Large-neighbourhood search on a plan by index. Every round changes a few absences near a stall of the
// simulated plan, makes room where the ledger asks for it, simulates, and keeps what is not worse (while it
// is warm, what is little worse, too).
//
// The same seed and the same calls give the same plan: random numbers are made here, and no clock is asked
// for anything but the deadline.
#pragma once
#include <cstdint>
#include <vector>

#include "planner/absences.h"
#include "planner/recurrence.h"

namespace teraio {
class Search {
 public:
  // Throws what `Instance::check`, `Absences` and `Recurrence` throw.
  Search(Instance instance, Sharing lanes, const std::vector<Absence>& absences,
         const std::vector<int32_t>& routes, uint64_t seed);
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  // Goes on for so many rounds, until the steady clock shows `until_ns` (0: none), or until nothing stalls.
  // `heat` in [0, 1]: how much worse a plan may be that is gone on from. Returns the rounds.
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

  // Neighbourhoods; `at` is an index into `transfers_` of the plan gone on from.
  void hasten(int32_t at);
  void postpone(int32_t at);
  void bring_home(int32_t at);
  void send_away(int32_t tick);
  void rewrite(int32_t at);
  void reroute(int32_t at);

  bool make_room();
  bool tighten(int32_t tick);
  bool send(int32_t gap, int32_t tick);  // tick -1: wherever it suits the gap
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
  std::vector<int64_t> sizes_;  // running sums, to draw large gaps more often

  // Of the plan gone on from: its transfers, when they are done, lanes in the order of service, stalls.
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
