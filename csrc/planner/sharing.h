// Lanes that share bandwidths. Each lane serves the first transfer of its queue. For each transfer, the lane
// first waits for the lane's latency, and then moves the bytes at the lane's rate. A shared bandwidth is
// divided equally among the lanes of its group that move bytes. No lane gets more than its own bandwidth. If
// a lane needs less than its part, the other lanes of the group share the rest. All numbers are exact
// integers: work is in bytes times 10^9, and time is in ns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace teraio {
struct Lane {
  int64_t bandwidth_bytes_per_s = 1;
  int64_t latency_ns = 0;
  int32_t group = -1;  // index of the shared bandwidth; -1: none
};

class Sharing {
 public:
  // Throws std::invalid_argument for a bandwidth below 1, a negative latency or a group out of range.
  Sharing(std::vector<Lane> lanes, std::vector<int64_t> groups_bytes_per_s);

  bool needed() const { return needed_; }  // true if the lanes of some group together exceed its bandwidth

  int32_t lanes() const { return static_cast<int32_t>(lanes_.size()); }
  // Returns the time to move `bytes` on the lane while every lane of its group moves bytes.
  int64_t slowest_ns(int32_t lane, int64_t bytes) const;

  void begin(size_t transfers);  // resets the time to 0, with all transfers done
  void issue(int32_t transfer, int32_t lane, int64_t bytes);
  void pass(int64_t ns);
  void finish(int32_t transfer);  // lets time pass until the transfer is done
  bool done(int32_t transfer) const { return done_ns_[static_cast<size_t>(transfer)] >= 0; }
  int64_t now_ns() const { return now_ns_; }
  // Returns the end of a transfer. For a transfer in flight, the end is computed as if its lane had all of
  // its own bandwidth from now on.
  int64_t done_ns(int32_t transfer) const;
  int64_t started_ns(int32_t transfer) const { return started_ns_[static_cast<size_t>(transfer)]; }
  std::vector<int64_t> left();  // per lane: the transfers in its queue and the remaining work

 private:
  using Work = unsigned __int128;
  struct Queued {
    int32_t transfer;
    int64_t bytes;
  };
  struct Queue {
    std::vector<Queued> transfers;
    size_t first = 0;
    int64_t latency_ns = 0;  // remaining latency of the first transfer
    Work work = 0;
    int64_t rate = 0;
    int64_t next_ns = 0;  // time at which the latency or the bytes of the first transfer end
    bool empty() const { return first == transfers.size(); }
  };
  void refresh();
  void load(size_t lane);
  void share();

  std::vector<Lane> lanes_;
  std::vector<int64_t> groups_;
  std::vector<std::vector<size_t>> of_group_;  // lanes of each group, the slowest lane first
  std::vector<Queue> queues_;
  std::vector<int64_t> started_ns_, done_ns_;
  int64_t now_ns_ = 0, since_ns_ = 0, next_ns_ = 0;
  bool needed_ = false;
};
}  // namespace teraio
