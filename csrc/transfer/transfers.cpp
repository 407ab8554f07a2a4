// The public functions of the transfer engine: tickets, waits, cancellation.
#include "transfer/transfers.h"

#include <algorithm>

#include "base/check.h"
#include "base/fork.h"

namespace teraio {
namespace {
constexpr uint64_t kBlock = 4096;
}

Transfers::Transfers(std::shared_ptr<Io> io, std::shared_ptr<Slabs> slabs, std::shared_ptr<Copier> copier,
                     Settings settings)
    : io_(std::move(io)),
      slabs_(std::move(slabs)),
      copier_(std::move(copier)),
      settings_(settings),
      born_(fork_count()),
      blocks_(io_->files()),
      flights_(static_cast<size_t>(slabs_->count())),
      files_(static_cast<size_t>(io_->files())) {
  if (slabs_->free() != slabs_->count() || !slabs_->claim())
    throw std::invalid_argument("these slabs serve another transfer engine; give each engine its own");
  if (!io_->claim())
    throw std::invalid_argument("this Io serves another transfer engine; give each engine its own");
  if (io_->files() < 1 || io_->files() > 64) throw std::invalid_argument("give between 1 and 64 files");
  if (settings_.max_transfers < 1) throw std::invalid_argument("max_transfers must be at least 1");
  if (settings_.deadline_ns == 0) throw std::invalid_argument("the deadline must be longer than 0");
  for (size_t i = 0; i < flights_.size(); ++i) {
    flights_[i].owner = this;
    flights_[i].slab = static_cast<int>(i);
    flights_[i].before = before;
    flights_[i].complete = complete;
  }
}

bool Transfers::forked() const {
  return born_ != fork_count();
}

// Finds the record of a ticket. A ticket consists of the record's index and of a serial number, which each
// reuse of the record increments. So a stale ticket is always refused.
Transfers::Transfer& Transfers::find(uint64_t ticket) {
  const uint64_t index = ticket & 0xffffffff;
  if (index >= transfers_.size() || transfers_[index]->serial != ticket >> 32 ||
      transfers_[index]->state == State::free || transfers_[index]->detached)
    throw std::invalid_argument("ticket " + std::to_string(ticket) +
                                " is unknown: it was released or never issued");
  return *transfers_[index];
}

int Transfers::fresh() {
  if (unfinished_ >= settings_.max_transfers)
    throw QueueFull(std::to_string(unfinished_) +
                    " transfers are unfinished, which is the limit (max_transfers); wait "
                    "for one before submitting more");
  if (free_.empty()) {
    if (transfers_.size() >= 4 * static_cast<size_t>(settings_.max_transfers) + 1024)
      throw QueueFull(std::to_string(transfers_.size()) +
                      " tickets were never released; wait for them or release them");
    transfers_.push_back(std::make_unique<Transfer>());
    transfers_.back()->cursors.resize(files_.size());
    free_.push_back(static_cast<int>(transfers_.size()) - 1);
  }
  const int index = free_.back();
  free_.pop_back();
  return index;
}

void Transfers::recycle(int index) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  CHECK(t.flying == 0 && t.unissued == 0 && t.state != State::active);
  t.state = State::free;
  t.serial =
      t.serial == 0x7fffffff ? 1 : t.serial + 1;  // 31 bits, so that a ticket fits a signed 64-bit integer
  free_.push_back(index);
}

void Transfers::check_order(const Order& order) const {
  // With this limit of 16 TiB, sums of lengths and offsets cannot overflow.
  if (order.bytes > uint64_t{1} << 44)
    throw std::invalid_argument("a transfer of " + std::to_string(order.bytes) + " bytes is out of range");
  uint64_t total = 0;
  for (const Piece& piece : *order.pieces) {
    if (piece.file < 0 || piece.file >= io_->files())
      throw std::invalid_argument("piece names file " + std::to_string(piece.file) + " of " +
                                  std::to_string(io_->files()));
    if (piece.offset % kBlock != 0)
      throw std::invalid_argument("piece offset " + std::to_string(piece.offset) + " is no multiple of 4096");
    if (piece.bytes == 0 || piece.bytes > order.bytes || piece.offset > (uint64_t{1} << 62))
      throw std::invalid_argument("piece of " + std::to_string(piece.bytes) + " bytes at offset " +
                                  std::to_string(piece.offset) + " is out of range");
    total += piece.bytes;
  }
  if (total != order.bytes)
    throw std::invalid_argument("pieces cover " + std::to_string(total) + " bytes of " +
                                std::to_string(order.bytes));
  if (order.bytes > 0 && order.address == 0) throw std::invalid_argument("the address is null");
}

void Transfers::cut(Transfer& t, const Order& order) {
  t.chunks.clear();
  std::fill(t.cursors.begin(), t.cursors.end(), Cursor{});
  uint64_t at = 0;
  for (const Piece& piece : *order.pieces) {
    for (uint64_t done = 0; done < piece.bytes;) {
      const uint64_t bytes = std::min(piece.bytes - done, slabs_->slab_bytes());
      t.chunks.push_back({piece.file, -1, piece.offset + done, bytes, at});
      done += bytes;
      at += bytes;
    }
  }
  for (int i = static_cast<int>(t.chunks.size()) - 1; i >= 0; --i) {
    Chunk& chunk = t.chunks[static_cast<size_t>(i)];
    Cursor& cursor = t.cursors[static_cast<size_t>(chunk.file)];
    chunk.next = cursor.chunk;
    cursor.chunk = i;
  }
  t.unissued = static_cast<int>(t.chunks.size());
}

uint64_t Transfers::submit(const Order& order) {
  if (forked())
    throw std::runtime_error("this transfer engine belongs to the parent process; make one after the fork");
  check_order(order);
  Lock lock(mutex_);
  if (closed_) throw std::runtime_error("the transfer engine is closed");
  const int index = fresh();
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  try {
    cut(t, order);
  } catch (...) {  // no memory for the list of chunks
    free_.push_back(index);
    throw;
  }
  t.state = State::active;
  t.op = order.op;
  t.demand = order.demand;
  t.detached = t.cancelled = false;
  t.address = order.address;
  t.tag = order.tag;
  t.generation = order.generation;
  t.event = order.event;
  t.deadline_ns = order.deadline_ns != 0 ? order.deadline_ns : settings_.deadline_ns;
  t.flying = t.started = 0;
  t.failure = {};
  t.times = {io_->now_ns(), 0, 0};
  ++unfinished_;
  ++stats_.submitted;
  queued_ += t.unissued;
  stats_.queued_max = std::max(stats_.queued_max, static_cast<uint64_t>(queued_));
  const uint64_t ticket = static_cast<uint64_t>(t.serial) << 32 | static_cast<uint64_t>(index);
  for (int file = 0; file < io_->files(); ++file)
    if (t.cursors[static_cast<size_t>(file)].chunk >= 0) enqueue(index, file);
  if (slabs_->quarantined() > 0) fail_stuck();
  settle(index);  // ends the transfer at once if it has no bytes, or if fail_stuck() has failed it
  pump();
  return ticket;
}

State Transfers::state(uint64_t ticket) {
  if (forked()) throw std::runtime_error("this transfer engine belongs to the parent process");
  if (io_->driven()) io_->drive();
  Lock lock(mutex_);
  expire(io_->now_ns());
  return find(ticket).state;
}

State Transfers::wait(uint64_t ticket, uint64_t slice_ns) {
  if (forked()) throw std::runtime_error("this transfer engine belongs to the parent process");
  promote(ticket);  // makes the transfer urgent, because a thread waits for it
  const uint64_t until = monotonic_ns() + slice_ns;
  Lock lock(mutex_);
  for (;;) {
    const uint64_t next = expire(io_->now_ns());
    if (const State state = find(ticket).state; state != State::active) return state;
    if (io_->driven()) {
      lock.unlock();
      const bool more = io_->drive();
      lock.lock();
      if (more || find(ticket).state != State::active) continue;
      CHECK(next != UINT64_MAX);  // an unfinished transfer has a flight, and each flight has a deadline
      io_->advance_to(next);
      continue;
    }
    const uint64_t now = monotonic_ns();
    if (now >= until) return State::active;
    settled_.wait_for(lock, std::chrono::nanoseconds(std::min(next > now ? next - now : 0, until - now)));
  }
}

Failure Transfers::failure(uint64_t ticket) {
  Lock lock(mutex_);
  return find(ticket).failure;
}

Times Transfers::times(uint64_t ticket) {
  Lock lock(mutex_);
  return find(ticket).times;
}

bool Transfers::promote(uint64_t ticket) {
  Lock lock(mutex_);
  Transfer& t = find(ticket);
  if (t.demand || t.state != State::active) return false;
  const int index = static_cast<int>(ticket & 0xffffffff);
  uint64_t moved = 0;  // files whose queue changed: one bit per file, at most 64 files
  for (int file = 0; file < io_->files(); ++file) {
    if (!t.cursors[static_cast<size_t>(file)].queued) continue;
    unqueue(index, file);
    moved |= uint64_t{1} << file;
  }
  t.demand = true;
  for (int file = 0; file < io_->files(); ++file)
    if ((moved >> file & 1) != 0) enqueue(index, file);
  return moved != 0;
}

bool Transfers::cancel(uint64_t ticket) {
  if (forked()) throw std::runtime_error("this transfer engine belongs to the parent process");
  Lock lock(mutex_);
  Transfer& t = find(ticket);
  if (t.state != State::active) return false;
  const bool untouched = t.started == 0;
  t.cancelled = true;
  drop_queued(static_cast<int>(ticket & 0xffffffff));
  settle(static_cast<int>(ticket & 0xffffffff));
  return untouched;
}

void Transfers::release(uint64_t ticket) {
  if (forked()) return;
  Lock lock(mutex_);
  Transfer& t = find(ticket);
  if (t.state == State::active) t.detached = true;
  else recycle(static_cast<int>(ticket & 0xffffffff));
}

void Transfers::forget(const std::vector<Piece>& pieces) {
  if (forked()) return;
  Lock lock(mutex_);
  for (const Piece& piece : pieces) blocks_.forget(piece.file, piece.offset, piece.bytes);
}

std::vector<Piece> Transfers::lost() {
  Lock lock(mutex_);
  return lost_;
}

Stats Transfers::stats() {
  Lock lock(mutex_);
  return stats_;
}

int Transfers::unfinished() {
  Lock lock(mutex_);
  return unfinished_;
}

uint64_t Transfers::blocks() {
  Lock lock(mutex_);
  return blocks_.count();
}
}  // namespace teraio
