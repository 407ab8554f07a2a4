// Lanes that share bandwidths: the first transfer of each lane moves, for its latency nothing, then bytes. A
// shared bandwidth is divided equally among the lanes that move bytes, but none gets more than its own, and
// what it leaves goes to the others. Exact in integers: work is counted in bytes times 10^9, times in ns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace teraio {
struct Lane {
  int64_t bandwidth_bytes_per_s = 1;
  int64_t latency_ns = 0;
  int32_t group = -1;  // the shared bandwidth, -1: none
};

class Sharing {
 public:
  // Throws std::invalid_argument for a bandwidth below 1, a negative latency or a group that is not there.
  Sharing(std::vector<Lane> lanes, std::vector<int64_t> groups_bytes_per_s);

  bool needed() const { return needed_; }  // lanes of some group together have more than the group

  int32_t lanes() const { return static_cast<int32_t>(lanes_.size()); }
  // What so many bytes take when every lane of the group moves.
  int64_t slowest_ns(int32_t lane, int64_t bytes) const;

  void begin(size_t transfers);  // nothing is under way, everything is done, the time is 0
  void issue(int32_t transfer, int32_t lane, int64_t bytes);
  void pass(int64_t ns);
  void finish(int32_t transfer);  // lets time go by until it is done
  bool done(int32_t transfer) const { return done_ns_[static_cast<size_t>(transfer)] >= 0; }
  int64_t now_ns() const { return now_ns_; }
  // When it was done; for one under way, when it would be if its lane had its own bandwidth.
  int64_t done_ns(int32_t transfer) const;
  std::vector<int64_t> left();  // what is left to do

 private:
  using Work = unsigned __int128;
  struct Queued {
    int32_t transfer;
    int64_t bytes;
  };
  struct Queue {
    std::vector<Queued> transfers;
    size_t first = 0;
    int64_t latency_ns = 0;  // of the first transfer, what is left
    Work work = 0;
    int64_t rate = 0;
    int64_t next_ns = 0;  // when its latency is over, or its bytes have moved
    bool empty() const { return first == transfers.size(); }
  };
  void refresh();
  void load(size_t lane);
  void share();

  std::vector<Lane> lanes_;
  std::vector<int64_t> groups_;
  std::vector<std::vector<size_t>> of_group_;  // the slowest lane first
  std::vector<Queue> queues_;
  std::vector<int64_t> done_ns_;
  int64_t now_ns_ = 0, since_ns_ = 0, next_ns_ = 0;
  bool needed_ = false;
};
}  // namespace teraio
