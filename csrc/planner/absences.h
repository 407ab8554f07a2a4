// A plan as arrays, with one absence for each gap. A gap is the time between two uses of a tensor. Its
// absence states whether the tensor is evicted in the gap, and at which ticks the tensor moves. Tick k is the
// point before kernel k.
//
//   tick      start+1          out            free               trigger            end
//   kernel    |                |              |                  |                  |
//             tensor is idle   evict issued   bytes are free     fetch is issued    tensor is needed
//
// Ticks of a gap are counted from the begin of the step in which the gap begins. Ticks at or above the number
// of kernels are in the next step, and negative ticks are in the step before. A version is the contents of a
// tensor from one write to the next. `out` may be before the gap, but must be after the kernel that writes
// the version. The first absence of a version writes a copy to the tier. Later absences of the version use
// this copy, and only drop the tensor.
//
// A ledger has the bytes in use at each tick. Every change of an absence also updates the ledgers of the
// device and of the tiers. undo() takes changes back.
#pragma once
#include <cstdint>
#include <vector>

#include "planner/recurrence.h"

namespace teraio {
struct Gap {
  int32_t tensor = 0;
  int32_t start = 0;
  int32_t end = 0;
  int32_t version = -1;  // number of the version; -1: no kernel writes the tensor, so a copy always exists
  int32_t age = 0;       // number of ticks from the write of the version to `start`
  int64_t size_bytes = 0;
};

struct Life {
  int32_t first = 0;  // a tier holds a copy of the tensor in the ticks [first, end)
  int32_t end = 0;    // may be in the next step
};

// The problem of the search. A route is a tier for evicted tensors, with a lane (a queue of transfers) in
// each direction.
struct Instance {
  std::vector<int64_t> duration_ns, live_bytes;
  int64_t budget_bytes = 0;
  std::vector<Gap> gaps;
  std::vector<Life> lives;              // by tensor
  std::vector<int64_t> capacity_bytes;  // by route
  // By route and tick: bytes that the tier holds of tensors that the search does not move.
  std::vector<int64_t> held_bytes;
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

  // `earliest` returns the earliest tick t in [first, end] so that `size_bytes` more bytes fit at all ticks
  // from t up to `end`. `latest` returns the latest tick t in [first, end] so that they fit at all ticks from
  // `first` up to t.
  int32_t earliest(int32_t first, int32_t end, int64_t size_bytes) const;
  int32_t latest(int32_t first, int32_t end, int64_t size_bytes) const;
  int32_t fullest() const;  // the tick with the most bytes on the device
  bool over() const { return over_ticks_ > 0; }

  // Lists the transfers of the plan: first the evictions in the order of their gaps, then the fetches in the
  // order of the ticks that need the tensors.
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
