// The ranges of pages that the allocator keeps. (1) A block gets the smallest range that is large enough. (2)
// Freed neighbouring ranges are joined. (3) The range that was unused for the longest time is unmapped first.
#include "allocator/spare_blocks.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace teraio {
namespace {
// Moving a piece of a range to another address takes 30 to 80 us, whatever its size. A new page takes 0.5 us.
// If the pieces of a block are smaller than kPiece on average, moving the pieces takes longer than new pages.
constexpr uint64_t kPiece = 256 << 10;

// A stretch is the time between two calls of end_stretch(). The allocator unmaps pages that were not used in
// two stretches. It keeps a part of the unused pages: up to 1 / kRest of the limit. The reason is that
// remainders of ranges may be too small for any new block. If the allocator kept no unused pages, such
// remainders would force it to unmap and map pages again in each stretch.
constexpr uint64_t kRest = 16;

constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED;
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

uint64_t in_pages(uint64_t bytes) {
  return (bytes + Spare::kPage - 1) / Spare::kPage * Spare::kPage;
}

void* map_pages(uint64_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

uint64_t address_of(void* block) {
  return reinterpret_cast<uint64_t>(block);
}

void* pointer_to(uint64_t address) {
  return reinterpret_cast<void*>(address);
}
}  // namespace

void* Spare::take(uint64_t bytes) {
  if (bytes < kLeast) {
    void* block = nullptr;
    if (posix_memalign(&block, 64, bytes) != 0) return nullptr;
    add_used(static_cast<int64_t>(malloc_usable_size(block)));
    return block;
  }
  const uint64_t size = in_pages(bytes);
  if (size < bytes) return nullptr;
  const std::lock_guard guard(lock_);
  void* block = reuse(size);
  if (block == nullptr) block = gather(size);
  if (block == nullptr) block = map(size);
  if (block == nullptr) return nullptr;
  blocks_.emplace(address_of(block), size);
  large_ += size;
  add_used(static_cast<int64_t>(size));
  return block;
}

void Spare::give(void* block) {
  if (block == nullptr) return;
  if (address_of(block) % kPage == 0) {
    const std::lock_guard guard(lock_);
    if (const auto found = blocks_.find(address_of(block)); found != blocks_.end()) {
      const uint64_t bytes = found->second;
      blocks_.erase(found);
      large_ -= bytes;
      add_used(-static_cast<int64_t>(bytes));
      keep(address_of(block), bytes);
      return;
    }
  }
  add_used(-static_cast<int64_t>(malloc_usable_size(block)));
  std::free(block);
}

uint64_t Spare::vacate(void* block) {
  const std::lock_guard guard(lock_);
  const auto found = blocks_.find(address_of(block));
  if (found == blocks_.end()) return 0;
  const auto [start, bytes] = *found;
  void* place = mmap(nullptr, bytes, PROT_NONE, kReserved, -1, 0);
  if (place == MAP_FAILED) return 0;
  // Forbid access before the pages are moved. Otherwise a thread could read zeros during the move.
  bool moved = mprotect(block, bytes, PROT_NONE) == 0;
  uint64_t done = 0;
  for (const auto& piece : mappings_of(start, bytes)) {
    void* to = pointer_to(address_of(place) + done);
    moved = moved && mremap(pointer_to(piece.start), piece.bytes, piece.bytes, kMove | MREMAP_DONTUNMAP,
                            to) != MAP_FAILED;
    if (!moved) break;
    done += piece.bytes;
  }
  moved = moved && mprotect(place, bytes, PROT_READ | PROT_WRITE) == 0;
  if (!moved) {  // free the pages, because the system cannot move them or allows no further mapping
    munmap(place, bytes);
    if (mmap(block, bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0) == MAP_FAILED) return 0;
  }
  if (moved) {
    for (const auto& piece : mappings_of(start, bytes))
      seams_.insert(address_of(place) + piece.start - start);
    seams_.insert(address_of(place) + bytes);
  }
  seams_.erase(seams_.upper_bound(start), seams_.lower_bound(start + bytes));
  blocks_.erase(found);
  large_ -= bytes;
  add_used(-static_cast<int64_t>(bytes));
  if (moved) keep(address_of(place), bytes);
  return bytes;
}

std::vector<Spare::Piece> Spare::mappings_of(uint64_t start, uint64_t bytes) const {
  std::vector<Piece> found;
  for (uint64_t at = start, end = start + bytes; at < end; at += found.back().bytes) {
    const auto seam = seams_.upper_bound(at);
    found.push_back({at, (seam == seams_.end() ? end : std::min(*seam, end)) - at});
  }
  return found;
}

bool Spare::holds(uint64_t address) const {
  const std::lock_guard guard(lock_);
  return blocks_.contains(address);
}

void* Spare::reuse(uint64_t bytes) {
  const auto found = sizes_.lower_bound({bytes, 0});
  if (found == sizes_.end()) return nullptr;
  const auto [size, start] = *found;
  const auto range = ranges_.find(start);
  const uint64_t serial = range->second.serial;
  remove(range);
  if (size > bytes) add(start + bytes, size - bytes, serial);
  least_[0] = std::min(least_[0], spare_);
  reused_ += bytes;
  return pointer_to(start);
}

void* Spare::map(uint64_t bytes) {
  fit(bytes);
  void* block = map_pages(bytes);
  if (block == nullptr && spare_ > 0) {  // the system may need the memory of the kept pages
    shrink(spare_);
    block = map_pages(bytes);
  }
  if (block == nullptr) return nullptr;
  seams_.insert(address_of(block));
  seams_.insert(address_of(block) + bytes);
  mapped_ += bytes;
  return block;
}

std::vector<Spare::Piece> Spare::pieces_for(uint64_t bytes) const {
  std::vector<Piece> found;
  for (const auto& [start, range] : ranges_) {
    const auto pieces = mappings_of(start, range.bytes);
    found.insert(found.end(), pieces.begin(), pieces.end());
  }
  std::sort(found.begin(), found.end(), [](const Piece& a, const Piece& b) { return a.bytes > b.bytes; });
  size_t count = 0;
  for (uint64_t sum = 0; sum < bytes; ++count) {
    if (count == found.size()) return {};
    found[count].bytes = std::min(found[count].bytes, bytes - sum);
    sum += found[count].bytes;
  }
  found.resize(count);
  return found;
}

void* Spare::gather(uint64_t bytes) {
  if (spare_ < bytes) return nullptr;
  const auto pieces = pieces_for(bytes);
  if (pieces.empty() || pieces.size() * kPiece > bytes) return nullptr;
  void* place = mmap(nullptr, bytes, PROT_NONE, kReserved, -1, 0);
  if (place == MAP_FAILED) return nullptr;
  uint64_t to = address_of(place);
  for (const auto& piece : pieces) {
    if (mremap(pointer_to(piece.start), piece.bytes, piece.bytes, kMove, pointer_to(to)) == MAP_FAILED) {
      // The system has too many mappings, or the piece crosses the end of a mapping that is not in `seams_`.
      // Free the pages that were moved so far.
      munmap(place, bytes);
      return nullptr;
    }
    cut(piece.start, piece.bytes);
    seams_.insert(piece.start);
    seams_.insert(piece.start + piece.bytes);
    seams_.insert(to);
    to += piece.bytes;
  }
  seams_.insert(to);
  gathered_ += bytes;
  moves_ += pieces.size();
  reused_ += bytes;
  least_[0] = std::min(least_[0], spare_);
  return place;
}

void Spare::cut(uint64_t start, uint64_t bytes) {
  const auto range = std::prev(ranges_.upper_bound(start));
  const auto [first, found] = *range;
  remove(range);
  if (first < start) add(first, start - first, found.serial);
  if (first + found.bytes > start + bytes)
    add(start + bytes, first + found.bytes - start - bytes, found.serial);
  seams_.erase(seams_.upper_bound(start), seams_.lower_bound(start + bytes));
}

void Spare::keep(uint64_t start, uint64_t bytes) {
  auto next = ranges_.lower_bound(start);
  if (next != ranges_.end() && start + bytes == next->first) {
    bytes += next->second.bytes;
    const auto joined = next++;
    remove(joined);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == start) {
      start = before->first;
      bytes += before->second.bytes;
      remove(before);
    }
  }
  add(start, bytes, ++serial_);
  fit(0);
}

void Spare::add(uint64_t start, uint64_t bytes, uint64_t serial) {
  while (!ages_.emplace(serial, start).second) ++serial;
  ranges_.emplace(start, Range{bytes, serial});
  sizes_.emplace(bytes, start);
  serial_ = std::max(serial_, serial);
  spare_ += bytes;
}

void Spare::remove(Ranges::iterator range) {
  sizes_.erase({range->second.bytes, range->first});
  ages_.erase(range->second.serial);
  spare_ -= range->second.bytes;
  ranges_.erase(range);
}

void Spare::fit(uint64_t more) {
  if (large_ + spare_ + more > limit_) shrink(large_ + spare_ + more - limit_);
}

void Spare::shrink(uint64_t bytes) {
  bytes = std::min(bytes, spare_);
  while (bytes > 0 && !ages_.empty()) {
    const uint64_t start = ages_.begin()->second;
    const uint64_t size = ranges_.at(start).bytes, unmapped = std::min(size, in_pages(bytes));
    // The system refuses a munmap that would leave more mappings than allowed. Then keep the range.
    if (munmap(pointer_to(start + size - unmapped), unmapped) != 0) break;
    cut(start + size - unmapped, unmapped);
    bytes -= std::min(bytes, unmapped);
  }
  least_[0] = std::min(least_[0], spare_);
}

void Spare::add_used(int64_t bytes) {
  const int64_t now = used_.fetch_add(bytes) + bytes;
  for (int64_t seen = peak_.load(); now > seen && !peak_.compare_exchange_weak(seen, now);) {}
}

void Spare::keep_within(uint64_t bytes) {
  const std::lock_guard guard(lock_);
  limit_ = bytes;
  fit(0);
}

void Spare::end_stretch() {
  const std::lock_guard guard(lock_);
  const uint64_t least = std::min(least_[0], least_[1]), rest = limit_ / kRest;
  if (least > rest) shrink(least - rest);
  least_[1] = least_[0];
  least_[0] = spare_;
}

void Spare::reset_peak() {
  peak_ = used_.load();
}

SpareCounts Spare::counts() const {
  const std::lock_guard guard(lock_);
  return {static_cast<uint64_t>(used_.load()),
          static_cast<uint64_t>(peak_.load()),
          spare_,
          mapped_,
          reused_,
          gathered_,
          moves_,
          limit_};
}

Spare& spare() {
  static Spare* const one = [] {
    auto* made = new Spare;
    pthread_atfork([] { spare().before_fork(); }, [] { spare().after_fork(); }, [] { spare().after_fork(); });
    return made;
  }();
  return *one;
}
}  // namespace teraio
