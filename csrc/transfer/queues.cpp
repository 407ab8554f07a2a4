// The queues of chunks, and the choice of the next chunk. Each file has four queues: prefetch or demand,
// reads or writes. Each queue is first in, first out.
#include "base/check.h"
#include "transfer/transfers.h"

namespace teraio {
Transfers::Queue& Transfers::queue(const Transfer& t, int file) {
  return files_[static_cast<size_t>(file)].queues[t.demand ? 1 : 0][t.op == Op::write ? 1 : 0];
}

void Transfers::enqueue(int index, int file) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  Cursor& cursor = t.cursors[static_cast<size_t>(file)];
  Queue& q = queue(t, file);
  CHECK(!cursor.queued && cursor.chunk >= 0);
  cursor.queued = true;
  cursor.before = q.last;
  cursor.after = -1;
  if (q.last < 0) q.first = index;
  else transfers_[static_cast<size_t>(q.last)]->cursors[static_cast<size_t>(file)].after = index;
  q.last = index;
}

void Transfers::unqueue(int index, int file) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  Cursor& cursor = t.cursors[static_cast<size_t>(file)];
  Queue& q = queue(t, file);
  CHECK(cursor.queued);
  cursor.queued = false;
  if (cursor.before < 0) q.first = cursor.after;
  else
    transfers_[static_cast<size_t>(cursor.before)]->cursors[static_cast<size_t>(file)].after = cursor.after;
  if (cursor.after < 0) q.last = cursor.before;
  else
    transfers_[static_cast<size_t>(cursor.after)]->cursors[static_cast<size_t>(file)].before = cursor.before;
}

void Transfers::drop_queued(int index) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  for (int file = 0; file < static_cast<int>(files_.size()); ++file)
    if (t.cursors[static_cast<size_t>(file)].queued) unqueue(index, file);
  queued_ -= t.unissued;
  t.unissued = 0;
}

// Issues one chunk of this priority, and returns false if none can be issued. Files take turns. Within a file
// reads and writes take turns, so that many queued evictions do not delay later fetches.
bool Transfers::issue_one(bool demand) {
  const int count = static_cast<int>(files_.size());
  for (int step = 0; step < count; ++step) {
    const int number = (next_file_ + step) % count;
    File& file = files_[static_cast<size_t>(number)];
    if (file.flying >= io_->depth()) continue;
    for (int turn = 0; turn < 2; ++turn) {
      const bool write = file.write_turn != (turn == 1);
      const int index = file.queues[demand ? 1 : 0][write ? 1 : 0].first;
      if (index < 0) continue;
      file.write_turn = !write;
      next_file_ = (number + 1) % count;
      issue(index, number);
      return true;
    }
  }
  return false;
}

void Transfers::pump() {
  while (slabs_->free() > 0 && (issue_one(true) || issue_one(false))) {}
}

// Takes the next chunk of a transfer in a file, gives it a slab, and submits it to the I/O engine.
void Transfers::issue(int index, int file) {
  Transfer& t = *transfers_[static_cast<size_t>(index)];
  Cursor& cursor = t.cursors[static_cast<size_t>(file)];
  const int number = cursor.chunk;
  const Chunk& chunk = t.chunks[static_cast<size_t>(number)];
  cursor.chunk = chunk.next;
  if (cursor.chunk < 0) unqueue(index, file);
  --t.unissued;
  --queued_;

  const Block* block = blocks_.find(file, chunk.offset);
  if (t.op == Op::read) {
    const Mismatch mismatch = Blocks::compare(block, chunk.bytes, t.tag, t.generation);
    if (mismatch != Mismatch::none) {
      Failure failure{Cause::corrupt, mismatch,    t.op,  0,           file, 0,
                      chunk.offset,   chunk.bytes, t.tag, t.generation};
      if (mismatch == Mismatch::tag) failure.found = block->tag, failure.expected = t.tag;
      if (mismatch == Mismatch::generation)
        failure.found = block->generation, failure.expected = t.generation;
      if (mismatch == Mismatch::length) failure.found = block->bytes, failure.expected = chunk.bytes;
      fail(index, failure);
      settle(index);
      return;
    }
  } else {
    blocks_.begin(file, chunk.offset, chunk.bytes, t.tag, t.generation);
  }

  Flight& f = flights_[static_cast<size_t>(slabs_->take())];
  CHECK(f.stage == Stage::idle && !f.abandoned);
  f.transfer = index;
  f.chunk = number;
  f.retries = 0;
  f.moved = 0;
  f.filled = false;
  f.checked = t.op == Op::read ? settings_.checksums && block->digested : settings_.checksums;
  f.digest = t.op == Op::read ? block->digest : 0;
  f.op = t.op;
  f.file = file;
  f.demand = t.demand;
  if (t.started++ == 0) t.times.started_ns = io_->now_ns();
  ++t.flying;
  ++files_[static_cast<size_t>(file)].flying;
  busy(t.op, 1);
  aim(f);
}
}  // namespace teraio
