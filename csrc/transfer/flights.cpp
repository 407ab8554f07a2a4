// Flights. A flight is a chunk with a slab, from its submission to the I/O engine until its last byte is
// copied.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "transfer/transfers.h"

namespace teraio {
namespace {
constexpr uint64_t kBlock = 4096;
uint64_t padded(uint64_t bytes) {
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

bool passing(int error) {
  return error == EIO || error == EAGAIN || error == ENOMEM || error == ETIMEDOUT || error == EREMOTEIO ||
         error == 0;
}
bool no_room(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG;
}
}  // namespace

bool Transfers::before(Request& request) {
  auto& flight = static_cast<Flight&>(request);
  return flight.owner->fill(flight);
}

void Transfers::complete(Request& request, Result result) {
  auto& flight = static_cast<Flight&>(request);
  flight.owner->land(flight, result);
}

// Submits a request for the bytes of the flight's chunk that are not yet moved.
void Transfers::aim(Flight& f) {
  const Transfer& t = *transfers_[static_cast<size_t>(f.transfer)];
  const Chunk& chunk = t.chunks[static_cast<size_t>(f.chunk)];
  f.offset = chunk.offset + f.moved;
  f.buffer = slabs_->at(f.slab) + f.moved;
  f.bytes = padded(chunk.bytes) - f.moved;
  f.delay_ns = 0;
  f.stage = Stage::issued;
  f.issued_ns = io_->now_ns();
  ++(t.op == Op::write ? stats_.writes : stats_.reads);
  io_->submit(f);
}

// For an eviction, copies the chunk's bytes from the tensor to the slab. Runs on the I/O engine's thread,
// before the operation. Returns false if the operation is not needed any more. The check for an abandoned
// flight is first, because the transfer of an abandoned flight may no longer exist.
bool Transfers::fill(Flight& f) {
  Lock lock(mutex_);
  if (f.abandoned) return false;
  Transfer& t = *transfers_[static_cast<size_t>(f.transfer)];
  if (t.cancelled || t.failure.cause != Cause::none) return false;
  if (t.op == Op::write && !f.filled) {
    const Chunk& chunk = t.chunks[static_cast<size_t>(f.chunk)];
    f.stage = Stage::copying;
    lock.unlock();
    std::byte* slab = slabs_->at(f.slab);
    const uint64_t start = monotonic_ns();
    const Copied copied = copier_->to_slab(slab, t.address + chunk.at, chunk.bytes, t.event, f.checked);
    std::memset(slab + chunk.bytes, 0, padded(chunk.bytes) - chunk.bytes);
    const uint64_t spent = monotonic_ns() - start;
    lock.lock();
    stats_.copy_out_ns += spent;
    f.digest = copied.digest;
    f.filled = true;
    // The deadline begins after the copy, because it limits only the drive's time.
    f.issued_ns = io_->now_ns();
    if (copied.error != 0) {
      fail(f.transfer, failure_of(f, Cause::copy, copied.error));
      return false;
    }
  }
  f.stage = Stage::running;
  return true;
}

// Ends the flight, or submits the rest of its chunk. Runs on the I/O engine's thread, after the operation.
void Transfers::land(Flight& f, Result result) {
  Lock lock(mutex_);
  // Too late. The file may now have another operation in flight, but the slab is never used again.
  if (f.abandoned) {
    ++stats_.late;
    --lost_flights_;
    --files_[static_cast<size_t>(f.file)].flying;
    --files_[static_cast<size_t>(f.file)].lost;
    f.stage = Stage::idle;
    pump();
    return;
  }
  Transfer& t = *transfers_[static_cast<size_t>(f.transfer)];
  const Chunk& chunk = t.chunks[static_cast<size_t>(f.chunk)];
  const uint64_t wanted = padded(chunk.bytes) - f.moved;
  CHECK(result.bytes <= wanted);
  if (result.error == ECANCELED && (t.cancelled || t.failure.cause != Cause::none)) {  // fill() refused
    retire(f);
    return;
  }
  if (result.error != 0 || result.bytes < wanted) {
    if (send_again(f, result, wanted)) return;
    retire(f);
    return;
  }
  if (t.op == Op::write) {
    blocks_.commit(f.file, chunk.offset, f.digest, f.checked);
    stats_.bytes_written += chunk.bytes;
  } else if (empty_slab(f, lock)) {
    stats_.bytes_read += chunk.bytes;
  }
  retire(f);
}

// Continues a short operation where it ended, or retries an operation after an error that may be temporary.
// Returns false if the transfer is cancelled or has failed.
bool Transfers::send_again(Flight& f, Result result, uint64_t wanted) {
  Transfer& t = *transfers_[static_cast<size_t>(f.transfer)];
  if (t.cancelled || t.failure.cause != Cause::none) return false;
  const uint64_t forward = std::min(result.bytes, wanted) / kBlock * kBlock;
  f.moved += forward;
  if (result.error == 0 && forward > 0) {
    ++stats_.continued;
    aim(f);
    return true;
  }
  const int limit = t.op == Op::write ? settings_.write_retries : settings_.read_retries;
  if (passing(result.error) && f.retries < limit) {
    ++f.retries;
    ++stats_.retries;
    aim(f);
    return true;
  }
  const Cause cause = t.op == Op::read ? Cause::read : no_room(result.error) ? Cause::full : Cause::write;
  fail(f.transfer, failure_of(f, cause, result.error));
  return false;
}

// Verifies the bytes in the slab and copies them to the tensor. After a failure the bytes of the tensor are
// undefined, and the state of the ticket never becomes `done`.
bool Transfers::empty_slab(Flight& f, Lock& lock) {
  Transfer& t = *transfers_[static_cast<size_t>(f.transfer)];
  if (t.cancelled || t.failure.cause != Cause::none) return false;
  const Chunk& chunk = t.chunks[static_cast<size_t>(f.chunk)];
  f.stage = Stage::copying;
  lock.unlock();
  const uint64_t start = monotonic_ns();
  const Copied copied = copier_->from_slab(t.address + chunk.at, slabs_->at(f.slab), chunk.bytes, t.event,
                                           f.checked ? &f.digest : nullptr);
  const uint64_t spent = monotonic_ns() - start;
  lock.lock();
  stats_.copy_in_ns += spent;
  if (copied.error != 0) {
    fail(f.transfer, failure_of(f, Cause::copy, copied.error));
    return false;
  }
  if (f.checked && copied.digest != f.digest) {
    Failure failure = failure_of(f, Cause::corrupt, 0);
    failure.mismatch = Mismatch::digest;
    failure.found = copied.digest;
    failure.expected = f.digest;
    fail(f.transfer, failure);
    return false;
  }
  return true;
}

void Transfers::retire(Flight& f) {
  const int index = f.transfer;
  f.stage = Stage::idle;
  f.transfer = f.chunk = -1;
  slabs_->give(f.slab);
  --files_[static_cast<size_t>(f.file)].flying;
  busy(f.op, -1);
  --transfers_[static_cast<size_t>(index)]->flying;
  settle(index);
  pump();
  if (closed_) settled_.notify_all();
}

void Transfers::busy(Op op, int change) {
  const int side = op == Op::write ? 1 : 0;
  const uint64_t now = io_->now_ns();
  if (in_air_[side] == 0) air_since_[side] = now;
  in_air_[side] += change;
  CHECK(in_air_[side] >= 0);
  if (in_air_[side] == 0) (side == 1 ? stats_.write_busy_ns : stats_.read_busy_ns) += now - air_since_[side];
  stats_.flights_max = std::max(stats_.flights_max, static_cast<uint64_t>(in_air_[0] + in_air_[1]));
}

Failure Transfers::failure_of(const Flight& f, Cause cause, int error) const {
  const Transfer& t = *transfers_[static_cast<size_t>(f.transfer)];
  const Chunk& chunk = t.chunks[static_cast<size_t>(f.chunk)];
  Failure failure{cause,     Mismatch::none, t.op,        error, f.file,
                  f.retries, chunk.offset,   chunk.bytes, t.tag, t.generation};
  failure.deadline_ns = t.deadline_ns;
  return failure;
}

// Records the failure of a transfer, unless an earlier failure is recorded. Drops the transfer's queued
// chunks. Its chunks in flight still finish.
void Transfers::fail(int index, const Failure& failure) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  if (t.failure.cause == Cause::none) t.failure = failure;
  drop_queued(index);
}

void Transfers::settle(int index) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  if (t.state != State::active || t.unissued > 0 || t.flying > 0) return;
  t.state = t.failure.cause != Cause::none ? State::failed : t.cancelled ? State::cancelled : State::done;
  t.times.finished_ns = io_->now_ns();
  --unfinished_;
  ++stats_.finished;
  stats_.failed += t.state == State::failed ? 1 : 0;
  stats_.cancelled += t.state == State::cancelled ? 1 : 0;
  settled_.notify_all();
  if (!t.detached) return;
  stats_.unobserved += t.state == State::failed ? 1 : 0;
  recycle(index);
}

// Abandons the flights of overdue requests (see [Note: abandoned] in transfers.h). Returns the time at which
// the next request will be overdue.
uint64_t Transfers::expire(uint64_t now) {
  uint64_t next = UINT64_MAX;
  const int lost = lost_flights_;
  for (Flight& f : flights_) {
    if (f.abandoned || (f.stage != Stage::issued && f.stage != Stage::running)) continue;
    const uint64_t deadline = transfers_[static_cast<size_t>(f.transfer)]->deadline_ns;
    const uint64_t due = deadline < UINT64_MAX - f.issued_ns ? f.issued_ns + deadline : UINT64_MAX - 1;
    if (due > now) {
      next = std::min(next, due);
      continue;
    }
    ++stats_.timeouts;
    fail(f.transfer, failure_of(f, Cause::timeout, 0));
    abandon(f);
  }
  if (lost_flights_ != lost) fail_stuck();
  return next;
}

void Transfers::abandon(Flight& f) {
  const int index = f.transfer;
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  const Chunk& chunk = t.chunks[static_cast<size_t>(f.chunk)];
  f.abandoned = true;
  slabs_->quarantine(f.slab);
  ++lost_flights_;
  ++files_[static_cast<size_t>(f.file)].lost;
  if (t.op == Op::write) lost_.push_back({f.file, chunk.offset, padded(chunk.bytes)});
  busy(f.op, -1);
  --t.flying;
  settle(index);
}

// Fails a file's queued transfers if hanging operations occupy all of the file's concurrent operations, or
// all slabs. Otherwise these transfers would wait forever.
void Transfers::fail_stuck() {
  const bool no_slab = slabs_->quarantined() == slabs_->count();
  for (int number = 0; number < static_cast<int>(files_.size()); ++number) {
    File& file = files_[static_cast<size_t>(number)];
    if (!no_slab && file.lost < io_->depth()) continue;
    for (auto& direction : file.queues)
      for (Queue& q : direction)
        while (q.first >= 0) {
          const int index = q.first;
          Transfer& t = *transfers_[static_cast<size_t>(index)];
          const Chunk& chunk = t.chunks[static_cast<size_t>(t.cursors[static_cast<size_t>(number)].chunk)];
          Failure failure{Cause::hung, Mismatch::none, t.op,        0,     number,
                          0,           chunk.offset,   chunk.bytes, t.tag, t.generation};
          failure.deadline_ns = t.deadline_ns;
          fail(index, failure);
          settle(index);
        }
  }
}
}  // namespace teraio
