// The close of a transfer engine. The engine drops queued operations, waits for running operations, and
// abandons hanging operations.
#include <algorithm>

#include "transfer/transfers.h"

namespace teraio {
bool Transfers::close(uint64_t within_ns) {
  if (forked()) return false;
  const uint64_t until = monotonic_ns() + within_ns;
  Lock lock(mutex_);
  if (closed_) return lost_flights_ == 0;
  closed_ = true;
  for (int i = 0; i < static_cast<int>(transfers_.size()); ++i) {
    Transfer& t = *transfers_[static_cast<size_t>(i)];
    if (t.state != State::active) continue;
    t.cancelled = true;
    drop_queued(i);
    settle(i);
  }
  const auto still = [&](bool copying) {
    return std::any_of(flights_.begin(), flights_.end(), [&](const Flight& f) {
      return f.stage != Stage::idle && !f.abandoned && (!copying || f.stage == Stage::copying);
    });
  };
  while (still(false) && monotonic_ns() < until) {
    if (!io_->driven()) {
      settled_.wait_for(lock, std::chrono::milliseconds(5));
      continue;
    }
    lock.unlock();
    const bool more = io_->drive();
    lock.lock();
    if (!more) break;
  }
  // A hanging operation may still end at any time. After abandon(), the operation can touch only its slab,
  // which is never used again.
  for (Flight& f : flights_)
    if (!f.abandoned && (f.stage == Stage::issued || f.stage == Stage::running)) abandon(f);
  while (still(true)) settled_.wait_for(lock, std::chrono::milliseconds(5));
  lock.unlock();
  const uint64_t now = monotonic_ns();
  const bool joined = io_->close(std::max<uint64_t>(until > now ? until - now : 0, 100'000'000));
  // A worker that hangs in the kernel may still call back, so the transfer engine is never freed.
  if (!joined) new std::shared_ptr<Transfers>(shared_from_this());
  return joined;
}
}  // namespace teraio
