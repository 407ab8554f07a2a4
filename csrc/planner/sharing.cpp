#include "planner/sharing.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace teraio {
namespace {
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
}  // namespace

Sharing::Sharing(std::vector<Lane> lanes, std::vector<int64_t> groups)
    : lanes_(std::move(lanes)),
      groups_(std::move(groups)),
      of_group_(groups_.size()),
      queues_(lanes_.size()) {
  for (const int64_t group : groups_)
    if (group < 1) throw std::invalid_argument("a shared bandwidth below 1");
  std::vector<unsigned __int128> together(groups_.size());
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Lane& lane = lanes_[i];
    if (lane.bandwidth_bytes_per_s < 1 || lane.latency_ns < 0)
      throw std::invalid_argument("a lane's bandwidth below 1, or its latency below 0");
    if (lane.group < -1 || lane.group >= static_cast<int32_t>(groups_.size()))
      throw std::invalid_argument("a lane's group is out of range");
    if (lane.group < 0) continue;
    const auto group = static_cast<size_t>(lane.group);
    of_group_[group].push_back(i);
    together[group] += static_cast<uint64_t>(lane.bandwidth_bytes_per_s);
    needed_ = needed_ || together[group] > static_cast<uint64_t>(groups_[group]);
  }
  for (auto& group : of_group_)
    std::stable_sort(group.begin(), group.end(), [&](size_t a, size_t b) {
      return lanes_[a].bandwidth_bytes_per_s < lanes_[b].bandwidth_bytes_per_s;
    });
}

int64_t Sharing::slowest_ns(int32_t index, int64_t bytes) const {
  const Lane& lane = lanes_[static_cast<size_t>(index)];
  int64_t rate = lane.bandwidth_bytes_per_s;
  if (lane.group >= 0) {
    const auto group = static_cast<size_t>(lane.group);
    rate =
        std::max<int64_t>(std::min(rate, groups_[group] / static_cast<int64_t>(of_group_[group].size())), 1);
  }
  const Work ns = static_cast<Work>(bytes) * kSecond / static_cast<Work>(rate) + 1 +
                  static_cast<uint64_t>(lane.latency_ns);
  return ns > static_cast<Work>(kNever) ? kNever : static_cast<int64_t>(ns);
}

void Sharing::begin(size_t transfers) {
  started_ns_.assign(transfers, 0);
  done_ns_.assign(transfers, 0);
  for (Queue& queue : queues_) {
    queue.transfers.clear();
    queue.first = 0;
  }
  now_ns_ = since_ns_ = 0;
  next_ns_ = kNever;
}

void Sharing::issue(int32_t transfer, int32_t lane, int64_t bytes) {
  Queue& queue = queues_[static_cast<size_t>(lane)];
  done_ns_[static_cast<size_t>(transfer)] = -1;
  if (!queue.empty()) return queue.transfers.push_back({transfer, bytes});
  refresh();  // first count the bytes that other lanes have moved at their old rates
  queue.transfers.assign(1, {transfer, bytes});
  queue.first = 0;
  load(static_cast<size_t>(lane));
  refresh();
}

void Sharing::pass(int64_t ns) {
  const int64_t until_ns = now_ns_ + ns;
  while (next_ns_ <= until_ns) {
    now_ns_ = next_ns_;
    refresh();
  }
  now_ns_ = until_ns;
}

void Sharing::finish(int32_t transfer) {
  while (!done(transfer)) {
    now_ns_ = next_ns_;
    refresh();
  }
}

// Begins the first transfer in a lane's queue: sets the lane's remaining latency and bytes.
void Sharing::load(size_t lane) {
  Queue& queue = queues_[lane];
  started_ns_[static_cast<size_t>(queue.transfers[queue.first].transfer)] = now_ns_;
  queue.latency_ns = lanes_[lane].latency_ns;
  queue.work = static_cast<Work>(queue.transfers[queue.first].bytes) * kSecond;
  queue.rate = 0;
}

// Counts the bytes that lanes have moved since the last call, and ends finished transfers. Then computes the
// new rate of each lane, and the time at which the next transfer ends or begins to move bytes.
void Sharing::refresh() {
  const int64_t passed_ns = now_ns_ - since_ns_;
  since_ns_ = now_ns_;
  for (size_t i = 0; i < queues_.size(); ++i) {
    Queue& queue = queues_[i];
    if (queue.empty()) continue;
    if (queue.latency_ns > 0) {
      queue.latency_ns -= passed_ns;
    } else {
      const Work moved = static_cast<Work>(queue.rate) * static_cast<uint64_t>(passed_ns);
      queue.work = queue.work > moved ? queue.work - moved : 0;
    }
    while (queue.latency_ns == 0 && queue.work == 0) {
      done_ns_[static_cast<size_t>(queue.transfers[queue.first].transfer)] = now_ns_;
      if (++queue.first == queue.transfers.size()) break;
      load(i);
    }
  }
  share();
  next_ns_ = kNever;
  for (Queue& queue : queues_) {
    if (queue.empty()) continue;
    const Work left_ns = (queue.work + static_cast<uint64_t>(queue.rate) - 1) / static_cast<Work>(queue.rate);
    queue.next_ns = now_ns_ + (queue.latency_ns > 0 ? queue.latency_ns : static_cast<int64_t>(left_ns));
    next_ns_ = std::min(next_ns_, queue.next_ns);
  }
}

void Sharing::share() {
  for (size_t i = 0; i < queues_.size(); ++i) queues_[i].rate = lanes_[i].bandwidth_bytes_per_s;
  for (size_t group = 0; group < groups_.size(); ++group) {
    const auto moves = [&](size_t i) { return !queues_[i].empty() && queues_[i].latency_ns == 0; };
    int64_t count = std::count_if(of_group_[group].begin(), of_group_[group].end(), moves);
    int64_t rest = groups_[group];
    for (const size_t i : of_group_[group]) {
      if (!moves(i)) continue;
      queues_[i].rate = std::max<int64_t>(std::min(queues_[i].rate, rest / count), 1);
      rest = std::max<int64_t>(rest - queues_[i].rate, 0);
      --count;
    }
  }
}

int64_t Sharing::done_ns(int32_t transfer) const {
  if (done(transfer)) return done_ns_[static_cast<size_t>(transfer)];
  for (size_t i = 0; i < queues_.size(); ++i) {
    int64_t ns = now_ns_;
    for (size_t at = queues_[i].first; at < queues_[i].transfers.size(); ++at) {
      const Queued& queued = queues_[i].transfers[at];
      ns += lanes_[i].latency_ns + static_cast<int64_t>(static_cast<Work>(queued.bytes) * kSecond /
                                                        static_cast<Work>(lanes_[i].bandwidth_bytes_per_s));
      if (queued.transfer == transfer) return ns;
    }
  }
  return now_ns_;
}

std::vector<int64_t> Sharing::left() {
  refresh();
  std::vector<int64_t> left;
  for (const Queue& queue : queues_) {
    left.push_back(-1);
    for (size_t at = queue.first; at < queue.transfers.size(); ++at)
      left.push_back(queue.transfers[at].transfer);
    if (queue.empty()) continue;
    left.push_back(queue.latency_ns);
    left.push_back(static_cast<int64_t>(queue.work >> 32));
    left.push_back(static_cast<int64_t>(queue.work & 0xFFFFFFFF));
  }
  return left;
}
}  // namespace teraio
