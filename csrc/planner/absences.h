// A plan as arrays, with one absence for each gap. An absence states whether the tensor is evicted in the
// gap, and at which ticks the tensor moves.
//
//   tick      start+1          out            free               trigger            end
//   kernel    |                |              |                  |                  |
//             tensor is idle   evict issued   bytes are free     fetch is issued    tensor is needed
//
// Ticks of a gap are counted from the begin of the step in which the gap begins. Ticks at or above the number
// of kernels are in the next step, and negative ticks are in the step before. `out` may be before the gap,
// but not before the tick after the version's write. A version is the contents of a tensor from one write to
// the next. The first absence of a version writes a copy of the version to the tier. Later absences of the
// version find this copy, and only drop the tensor.
//
// Every change also updates the ledger of the device and the ledgers of the tiers. undo() takes changes back.
#pragma once
#include <cstdint>
#include <vector>

#include "planner/recurrence.h"

namespace teraio {
struct Gap {
  int32_t tensor = 0;
  int32_t start = 0;
  int32_t end = 0;
  int32_t version = -1;  // number of the contents; -1: no kernel writes the tensor, so a copy always exists
  int32_t age = 0;       // ticks from the version's write to `start`
  int64_t size_bytes = 0;
};

struct Life {
  int32_t first = 0;  // a tier holds a copy of the tensor in the ticks [first, end)
  int32_t end = 0;
};

// The problem of the search. A ledger has a number of bytes for each tick.
struct Instance {
  std::vector<int64_t> duration_ns, live_bytes;
  int64_t budget_bytes = 0;
  std::vector<Gap> gaps;
  std::vector<Life> lives;                   // by tensor
  std::vector<int64_t> capacity_bytes;       // by route
  std::vector<int64_t> held_bytes;           // by route and tick: bytes that unmoved tensors hold in the tier
  std::vector<int64_t> write_ns, read_ns;    // by gap and route
  std::vector<int32_t> out_lane, back_lane;  // by route

  // Returns an upper limit for the number of versions: at most one version per gap.
  int32_t versions() const { return static_cast<int32_t>(gaps.size()); }
  int32_t ticks() const { return static_cast<int32_t>(duration_ns.size()); }
  int32_t routes() const { return static_cast<int32_t>(capacity_bytes.size()); }
  size_t at(int32_t gap, int32_t route) const {
    return static_cast<size_t>(gap) * capacity_bytes.size() + static_cast<size_t>(route);
  }
  // Throws std::invalid_argument or std::overflow_error if the instance is invalid.
  void check(const Sharing& lanes) const;
};

struct Absence {
  bool evicted = false;
  int32_t out = 0;
  int32_t free = 0;
  int32_t trigger = 0;
};

class Absences {
 public:
  // Throws std::invalid_argument unless `absences` and `routes` are a plan within the budget and the
  // capacities of the tiers. `routes` has the route of each tensor, or -1 for none.
  Absences(const Instance& instance, std::vector<Absence> absences, const std::vector<int32_t>& routes);

  const Absence& operator[](int32_t gap) const { return absences_[static_cast<size_t>(gap)]; }
  int32_t route(int32_t tensor) const { return routes_[static_cast<size_t>(tensor)]; }
  const std::vector<Absence>& all() const { return absences_; }
  const std::vector<int32_t>& routes() const { return routes_; }

  // Sets the absence of a gap. The tensor must have a route.
  void set(int32_t gap, const Absence& absence);
  // Gives the tensor a route (-1: none) if the route's tier has room. Returns false if the tier has no room.
  bool place(int32_t tensor, int32_t route);
  // Returns the gap whose absence writes the copy of the version, or -1.
  int32_t writer(int32_t version) const;
  bool writes(int32_t gap) const;

  // Undoes all changes since the last `keep`.
  void undo();
  void keep() { log_.clear(); }

  // `earliest` returns the earliest tick from which on `size_bytes` more bytes fit at every tick up to `end`.
  // `latest` returns the latest tick up to which `size_bytes` more bytes fit at every tick from `first` on.
  // Both results are in [first, end].
  int32_t earliest(int32_t first, int32_t end, int64_t size_bytes) const;
  int32_t latest(int32_t first, int32_t end, int64_t size_bytes) const;
  int32_t fullest() const;  // the tick with the most bytes on the device
  bool over() const { return over_ticks_ > 0; }

  // Lists the transfers of the plan. The evictions come first, in the order of their gaps. The fetches
  // follow, in the order of the ticks that need the tensors.
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
