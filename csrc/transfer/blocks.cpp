// The table of blocks. The transfer engine calls begin() before and commit() after each write, and compare()
// before each read.
#include "transfer/blocks.h"

#include "base/check.h"

namespace teraio {
void Blocks::forget(int file, uint64_t offset, uint64_t bytes) {
  auto& blocks = files_.at(static_cast<size_t>(file));
  auto at = blocks.lower_bound(offset);
  if (at != blocks.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second.bytes > offset) at = before;
  }
  while (at != blocks.end() && at->first < offset + bytes) at = blocks.erase(at);
}

void Blocks::begin(int file, uint64_t offset, uint64_t bytes, uint64_t tag, uint64_t generation) {
  auto& blocks = files_.at(static_cast<size_t>(file));
  const auto same = blocks.find(offset);
  if (same == blocks.end() || same->second.bytes != bytes) forget(file, offset, bytes);
  blocks[offset] = {bytes, tag, generation, 0, false, false};
}

void Blocks::commit(int file, uint64_t offset, uint64_t digest, bool digested) {
  auto& blocks = files_.at(static_cast<size_t>(file));
  const auto at = blocks.find(offset);
  if (at == blocks.end())
    return;  // forget() removed the block during its write, so later reads fail with "unwritten"
  at->second.digest = digest;
  at->second.digested = digested;
  at->second.whole = true;
}

const Block* Blocks::find(int file, uint64_t offset) const {
  const auto& blocks = files_.at(static_cast<size_t>(file));
  const auto at = blocks.find(offset);
  return at == blocks.end() ? nullptr : &at->second;
}

Mismatch Blocks::compare(const Block* block, uint64_t bytes, uint64_t tag, uint64_t generation) {
  if (block == nullptr) return Mismatch::unwritten;
  if (block->tag != tag) return Mismatch::tag;
  if (block->generation != generation) return Mismatch::generation;
  if (block->bytes != bytes) return Mismatch::length;
  return block->whole ? Mismatch::none : Mismatch::torn;
}

uint64_t Blocks::count() const {
  uint64_t total = 0;
  for (const auto& blocks : files_) total += blocks.size();
  return total;
}
}  // namespace teraio
