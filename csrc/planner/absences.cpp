#include "planner/absences.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace teraio {
namespace {
constexpr int64_t kLimit = int64_t{1} << 61;

void expect(bool right, const char* what, size_t index) {
  if (!right) throw std::invalid_argument(std::string(what) + " (" + std::to_string(index) + ")");
}

int64_t total(const std::vector<int64_t>& values, int64_t so_far, const char* what, int64_t limit = kLimit) {
  for (size_t i = 0; i < values.size(); ++i) {
    expect(values[i] >= 0, what, i);
    if (__builtin_add_overflow(so_far, values[i], &so_far) || so_far >= limit)
      throw std::overflow_error("sums that end with " + std::to_string(values[i]) + " go beyond 64 bits");
  }
  return so_far;
}
}  // namespace

void Instance::check(const Sharing& lanes) const {
  const size_t rows = duration_ns.size(), paths = capacity_bytes.size();
  expect(rows > 0 && rows <= (1 << 29), "kernels: at least one, at most 2^29", rows);
  expect(gaps.size() < (1 << 29) && lives.size() < (1 << 29) && paths < (1 << 16), "gaps, tensors, tiers", 0);
  expect(live_bytes.size() == rows, "a row of bytes per kernel", live_bytes.size());
  expect(held_bytes.size() == rows * paths, "a row of held bytes per route and kernel", held_bytes.size());
  expect(write_ns.size() == gaps.size() * paths && read_ns.size() == write_ns.size(),
         "times per gap and route", write_ns.size());
  expect(budget_bytes >= 0 && budget_bytes < kLimit, "a budget below 2^61", 0);
  // The recurrence refuses a plan if the times of its kernels and transfers have too large a sum. This check
  // sums the times of all kernels, and of the transfers of all gaps on all routes. No plan of the search has
  // a larger sum, so the recurrence accepts every plan.
  int64_t all_ns = 0;
  for (const auto* times : {&write_ns, &read_ns, &duration_ns})
    all_ns = total(*times, all_ns, "a time is negative", Recurrence::kTogetherNs);
  for (size_t i = 0; i < lives.size(); ++i)
    expect(lives[i].first >= 0 && lives[i].first < ticks() && lives[i].first < lives[i].end &&
               lives[i].end - lives[i].first <= ticks(),
           "a life", i);
  expect(out_lane.size() == paths && back_lane.size() == paths, "two lanes per route", out_lane.size());
  for (const auto* all : {&out_lane, &back_lane})
    for (size_t i = 0; i < paths; ++i)
      expect((*all)[i] >= 0 && (*all)[i] < lanes.lanes(), "a lane out of range", i);
  std::vector<int64_t> sizes, slow_ns;
  for (size_t i = 0; i < gaps.size(); ++i) {
    const Gap& gap = gaps[i];
    expect(gap.tensor >= 0 && static_cast<size_t>(gap.tensor) < lives.size(), "a gap's tensor", i);
    expect(gap.start >= 0 && gap.start < ticks(), "a gap's start", i);
    expect(gap.end > gap.start + 1 && gap.end - gap.start <= ticks(), "a gap's end", i);
    expect(gap.version >= -1 && gap.version < versions(), "a gap's version", i);
    expect(gap.age >= 0 && gap.age < ticks(), "a gap's age", i);
    expect(gap.size_bytes > 0, "a gap's size", i);
    sizes.push_back(gap.size_bytes);
    for (size_t path = 0; lanes.needed() && path < paths; ++path)
      for (const int32_t lane : {out_lane[path], back_lane[path]})
        slow_ns.push_back(lanes.slowest_ns(lane, gap.size_bytes));
  }
  total(slow_ns, all_ns, "a time is negative", Recurrence::kTogetherNs);
  total(held_bytes, total(sizes, 0, "sizes of gaps"), "held bytes");
  for (const auto* bytes : {&live_bytes, &capacity_bytes})
    for (size_t i = 0; i < bytes->size(); ++i)
      expect((*bytes)[i] >= 0 && (*bytes)[i] < kLimit, "bytes of a row or tier", i);
}

Absences::Absences(const Instance& instance, std::vector<Absence> absences,
                   const std::vector<int32_t>& routes)
    : instance_(instance),
      absences_(instance.gaps.size()),
      routes_(instance.lives.size(), -1),
      rows_(instance.live_bytes),
      held_(instance.held_bytes),
      tensor_bytes_(instance.lives.size()) {
  expect(absences.size() == absences_.size(), "an absence per gap", absences.size());
  expect(routes.size() == routes_.size(), "a route per tensor", routes.size());
  over_ticks_ = static_cast<int32_t>(
      std::count_if(rows_.begin(), rows_.end(), [&](int64_t row) { return row > instance.budget_bytes; }));
  for (const Gap& gap : instance.gaps) tensor_bytes_[static_cast<size_t>(gap.tensor)] = gap.size_bytes;
  by_age_.resize(instance.gaps.size());
  std::iota(by_age_.begin(), by_age_.end(), 0);
  by_need_ = by_age_;
  const auto& gaps = instance.gaps;
  const auto gap = [&](int32_t i) -> const Gap& { return gaps[static_cast<size_t>(i)]; };
  std::stable_sort(by_age_.begin(), by_age_.end(), [&](int32_t a, int32_t b) {
    return std::pair(gap(a).version, gap(a).age) < std::pair(gap(b).version, gap(b).age);
  });
  std::stable_sort(by_need_.begin(), by_need_.end(), [&](int32_t a, int32_t b) {
    return gap(a).end % instance.ticks() < gap(b).end % instance.ticks();
  });
  first_of_.resize(static_cast<size_t>(instance.versions()) + 1);
  for (int32_t version = 0; version <= instance.versions(); ++version)
    first_of_[static_cast<size_t>(version)] =
        static_cast<int32_t>(std::lower_bound(by_age_.begin(), by_age_.end(), version,
                                              [&](int32_t i, int32_t v) { return gap(i).version < v; }) -
                             by_age_.begin());
  for (size_t tensor = 0; tensor < routes.size(); ++tensor) {
    expect(routes[tensor] >= -1 && routes[tensor] < instance.routes(), "a tensor's route", tensor);
    if (routes[tensor] >= 0)
      expect(place(static_cast<int32_t>(tensor), routes[tensor]), "a tier is full", tensor);
  }
  for (size_t i = 0; i < absences.size(); ++i) {
    if (!absences[i].evicted) continue;
    require(static_cast<int32_t>(i), absences[i]);
    assign(static_cast<int32_t>(i), absences[i]);
  }
  expect(!over(), "the budget is exceeded", static_cast<size_t>(fullest()));
  keep();
}

// Throws if an absence breaks a rule. Only the absences that the caller passes are checked, because the
// search itself makes only absences that keep the rules.
void Absences::require(int32_t index, const Absence& absence) const {
  const Gap& gap = instance_.gaps[static_cast<size_t>(index)];
  expect(route(gap.tensor) >= 0, "an absence without a route", static_cast<size_t>(index));
  const bool right = gap.start < absence.free && absence.free < absence.trigger &&
                     absence.trigger <= gap.end && gap.start - gap.age < absence.out &&
                     absence.out <= absence.free && absence.free - absence.out < instance_.ticks();
  expect(right, "an absence's ticks", static_cast<size_t>(index));
}

void Absences::add(int32_t first, int32_t end, int64_t size_bytes) {
  const int32_t ticks = instance_.ticks();
  const int64_t budget = instance_.budget_bytes;
  const auto run = [&](int32_t from, int32_t to) {
    int32_t change = 0;
    for (int64_t* row = rows_.data() + from; row != rows_.data() + to; ++row) {
      change -= *row > budget;
      *row += size_bytes;
      change += *row > budget;
    }
    over_ticks_ += change;
  };
  const int32_t length = end - first;
  if (length <= 0) return;
  first %= ticks;
  run(first, std::min(first + length, ticks));
  if (first + length > ticks) run(0, first + length - ticks);
}

void Absences::assign(int32_t index, const Absence& absence) {
  Absence& now = absences_[static_cast<size_t>(index)];
  const int64_t size = instance_.gaps[static_cast<size_t>(index)].size_bytes;
  if (now.evicted) add(now.free, now.trigger, size);
  now = absence;
  if (now.evicted) add(now.free, now.trigger, -size);
}

void Absences::set(int32_t gap, const Absence& absence) {
  log_.push_back({gap, -1, -1, (*this)[gap]});
  assign(gap, absence);
}

void Absences::move(int32_t tensor, int32_t route) {
  const Life life = instance_.lives[static_cast<size_t>(tensor)];
  const int64_t size = tensor_bytes_[static_cast<size_t>(tensor)];
  const auto hold = [&](int32_t on, int64_t bytes) {
    if (on < 0) return;
    int64_t* rows = held_.data() + static_cast<int64_t>(on) * instance_.ticks();
    for (int32_t tick = life.first; tick < life.end; ++tick) rows[tick % instance_.ticks()] += bytes;
  };
  hold(this->route(tensor), -size);
  hold(route, size);
  routes_[static_cast<size_t>(tensor)] = route;
}

bool Absences::place(int32_t tensor, int32_t route) {
  const int32_t before = this->route(tensor);
  if (before == route) return true;
  move(tensor, route);
  const Life life = instance_.lives[static_cast<size_t>(tensor)];
  const int32_t ticks = instance_.ticks();
  const int64_t* rows = held_.data() + static_cast<int64_t>(std::max(route, 0)) * ticks;
  int64_t most = *std::max_element(rows + life.first, rows + std::min(life.end, ticks));
  if (life.end > ticks) most = std::max(most, *std::max_element(rows, rows + life.end - ticks));
  if (route >= 0 && most > instance_.capacity_bytes[static_cast<size_t>(route)]) {
    move(tensor, before);
    return false;
  }
  log_.push_back({-1, tensor, before, {}});
  return true;
}

void Absences::undo() {
  for (; !log_.empty(); log_.pop_back()) {
    const Change& change = log_.back();
    if (change.gap >= 0) assign(change.gap, change.before);
    else move(change.tensor, change.route);
  }
}

int32_t Absences::writer(int32_t version) const {
  if (version < 0) return -1;
  const auto at = static_cast<size_t>(version);
  for (int32_t i = first_of_[at]; i < first_of_[at + 1]; ++i)
    if ((*this)[by_age_[static_cast<size_t>(i)]].evicted) return by_age_[static_cast<size_t>(i)];
  return -1;
}

bool Absences::writes(int32_t gap) const {
  return writer(instance_.gaps[static_cast<size_t>(gap)].version) == gap;
}

int32_t Absences::earliest(int32_t first, int32_t end, int64_t size_bytes) const {
  const int64_t most = instance_.budget_bytes - size_bytes;
  int32_t tick = end;
  for (; tick > first; --tick)
    if (rows_[static_cast<size_t>((tick - 1) % instance_.ticks())] > most) break;
  return tick;
}

int32_t Absences::latest(int32_t first, int32_t end, int64_t size_bytes) const {
  const int64_t most = instance_.budget_bytes - size_bytes;
  int32_t tick = first;
  for (; tick < end; ++tick)
    if (rows_[static_cast<size_t>(tick % instance_.ticks())] > most) break;
  return tick;
}

int32_t Absences::fullest() const {
  return static_cast<int32_t>(std::max_element(rows_.begin(), rows_.end()) - rows_.begin());
}

void Absences::transfers(std::vector<Transfer>& transfers, std::vector<int32_t>& gaps) const {
  const int32_t ticks = instance_.ticks();
  transfers.clear();
  gaps.clear();
  for (int32_t index = 0; index < static_cast<int32_t>(absences_.size()); ++index) {
    const Absence& absence = (*this)[index];
    if (!absence.evicted || !writes(index)) continue;
    const int32_t path = route(instance_.gaps[static_cast<size_t>(index)].tensor);
    transfers.push_back({instance_.write_ns[instance_.at(index, path)],
                         instance_.gaps[static_cast<size_t>(index)].size_bytes,
                         instance_.out_lane[static_cast<size_t>(path)], (absence.out + ticks) % ticks,
                         absence.free % ticks, false});
    gaps.push_back(index);
  }
  for (const bool around : {false, true}) {
    for (const int32_t index : by_need_) {
      const Absence& absence = (*this)[index];
      if (!absence.evicted) continue;
      const Gap& gap = instance_.gaps[static_cast<size_t>(index)];
      const int32_t issue = absence.trigger % ticks, wait = gap.end % ticks;
      if ((wait < issue) != around) continue;
      const int32_t path = route(gap.tensor);
      transfers.push_back({instance_.read_ns[instance_.at(index, path)], gap.size_bytes,
                           instance_.back_lane[static_cast<size_t>(path)], issue, wait, true});
      gaps.push_back(index);
    }
  }
}
}  // namespace teraio
