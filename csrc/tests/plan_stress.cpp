// A stress test of the planner's native part, for runs under sanitizers. It plans random problems, and
// problems with invalid numbers.
//
//   cmake -S csrc -B build/asan -DTERAIO_STRESS=ON -DTERAIO_SANITIZE=address,undefined
//   cmake --build build/asan && build/asan/plan_stress [INSTANCES]
//
// For every problem, the search must return a plan within the budget, or throw an exception. undo() must
// restore the plan. The recurrence must compute the step time that the search reports for its best plan.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <random>

#include "planner/search.h"

using namespace teraio;

namespace {
std::mt19937_64 draw(7);
int wrong = 0;

int64_t upto(int64_t most) {
  return static_cast<int64_t>(draw() % static_cast<uint64_t>(most + 1));
}

void expect(bool right, const char* what) {
  if (right) return;
  ++wrong;
  std::printf("wrong: %s\n", what);
}

struct Case {
  Instance instance;
  std::vector<Lane> lanes;
  std::vector<int64_t> groups;
  Sharing sharing() const { return {lanes, groups}; }
  std::vector<Absence> absences;
  std::vector<int32_t> routes;
};

// Makes 1 to 13 tensors, each with at most one version. All tensors are resident, and just fit into the
// budget.
Case random_case() {
  Case made;
  Instance& it = made.instance;
  const auto ticks = static_cast<int32_t>(4 + upto(40)), tensors = static_cast<int32_t>(1 + upto(12)),
             routes = static_cast<int32_t>(1 + upto(1));
  for (int32_t i = 0; i < ticks; ++i) it.duration_ns.push_back(upto(3) == 0 ? 0 : upto(2'000));
  it.live_bytes.assign(static_cast<size_t>(ticks), 0);
  for (int32_t tensor = 0; tensor < tensors; ++tensor) {
    const int64_t size = 1 + upto(9);
    const auto born = static_cast<int32_t>(upto(ticks - 1)), second = static_cast<int32_t>(upto(ticks - 1));
    it.lives.push_back({0, ticks});
    for (int64_t& row : it.live_bytes) row += size;
    const int32_t first = std::min(born, second), last = std::max(born, second);
    const int32_t version = upto(3) == 0 ? -1 : tensor;
    if (last - first > 1) it.gaps.push_back({tensor, first, last, version, 0, size});
    if (first + ticks - last > 1)
      it.gaps.push_back({tensor, last, first + ticks, version, version < 0 ? 0 : last - first, size});
  }
  for (Gap& gap : it.gaps) gap.version = gap.version < 0 ? -1 : gap.version % it.versions();
  for (int32_t route = 0; route < routes; ++route) it.capacity_bytes.push_back(upto(120));
  made.groups = {upto(1) == 0 ? 1'000'000 : 4'000'000};
  for (int32_t route = 0; route < routes; ++route) {
    it.out_lane.push_back(2 * route);
    it.back_lane.push_back(2 * route + 1);
    for (int i = 0; i < 2; ++i)
      made.lanes.push_back({1'000'000 + upto(3'000'000), upto(500), static_cast<int32_t>(upto(1)) - 1});
  }
  it.held_bytes.assign(static_cast<size_t>(ticks * routes), 0);
  for (const Gap& gap : it.gaps)
    for (int32_t route = 0; route < routes; ++route) {
      it.write_ns.push_back(gap.size_bytes * (300 + 500 * route));
      it.read_ns.push_back(gap.size_bytes * (200 + 500 * route));
    }
  it.budget_bytes = it.live_bytes[0];
  made.absences.resize(it.gaps.size());
  made.routes.assign(it.lives.size(), -1);
  return made;
}

// Makes a random plan for the case, and reduces the budget to the plan's peak.
void scatter(Case& made) {
  Absences absences(made.instance, made.absences, made.routes);
  for (int32_t i = 0; i < made.instance.versions(); ++i) {
    const Gap& gap = made.instance.gaps[static_cast<size_t>(i)];
    const auto route = static_cast<int32_t>(upto(made.instance.routes() - 1));
    if (upto(1) == 0 || (absences.route(gap.tensor) < 0 && !absences.place(gap.tensor, route))) continue;
    const auto free = static_cast<int32_t>(gap.start + 1 + upto(gap.end - gap.start - 2));
    const auto trigger = static_cast<int32_t>(free + 1 + upto(gap.end - free - 1));
    absences.set(i, {true, gap.start + 1, free, trigger});
  }
  made.absences = absences.all();
  made.routes = absences.routes();
  std::vector<int64_t> rows = made.instance.live_bytes;
  for (size_t i = 0; i < made.absences.size(); ++i)
    for (int32_t tick = made.absences[i].free; made.absences[i].evicted && tick < made.absences[i].trigger;
         ++tick)
      rows[static_cast<size_t>(tick % made.instance.ticks())] -= made.instance.gaps[i].size_bytes;
  made.instance.budget_bytes = *std::max_element(rows.begin(), rows.end());
}

void undone_changes_leave_no_trace(const Case& made) {
  Absences absences(made.instance, made.absences, made.routes);
  std::vector<Transfer> before, after;
  std::vector<int32_t> gaps;
  absences.transfers(before, gaps);
  const int32_t fullest = absences.fullest();
  for (int i = 0; i < 20; ++i) {
    const auto at = static_cast<int32_t>(upto(made.instance.versions() - 1));
    const Gap& gap = made.instance.gaps[static_cast<size_t>(at)];
    const auto route = static_cast<int32_t>(upto(made.instance.routes() - 1));
    if (!absences.place(gap.tensor, route)) continue;
    absences.set(at, {upto(1) == 0, gap.start + 1, gap.start + 1, gap.end});
  }
  absences.undo();
  absences.transfers(after, gaps);
  bool same = before.size() == after.size() && absences.routes() == made.routes && !absences.over() &&
              absences.fullest() == fullest;
  for (size_t i = 0; same && i < before.size(); ++i)
    same =
        before[i].issue == after[i].issue && before[i].lane == after[i].lane && before[i].ns == after[i].ns;
  expect(same, "an undone change left a trace");
}

void a_search_keeps_its_word(const Case& made) {
  Search search(made.instance, made.sharing(), made.absences, made.routes, draw());
  const int64_t first_ns = search.best_ns();
  search.run(200, 0, upto(1) == 0 ? 1.0 : 0.0);
  expect(search.best_ns() <= first_ns + first_ns / 100, "worse than the start");
  const Absences best(made.instance, search.best(), search.best_routes());  // throws if the plan is invalid
  std::vector<Transfer> transfers;
  std::vector<int32_t> gaps;
  best.transfers(transfers, gaps);
  Recurrence recurrence(made.instance.duration_ns, made.sharing());
  expect(recurrence.settle(transfers) == search.best_ns(), "the recurrence says otherwise");
}

int64_t hostile() {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t values[] = {0,       -1, 1, most, -most - 1, most / 2, int64_t{1} << 31, int64_t{1} << 61,
                            upto(50)};
  return values[upto(8)];
}

int32_t hostile_tick() {
  constexpr int32_t most = std::numeric_limits<int32_t>::max();
  const int32_t values[] = {0, -1, 1, most, -most - 1, most / 2, 1 << 29, static_cast<int32_t>(upto(50))};
  return values[upto(7)];
}

// Replaces one or two numbers of a valid problem by extreme numbers.
void poison(Case& made) {
  Instance& it = made.instance;
  for (auto count = 1 + upto(1); count > 0; --count) {
    Gap& gap = it.gaps[static_cast<size_t>(upto(it.versions() - 1))];
    Absence& absence = made.absences[static_cast<size_t>(upto(it.versions() - 1))];
    switch (upto(16)) {
      case 13: it.out_lane[0] = hostile_tick(); break;
      case 14: made.lanes[0] = {hostile(), hostile(), hostile_tick()}; break;
      case 15: made.groups[0] = hostile(); break;
      case 0: it.duration_ns[static_cast<size_t>(upto(it.ticks() - 1))] = hostile(); break;
      case 1: it.live_bytes[static_cast<size_t>(upto(it.ticks() - 1))] = hostile(); break;
      case 2: it.budget_bytes = hostile(); break;
      case 3: gap.tensor = hostile_tick(); break;
      case 4: gap.start = hostile_tick(); break;
      case 5: gap.end = hostile_tick(); break;
      case 6: gap.version = hostile_tick(); break;
      case 7: gap.age = hostile_tick(); break;
      case 8: gap.size_bytes = hostile(); break;
      case 9: it.write_ns[0] = hostile(); break;
      case 10: it.lives[0] = {hostile_tick(), hostile_tick()}; break;
      case 11: absence = {true, hostile_tick(), hostile_tick(), hostile_tick()}; break;
      case 12: made.routes[0] = hostile_tick(); break;
      default: it.held_bytes[0] = hostile(); break;
    }
  }
}

bool refused(const Case& made) {
  try {
    Search search(made.instance, made.sharing(), made.absences, made.routes, draw());
    search.run(50, 0, 1.0);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

bool refused_transfers() {
  std::vector<int64_t> durations;
  std::vector<Transfer> transfers;
  for (auto i = upto(5); i > 0; --i) durations.push_back(upto(9) == 0 ? hostile() : upto(99));
  for (auto i = upto(6); i > 0; --i)
    transfers.push_back({upto(3) == 0 ? hostile() : upto(99), upto(3) == 0 ? hostile() : upto(99),
                         upto(5) == 0 ? hostile_tick() : 0, upto(5) == 0 ? hostile_tick() : 0,
                         upto(5) == 0 ? hostile_tick() : 0, upto(1) == 0});
  try {
    const Lane shares{upto(1) == 0 ? hostile() : upto(99), upto(9) == 0 ? hostile() : 0, 0};
    Recurrence recurrence(durations, Sharing({shares, Lane{7, 3, 0}}, {upto(3) == 0 ? hostile() : upto(9)}));
    recurrence.settle(transfers);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}
}  // namespace

int main(int count, char** arguments) {
  const int instances = count > 1 ? std::atoi(arguments[1]) : 2'000;
  int searched = 0, poisoned = 0, transfers = 0;
  for (int i = 0; i < instances; ++i) {
    Case made = random_case();
    transfers += refused_transfers() ? 1 : 0;
    if (made.instance.gaps.empty()) continue;
    scatter(made);
    undone_changes_leave_no_trace(made);
    a_search_keeps_its_word(made);
    ++searched;
    poison(made);
    poisoned += refused(made) ? 1 : 0;
  }
  std::printf("searched %d refused %d of them poisoned, %d lists of transfers; wrong %d\n", searched,
              poisoned, transfers, wrong);
  return wrong == 0 && searched > 0 && poisoned > 0 && transfers > 0 ? 0 : 1;
}
