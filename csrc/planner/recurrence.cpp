#include "planner/recurrence.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace teraio {
namespace {
constexpr int64_t kLimit = int64_t{1} << 62;
constexpr int32_t kTicksMost = 1 << 30;

// Returns the sum of two non-negative numbers, limited to kLimit.
int64_t sum(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_add_overflow(a, b, &c) || c >= kLimit ? kLimit : c;
}

[[noreturn]] void refuse(size_t index, const char* what, int64_t value, int64_t end) {
  throw std::invalid_argument("transfer " + std::to_string(index) + ": " + what + " is " +
                              std::to_string(value) + "; it must lie in [0, " + std::to_string(end) + ")");
}
}  // namespace

Recurrence::Recurrence(std::span<const int64_t> duration_ns, Sharing lanes)
    : duration_ns_(duration_ns.begin(), duration_ns.end()), lanes_(std::move(lanes)) {
  if (duration_ns.size() > kTicksMost) throw std::invalid_argument("more than 2^30 kernels");
  for (const int64_t ns : duration_ns) {
    if (ns < 0) throw std::invalid_argument("a kernel's duration is " + std::to_string(ns) + " ns");
    compute_ns_ = sum(compute_ns_, ns);
  }
}

// Checks the transfers. Returns a lower bound of the step time: the sum of all kernels' times, or the time of
// the busiest lane if that is larger.
int64_t Recurrence::check(std::span<const Transfer> transfers) const {
  const auto ticks = static_cast<int32_t>(duration_ns_.size());
  std::vector<int64_t> busy(static_cast<size_t>(lanes_.lanes()));
  int64_t all = compute_ns_;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& t = transfers[i];
    if (t.lane < 0 || t.lane >= lanes_.lanes()) refuse(i, "lane", t.lane, lanes_.lanes());
    if (t.issue < 0 || t.issue >= ticks) refuse(i, "issue", t.issue, ticks);
    if (t.wait < 0 || t.wait >= ticks) refuse(i, "wait", t.wait, ticks);
    if (t.ns < 0) refuse(i, "ns", t.ns, kLimit);
    if (t.bytes < 0) refuse(i, "bytes", t.bytes, kLimit);
    int64_t& lane = busy[static_cast<size_t>(t.lane)];
    lane = sum(lane, t.ns);
    all = sum(all, t.ns);
    if (lanes_.needed()) all = sum(all, lanes_.slowest_ns(t.lane, t.bytes));
  }
  if (all >= kTogetherNs) throw std::overflow_error("times add up beyond 64 bits");
  return std::max(compute_ns_, busy.empty() ? 0 : *std::max_element(busy.begin(), busy.end()));
}

// Sorts the issue and wait events of all transfers by tick and kind, with a stable counting sort.
void Recurrence::sort(std::span<const Transfer> transfers) {
  const auto place = [](const Transfer& t, Kind kind) {
    return static_cast<size_t>(4 * (kind == Kind::issue ? t.issue : t.wait) + (t.fetch ? 2 : 0) +
                               (kind == Kind::wait ? 1 : 0));
  };
  first_.assign(4 * duration_ns_.size() + 2, 0);
  for (const Transfer& t : transfers) {
    ++first_[place(t, Kind::issue) + 2];
    ++first_[place(t, Kind::wait) + 2];
  }
  for (size_t i = 2; i < first_.size(); ++i) first_[i] += first_[i - 1];
  sorted_.resize(2 * transfers.size());
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& t = transfers[i];
    sorted_[static_cast<size_t>(first_[place(t, Kind::issue) + 1]++)] = static_cast<int32_t>(i);
    sorted_[static_cast<size_t>(first_[place(t, Kind::wait) + 1]++)] = static_cast<int32_t>(i);
  }
}

int64_t Recurrence::settle(std::span<const Transfer> transfers) {
  const int64_t least = check(transfers);
  sort(transfers);
  lane_ns_.assign(static_cast<size_t>(lanes_.lanes()), 0);
  lanes_.begin(transfers.size());
  done_ns_.assign(transfers.size(), 0);
  waited_.assign(transfers.size(), {});
  entered_ns_.assign(duration_ns_.size(), 0);
  took_ns_.clear();
  begun_.clear();
  begun_ns_ = 0;
  int64_t now_ns = 0;
  int cycle = 0;
  remember(now_ns);
  while (cycle == 0 && steps() < kMostSteps) {
    const int64_t end_ns = lanes_.needed() ? run_sharing(transfers) : run(transfers, now_ns);
    took_ns_.push_back(end_ns - now_ns);
    now_ns = end_ns;
    remember(now_ns);
    cycle = repeats();
  }
  const int count = cycle > 0 ? cycle : kMostSteps / 2;
  int64_t together = 0;
  for (int i = 0; i < count; ++i) together += took_ns_[took_ns_.size() - 1 - static_cast<size_t>(i)];
  return std::max(least, (together + count - 1) / count);
}

int64_t Recurrence::run(std::span<const Transfer> transfers, int64_t now_ns) {
  begun_ns_ = now_ns;
  const auto ticks = static_cast<int32_t>(duration_ns_.size());
  stalls_.clear();
  const int32_t* first = first_.data();
  for (int32_t tick = 0; tick < ticks; ++tick, first += 4) {
    entered_ns_[static_cast<size_t>(tick)] = now_ns - begun_ns_;
    for (int direction = 0; direction < 4; direction += 2) {
      for (int32_t at = first[direction]; at < first[direction + 1]; ++at) {
        const auto i = static_cast<size_t>(sorted_[static_cast<size_t>(at)]);
        int64_t& lane_ns = lane_ns_[static_cast<size_t>(transfers[i].lane)];
        lane_ns = std::max(now_ns, lane_ns) + transfers[i].ns;
        done_ns_[i] = lane_ns;
      }
      if (first[direction + 1] < first[direction + 2])
        await(tick, first[direction + 1], first[direction + 2], now_ns);
    }
    now_ns += duration_ns_[static_cast<size_t>(tick)];
  }
  return now_ns;
}

// Runs a step as run() does, with lanes that share bandwidths. The end of a transfer then also depends on the
// transfers of other lanes.
int64_t Recurrence::run_sharing(std::span<const Transfer> transfers) {
  begun_ns_ = lanes_.now_ns();
  const auto ticks = static_cast<int32_t>(duration_ns_.size());
  stalls_.clear();
  const int32_t* first = first_.data();
  for (int32_t tick = 0; tick < ticks; ++tick, first += 4) {
    entered_ns_[static_cast<size_t>(tick)] = lanes_.now_ns() - begun_ns_;
    for (int direction = 0; direction < 4; direction += 2) {
      for (int32_t at = first[direction]; at < first[direction + 1]; ++at) {
        const int32_t i = sorted_[static_cast<size_t>(at)];
        const Transfer& transfer = transfers[static_cast<size_t>(i)];
        lanes_.issue(i, transfer.lane, transfer.bytes);
      }
      const int64_t before_ns = lanes_.now_ns();
      int32_t last = -1;
      for (int32_t at = first[direction + 1]; at < first[direction + 2]; ++at) {
        const int32_t i = sorted_[static_cast<size_t>(at)];
        if (!lanes_.done(i)) {
          lanes_.finish(i);
          last = i;
        }
        waited_[static_cast<size_t>(i)] = {lanes_.started_ns(i), lanes_.done_ns(i)};
      }
      if (lanes_.now_ns() > before_ns) stalls_.push_back({tick, last, lanes_.now_ns() - before_ns});
    }
    lanes_.pass(duration_ns_[static_cast<size_t>(tick)]);
  }
  return lanes_.now_ns();
}

int64_t Recurrence::done_ns(int32_t transfer) const {
  return (lanes_.needed() ? lanes_.done_ns(transfer) : done_ns_[static_cast<size_t>(transfer)]) - begun_ns_;
}

std::vector<Times> Recurrence::times(std::span<const Transfer> transfers) const {
  Recurrence next = *this;
  if (lanes_.needed()) next.run_sharing(transfers);
  std::vector<Times> times;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Recurrence& waits = transfers[i].wait < transfers[i].issue ? next : *this;
    times.push_back(lanes_.needed() ? waits.waited_[i] : Times{done_ns_[i] - transfers[i].ns, done_ns_[i]});
    times.back().start_ns -= begun_ns_;
    times.back().end_ns -= begun_ns_;
  }
  return times;
}

void Recurrence::await(int32_t tick, int32_t first, int32_t end, int64_t& now_ns) {
  int64_t until_ns = now_ns;
  int32_t last = -1;
  for (int32_t at = first; at < end; ++at) {
    const int32_t i = sorted_[static_cast<size_t>(at)];
    if (done_ns_[static_cast<size_t>(i)] <= until_ns) continue;
    until_ns = done_ns_[static_cast<size_t>(i)];
    last = i;
  }
  if (last >= 0) stalls_.push_back({tick, last, until_ns - now_ns});
  now_ns = until_ns;
}

// Records the state at the begin of a step: the remaining time of each lane. These times are the whole state.
// Each step queues the same transfers on a lane. The transfers in flight are the last of this queue, because
// compute has waited for all transfers before them.
void Recurrence::remember(int64_t now_ns) {
  if (lanes_.needed()) return begun_.push_back(lanes_.left());
  begun_.emplace_back();
  for (const int64_t ns : lane_ns_) begun_.back().push_back(std::max<int64_t>(ns - now_ns, 0));
}

// Returns how many steps ago a step began in the state in which the next step begins. Returns 0 if no step
// did.
int Recurrence::repeats() const {
  for (int ago = 1; ago <= steps(); ++ago)
    if (begun_[begun_.size() - 1 - static_cast<size_t>(ago)] == begun_.back()) return ago;
  return 0;
}
}  // namespace teraio
