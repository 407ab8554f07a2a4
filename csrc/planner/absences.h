// A plan by index: for each gap, whether its tensor is away, and from which tick up to which.
//
//   tick      start+1          out            free               trigger            end
//   kernel    |                |              |                  |                  |
//             tensor is idle   evict issued   bytes are gone     fetch is issued    tensor is needed
//
// Ticks count from the step in which the gap begins; those at or beyond the number of kernels lie in the next
// one, negative ones in the one before: `out` may lie before the gap, from the tick after the write on. Of
// the absences of one version, the first after its write writes it; the others find that copy, and drop.
//
// The ledgers of the device and of the tiers are kept with every change, and a change can be undone.
#pragma once
#include <cstdint>
#include <vector>

#include "planner/recurrence.h"

namespace teraio {
struct Gap {
  int32_t tensor = 0;
  int32_t start = 0;
  int32_t end = 0;
  int32_t version = -1;  // -1: no kernel writes the tensor, so there is always a copy
  int32_t age = 0;       // ticks from the version's write to `start`
  int64_t size_bytes = 0;
};

struct Life {
  int32_t first = 0;  // ticks for which a tier holds a copy: [first, end)
  int32_t end = 0;
};

// What is to be planned. Ledgers have a row per tick.
struct Instance {
  std::vector<int64_t> duration_ns, live_bytes;
  int64_t budget_bytes = 0;
  std::vector<Gap> gaps;
  std::vector<Life> lives;                   // by tensor
  std::vector<int64_t> capacity_bytes;       // by route
  std::vector<int64_t> held_bytes;           // by route and tick: what a tier holds whatever is planned
  std::vector<int64_t> write_ns, read_ns;    // by gap and route
  std::vector<int32_t> out_lane, back_lane;  // by route

  int32_t versions() const { return static_cast<int32_t>(gaps.size()); }  // at most one per gap
  int32_t ticks() const { return static_cast<int32_t>(duration_ns.size()); }
  int32_t routes() const { return static_cast<int32_t>(capacity_bytes.size()); }
  size_t at(int32_t gap, int32_t route) const {
    return static_cast<size_t>(gap) * capacity_bytes.size() + static_cast<size_t>(route);
  }
  void check(const Sharing& lanes) const;  // throws std::invalid_argument or std::overflow_error
};

struct Absence {
  bool away = false;
  int32_t out = 0;
  int32_t free = 0;
  int32_t trigger = 0;
};

class Absences {
 public:
  // Throws std::invalid_argument unless `absences` and `routes` (by tensor, -1: none) are a plan that keeps
  // the budget and the tiers' capacities.
  Absences(const Instance& instance, std::vector<Absence> absences, const std::vector<int32_t>& routes);

  const Absence& operator[](int32_t gap) const { return absences_[static_cast<size_t>(gap)]; }
  int32_t route(int32_t tensor) const { return routes_[static_cast<size_t>(tensor)]; }
  const std::vector<Absence>& all() const { return absences_; }
  const std::vector<int32_t>& routes() const { return routes_; }

  // An absence as given; the tensor must have a route.
  void set(int32_t gap, const Absence& absence);
  // True if there is room for the tensor on that route (-1: on none); then it is on it.
  bool place(int32_t tensor, int32_t route);
  // The gap whose absence writes the version, or -1.
  int32_t writer(int32_t version) const;
  bool writes(int32_t gap) const;

  // Since the last `keep`.
  void undo();
  void keep() { log_.clear(); }

  // The earliest tick of [first, end] from which so many bytes fit up to `end` without a break; the latest
  // until which they fit from `first` on.
  int32_t earliest(int32_t first, int32_t end, int64_t size_bytes) const;
  int32_t latest(int32_t first, int32_t end, int64_t size_bytes) const;
  int32_t fullest() const;  // the tick of the largest row
  bool over() const { return over_ticks_ > 0; }

  // Evictions by gap, then fetches by urgency within their tick.
  void transfers(std::vector<Transfer>& transfers, std::vector<int32_t>& gaps) const;

 private:
  struct Change {
    int32_t gap, tensor, route;
    Absence before;
  };
  void add(int32_t first, int32_t end, int64_t size_bytes);
  void assign(int32_t gap, const Absence& absence);
  void move(int32_t tensor, int32_t route);
  void require(int32_t gap, const Absence& absence) const;

  const Instance& instance_;
  std::vector<Absence> absences_;
  std::vector<int32_t> routes_, by_age_, first_of_, by_need_;
  std::vector<int64_t> rows_, held_, tensor_bytes_;
  int32_t over_ticks_ = 0;
  std::vector<Change> log_;
};
}  // namespace teraio
