// Python bindings of the planner's native part. Its functions take and return arrays of integers.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <stdexcept>

#include "bind/bindings.h"
#include "planner/recurrence.h"
#include "planner/search.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace teraio {
namespace {
using Row = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <int columns>
using Table = nb::ndarray<const int64_t, nb::shape<-1, columns>, nb::c_contig, nb::device::cpu>;
using Made = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

std::span<const int64_t> span_of(const Row& row) {
  return {row.data(), row.size()};
}

std::vector<int64_t> list_of(const Row& row) {
  return {row.data(), row.data() + row.size()};
}

int32_t narrow(int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("an index is " + std::to_string(value));
  return static_cast<int32_t>(value);
}

std::vector<Transfer> transfers_of(const Table<6>& table) {
  std::vector<Transfer> transfers(table.shape(0));
  for (size_t i = 0; i < transfers.size(); ++i) {
    const int64_t* row = table.data() + 6 * i;
    transfers[i] = {row[1], row[2], narrow(row[0]), narrow(row[3]), narrow(row[4]), row[5] != 0};
  }
  return transfers;
}

Sharing sharing_of(const Table<3>& lanes, const Row& groups) {
  std::vector<Lane> made(lanes.shape(0));
  for (size_t i = 0; i < made.size(); ++i) {
    const int64_t* row = lanes.data() + 3 * i;
    made[i] = {row[0], row[1], narrow(row[2])};
  }
  return {std::move(made), list_of(groups)};
}

std::vector<int32_t> narrow_list(const Row& row) {
  std::vector<int32_t> made;
  for (const int64_t value : span_of(row)) made.push_back(narrow(value));
  return made;
}

std::vector<Gap> gaps_of(const Table<6>& table) {
  std::vector<Gap> gaps(table.shape(0));
  for (size_t i = 0; i < gaps.size(); ++i) {
    const int64_t* row = table.data() + 6 * i;
    gaps[i] = {narrow(row[0]), narrow(row[1]), narrow(row[2]), narrow(row[3]), narrow(row[4]), row[5]};
  }
  return gaps;
}

std::vector<Life> lives_of(const Table<2>& table) {
  std::vector<Life> lives(table.shape(0));
  for (size_t i = 0; i < lives.size(); ++i)
    lives[i] = {narrow(table.data()[2 * i]), narrow(table.data()[2 * i + 1])};
  return lives;
}

std::vector<Absence> absences_of(const Table<4>& table) {
  std::vector<Absence> absences(table.shape(0));
  for (size_t i = 0; i < absences.size(); ++i) {
    const int64_t* row = table.data() + 4 * i;
    absences[i] = {row[0] != 0, narrow(row[1]), narrow(row[2]), narrow(row[3])};
  }
  return absences;
}

Made made_of(std::vector<int64_t> values) {
  auto* kept = new std::vector<int64_t>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Made(kept->data(), {kept->size()}, owner);
}

std::tuple<int64_t, int, Made> settle(const Row& durations, const Table<3>& lanes, const Row& groups,
                                      const Table<6>& table) {
  const std::vector<Transfer> transfers = transfers_of(table);
  Recurrence recurrence(span_of(durations), sharing_of(lanes, groups));
  int64_t period_ns;
  {
    nb::gil_scoped_release release;
    period_ns = recurrence.settle(transfers);
  }
  const auto entered = recurrence.entered_ns();
  return {period_ns, recurrence.steps(), made_of({entered.begin(), entered.end()})};
}

// Returns for the last simulated step: its time, the entry times of its ticks, the start and end of each
// transfer, and (tick, ns) of each stall.
std::tuple<int64_t, Made, Made, Made> last_step(const Row& durations, const Table<3>& lanes,
                                                const Row& groups, const Table<6>& table) {
  const std::vector<Transfer> transfers = transfers_of(table);
  Recurrence recurrence(span_of(durations), sharing_of(lanes, groups));
  std::vector<int64_t> times, stalls;
  {
    nb::gil_scoped_release release;
    recurrence.settle(transfers);
    for (const Times& it : recurrence.times(transfers)) times.insert(times.end(), {it.start_ns, it.end_ns});
  }
  for (const Stall& it : recurrence.stalls()) stalls.insert(stalls.end(), {it.tick, it.ns});
  const auto entered = recurrence.entered_ns();
  return {recurrence.took_ns(), made_of({entered.begin(), entered.end()}), made_of(std::move(times)),
          made_of(std::move(stalls))};
}

void make_search(Search* self, const Row& durations, const Row& live, int64_t budget, const Table<6>& gaps,
                 const Table<2>& lives, const Row& capacities, const Row& held, const Row& write_ns,
                 const Row& read_ns, const Row& out_lanes, const Row& back_lanes, const Table<3>& lanes,
                 const Row& groups, const Table<4>& absences, const Row& routes, uint64_t seed) {
  Instance instance{list_of(durations),     list_of(live),          budget,
                    gaps_of(gaps),          lives_of(lives),        list_of(capacities),
                    list_of(held),          list_of(write_ns),      list_of(read_ns),
                    narrow_list(out_lanes), narrow_list(back_lanes)};
  new (self) Search(std::move(instance), sharing_of(lanes, groups), absences_of(absences),
                    narrow_list(routes), seed);
}

Made best(const Search& search) {
  std::vector<int64_t> rows;
  for (const Absence& it : search.best())
    rows.insert(rows.end(), {it.evicted ? 1 : 0, it.out, it.free, it.trigger});
  return made_of(std::move(rows));
}

Made best_routes(const Search& search) {
  return made_of({search.best_routes().begin(), search.best_routes().end()});
}
}  // namespace

void bind_planner(nb::module_& m) {
  nb::class_<Search>(m, "Search")
      .def("__init__", &make_search, "durations_ns"_a, "live_bytes"_a, "budget_bytes"_a, "gaps"_a, "lives"_a,
           "capacities_bytes"_a, "held_bytes"_a, "write_ns"_a, "read_ns"_a, "out_lanes"_a, "back_lanes"_a,
           "lanes"_a, "groups"_a, "absences"_a, "routes"_a, "seed"_a)
      .def("run", &Search::run, "rounds"_a, "until_ns"_a, "heat"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("best_ns", &Search::best_ns)
      .def_prop_ro("evaluations", &Search::evaluations)
      .def("best", &best)
      .def("best_routes", &best_routes);
  m.def("settle", &settle, "durations_ns"_a, "lanes"_a, "groups"_a, "transfers"_a);
  m.def("last_step", &last_step, "durations_ns"_a, "lanes"_a, "groups"_a, "transfers"_a);
}
}  // namespace teraio
