// Lanes that share bandwidths. A lane is a queue of transfers on a link, and serves them one by one. For each
// transfer, the lane first waits for the lane's latency, and then moves the bytes at the lane's rate. A group
// of lanes shares one bandwidth. The bandwidth is divided equally among the lanes of the group that move
// bytes. No lane gets more than its own bandwidth. If a lane needs less than its part, the other lanes share
// the rest. All numbers are exact integers: remaining work is in bytes times 10^9, and time is in ns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace teraio {
struct Lane {
  int64_t bandwidth_bytes_per_s = 1;
  int64_t latency_ns = 0;
  int32_t group = -1;  // index of the bandwidth that the lane shares; -1: none
};

class Sharing {
 public:
  // Throws std::invalid_argument for a bandwidth below 1, a negative latency or a group out of range.
  Sharing(std::vector<Lane> lanes, std::vector<int64_t> groups_bytes_per_s);

  bool needed() const { return needed_; }  // true: the lanes of a group may need more than it has

  int32_t lanes() const { return static_cast<int32_t>(lanes_.size()); }
  // Returns the time in which the lane moves `bytes` while all other lanes of its group also move bytes.
  int64_t slowest_ns(int32_t lane, int64_t bytes) const;

  void begin(size_t transfers);  // resets the time to 0 and empties all queues
  void issue(int32_t transfer, int32_t lane, int64_t bytes);
  void pass(int64_t ns);
  void finish(int32_t transfer);  // lets time pass until the transfer is done
  bool done(int32_t transfer) const { return done_ns_[static_cast<size_t>(transfer)] >= 0; }
  int64_t now_ns() const { return now_ns_; }
  // Returns the time at which a transfer ends. For a transfer in flight, this is an estimate: from now on its
  // lane has the lane's full bandwidth.
  int64_t done_ns(int32_t transfer) const;
  int64_t started_ns(int32_t transfer) const { return started_ns_[static_cast<size_t>(transfer)]; }
  std::vector<int64_t> left();  // per lane: number of transfers in the queue, and remaining work

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
    // The time at which the first transfer's latency ends, or at which all its bytes are moved.
    int64_t next_ns = 0;
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
