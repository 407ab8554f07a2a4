// The rounds of the search. The file also computes the times of the simulated plan, which the changes in
// neighbours.cpp use.
#include "planner/search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <tuple>

namespace teraio {
namespace {
// The search accepts a slower plan if (slowdown / step time) is below a random limit. The mean of this limit
// is heat * kWarmth. The table shows the time that the search saved on four steps of Llama 8B in 6 s:
//   kWarmth   time saved
//   1e-5, 0   1.1 to 1.9 % (the two values differ by less than the noise)
//   3e-4      0.1 to 1.7 %
//   1e-3      0 to 0.7 %
constexpr double kWarmth = 1e-5;
// The search ranks plans by a sum: the step time, plus the time of all transfers divided by kFrugality. By
// the step time alone, a plan with a needless write would rank as high as the plan without it, if the write
// hides behind kernels. The divisor is large, so that the search rarely prefers a longer step with fewer
// transfers.
constexpr int64_t kFrugality = 1000;

int64_t clock_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
}  // namespace

Search::Search(Instance instance, Sharing lanes, const std::vector<Absence>& absences,
               const std::vector<int32_t>& routes, uint64_t seed)
    : instance_((instance.check(lanes), std::move(instance))),
      now_(instance_, absences, routes),
      recurrence_(instance_.duration_ns, std::move(lanes)),
      seed_(seed) {
  int64_t sum = 0;
  for (const Gap& gap : instance_.gaps) sizes_.push_back(sum += gap.size_bytes);
  now_.transfers(trial_, trial_gaps_);
  period_ns_ = now_ns_ = recurrence_.settle(trial_);
  ++evaluations_;
  learn();
  best_ = now_.all();
  best_routes_ = now_.routes();
  best_ns_ = now_ns_;
  best_score_ = now_score_;
}

uint64_t Search::draw() {  // splitmix64
  uint64_t z = (seed_ += 0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

int64_t Search::run(int64_t rounds, int64_t until_ns, double heat) {
  int64_t done = 0;
  while (done < rounds && stalled_ns_ > 0 && !instance_.gaps.empty()) {
    if (until_ns > 0 && clock_ns() >= until_ns) break;
    ++done;
    round(heat);
  }
  return done;
}

void Search::round(double heat) {
  touched_.clear();
  if (!change(stalled()) || !make_room()) return now_.undo();
  if (below(2) == 0)
    for (const int32_t index : std::vector<int32_t>(touched_)) widen(index);
  const int64_t before_ns = now_ns_, before_score = now_score_;
  evaluate();
  const auto worse = static_cast<double>(now_score_ - before_score);
  const double allowed = -std::log(share() + 1e-300) * heat * kWarmth * static_cast<double>(before_ns);
  if (worse > 0 && worse >= allowed) {
    now_ns_ = before_ns;
    now_score_ = before_score;
    return now_.undo();
  }
  now_.keep();
  learn();
  if (now_score_ >= best_score_) return;
  best_ = now_.all();
  best_routes_ = now_.routes();
  best_ns_ = now_ns_;
  best_score_ = now_score_;
}

// Makes a random change near `focus`, a transfer that compute waits for. Returns true if an absence changed.
bool Search::change(int32_t focus) {
  if (focus < 0) return false;
  const int32_t dice = below(100);
  const bool read = transfers_[static_cast<size_t>(focus)].fetch;
  if (dice < 25) {
    read ? hasten(focus) : rewrite(focus);
  } else if (dice < 35) {
    hasten(near(focus));
  } else if (dice < 50) {
    for (int32_t count = 1 + below(4); count > 0; --count) postpone(near(focus));
  } else if (dice < 65) {
    for (int32_t count = 1 + below(2); count > 0; --count) bring_home(near(focus));
  } else if (dice < 75) {
    bring_home(near(focus));
    evict_something(transfers_[static_cast<size_t>(focus)].wait);
  } else if (dice < (instance_.routes() < 2 ? 90 : 82)) {
    for (int32_t count = 1 + below(2); count > 0; --count)
      evict_something(transfers_[static_cast<size_t>(focus)].wait);
    if (read) hasten(focus);
  } else if (dice < 88 || instance_.routes() < 2) {
    rewrite(near(focus));
  } else {
    reroute(near(focus));
  }
  return !touched_.empty();
}

void Search::evaluate() {
  now_.transfers(trial_, trial_gaps_);
  now_ns_ = recurrence_.settle(trial_);
  ++evaluations_;
  now_score_ = now_ns_;
  for (const Transfer& transfer : trial_) now_score_ += transfer.ns / kFrugality;
}

// Stores the current plan's transfers, with their ends, their order on each lane, and the stalls of compute.
void Search::learn() {
  transfers_ = trial_;
  gaps_ = trial_gaps_;
  period_ns_ = std::max<int64_t>(now_ns_, 1);
  const auto entered = recurrence_.entered_ns();
  entered_ns_.assign(entered.begin(), entered.end());
  stalls_.assign(recurrence_.stalls().begin(), recurrence_.stalls().end());
  stalled_ns_ = 0;
  for (const Stall& stall : stalls_) stalled_ns_ += stall.ns;
  now_score_ = now_ns_;
  done_ns_.resize(transfers_.size());
  for (size_t i = 0; i < transfers_.size(); ++i) {
    done_ns_[i] = recurrence_.done_ns(static_cast<int32_t>(i));
    now_score_ += transfers_[i].ns / kFrugality;
  }
  in_order_.resize(transfers_.size());
  std::iota(in_order_.begin(), in_order_.end(), 0);
  std::sort(in_order_.begin(), in_order_.end(), [&](int32_t a, int32_t b) {
    const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
    return std::tuple(transfers_[i].lane, done_ns_[i], a) < std::tuple(transfers_[j].lane, done_ns_[j], b);
  });
  place_of_.resize(transfers_.size());
  for (size_t i = 0; i < in_order_.size(); ++i)
    place_of_[static_cast<size_t>(in_order_[i])] = static_cast<int32_t>(i);
}

// Draws a transfer that compute waits for. Longer stalls are drawn more often. Returns -1 if there is no
// stall.
int32_t Search::stalled() {
  if (stalled_ns_ == 0) return -1;
  auto left = static_cast<int64_t>(draw() % static_cast<uint64_t>(stalled_ns_));
  for (const Stall& stall : stalls_)
    if ((left -= stall.ns) < 0) return stall.transfer;
  return stalls_.back().transfer;
}

// Draws the transfer `at`, or a transfer that the same lane serves shortly before.
int32_t Search::near(int32_t at) {
  int32_t back = 0;
  while (back < 24 && below(6) != 0) ++back;
  const int32_t place = std::max(place_of_[static_cast<size_t>(at)] - back, 0);
  const int32_t found = in_order_[static_cast<size_t>(place)];
  return transfers_[static_cast<size_t>(found)].lane == transfers_[static_cast<size_t>(at)].lane ? found : at;
}

int64_t Search::entered(int32_t tick) const {
  const int32_t ticks = instance_.ticks();
  const int32_t lap = tick >= 0 ? tick / ticks : -((ticks - 1 - tick) / ticks);
  return entered_ns_[static_cast<size_t>(tick - lap * ticks)] + lap * period_ns_;
}

// Returns the last tick that is entered at or before this time.
int32_t Search::last_before(int64_t time_ns) const {
  int64_t lap = time_ns / period_ns_ - (time_ns % period_ns_ < 0 ? 1 : 0);
  lap = std::clamp<int64_t>(lap, -2, 3);
  const auto found = std::upper_bound(entered_ns_.begin(), entered_ns_.end(), time_ns - lap * period_ns_);
  return static_cast<int32_t>(found - entered_ns_.begin()) - 1 +
         static_cast<int32_t>(lap) * instance_.ticks();
}

int64_t Search::write_ns(int32_t index) const {
  return instance_.write_ns[instance_.at(index, now_.route(gap(index).tensor))];
}

int64_t Search::read_ns(int32_t index) const {
  return instance_.read_ns[instance_.at(index, now_.route(gap(index).tensor))];
}

// Returns the tick counted from the begin of the step in which the gap begins. If the tick is at or before
// the gap's start, the result lies in the next step.
int32_t Search::unrolled(const Gap& gap, int32_t tick) const {
  return tick > gap.start ? tick : tick + instance_.ticks();
}
}  // namespace teraio
