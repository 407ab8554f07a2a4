// An allocator of memory for CPU tensors. The allocator keeps freed blocks, and uses their pages for later
// blocks. A limit applies to the sum of the used and the kept bytes. Freed bytes above the limit are unmapped
// immediately.
//
// The system maps a new page in a page fault, and clears it. This takes 0.2 to 0.5 s per GiB. If every tensor
// is mapped and unmapped, new pages take a fifth of the time of a training step. The allocator of glibc has
// only two settings: keep all freed memory without a limit, or keep none.
//
// Blocks are ranges of pages. Freed neighbours are joined into one range, and a new block may use a part of a
// range. The ranges that were unused for the longest time are unmapped first. If all ranges are too small for
// a block, the block's pages are gathered from several ranges. Moving a page to another address takes a tenth
// of the time of a new page. Small blocks come from malloc.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace teraio {
struct SpareCounts {
  uint64_t used = 0;      // bytes of blocks in use, in whole pages
  uint64_t peak = 0;      // largest value of `used` since `reset_peak()`
  uint64_t spare = 0;     // bytes of freed blocks that are kept
  uint64_t mapped = 0;    // bytes mapped from the system since the start
  uint64_t reused = 0;    // bytes of kept pages that new blocks have used since the start
  uint64_t gathered = 0;  // reused bytes that were moved to another address
  uint64_t moves = 0;     // number of pieces that were moved to another address
  uint64_t limit = 0;
};

class Spare {
 public:
  static constexpr uint64_t kLeast = 64 << 10;  // smaller blocks come from malloc
  static constexpr uint64_t kPage = 4096;

  void* take(uint64_t bytes);  // returns null if the system has no memory
  void give(void* block);
  // Takes the pages from a block and keeps the pages, or frees them if the system cannot move them. Access to
  // the block's addresses then faults. Returns the number of bytes that the caller must unmap, or 0 for a
  // small block. A small block is not changed.
  uint64_t vacate(void* block);
  bool holds(uint64_t address) const;  // true if a block in use begins at this address
  // Sets the limit for the sum of the used and the kept bytes. If the used bytes alone exceed the limit, no
  // page is kept.
  void keep_within(uint64_t bytes);
  // Ends a stretch (the time between two calls). Unmaps the pages that no block used in the last two
  // stretches.
  void end_stretch();
  void reset_peak();
  SpareCounts counts() const;

  // Hold the lock during a fork, so that the child's copy of the allocator is consistent.
  void before_fork() { lock_.lock(); }
  void after_fork() { lock_.unlock(); }

 private:
  struct Range {
    uint64_t bytes;
    uint64_t serial;
  };
  struct Piece {
    uint64_t start, bytes;
  };
  using Ranges = std::map<uint64_t, Range>;

  void* reuse(uint64_t bytes);
  void* gather(uint64_t bytes);
  void* map(uint64_t bytes);
  std::vector<Piece> mappings_of(uint64_t start, uint64_t bytes) const;
  void keep(uint64_t start, uint64_t bytes);
  void add(uint64_t start, uint64_t bytes, uint64_t serial);
  void remove(Ranges::iterator range);
  void fit(uint64_t more);                   // unmap kept pages until `more` bytes fit into the limit
  void shrink(uint64_t bytes);               // unmap this number of kept bytes
  void cut(uint64_t start, uint64_t bytes);  // remove this part of a range from the kept ranges
  std::vector<Piece> pieces_for(uint64_t bytes) const;
  void add_used(int64_t bytes);

  mutable std::mutex lock_;
  std::unordered_map<uint64_t, uint64_t> blocks_;  // blocks in use: start -> bytes
  Ranges ranges_;                                  // kept ranges by address; no two are adjacent
  std::set<std::pair<uint64_t, uint64_t>> sizes_;  // kept ranges as (bytes, start)
  // Kept ranges, unused longest first: serial number -> start.
  std::map<uint64_t, uint64_t> ages_;
  std::set<uint64_t> seams_;  // addresses where a mapping of the system may end; no move may cross a seam
  uint64_t serial_ = 0;
  uint64_t least_[2] = {0, 0};  // least kept bytes in this stretch, and in the stretch before
  uint64_t large_ = 0;          // bytes of blocks in use, without small blocks, which are few and not limited
  uint64_t spare_ = 0, limit_ = 0, mapped_ = 0, reused_ = 0, gathered_ = 0, moves_ = 0;
  std::atomic<int64_t> used_{0}, peak_{0};  // atomic, because small blocks are counted without the lock
};

// Returns the allocator of this process. The allocator is never destroyed, because tensors may outlive all
// other objects.
Spare& spare();
}  // namespace teraio
