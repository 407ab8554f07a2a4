// Memory for tensors on a CPU. A block that was freed is kept for the next ones, as long as blocks in use and
// blocks kept fit together in a limit; what does not fit goes back to the system at once.
//
// A page that the system gives anew costs a fault and is cleared: 0.2 to 0.5 s per GiB, a fifth of a training
// step where every tensor is mapped and unmapped. glibc knows two settings: to keep what was freed, without a
// limit, or to keep nothing.
//
// Blocks are ranges of pages. Freed neighbours become one range, a range may be used in part, and of what
// must go the longest unused goes first. Where all ranges are too small for a block, its pages are gathered
// from several: the system moves pages to other addresses for a tenth of what new ones cost. Small blocks are
// malloc's.
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
  uint64_t used = 0;      // bytes in blocks now, whole pages
  uint64_t peak = 0;      // the most since `reset_peak`
  uint64_t spare = 0;     // freed, and kept
  uint64_t mapped = 0;    // ever taken from the system
  uint64_t reused = 0;    // ever taken from what was kept
  uint64_t gathered = 0;  // of these: moved to another address
  uint64_t moves = 0;     // in how many moves
  uint64_t limit = 0;
};

class Spare {
 public:
  static constexpr uint64_t kLeast = 64 << 10;  // smaller blocks are malloc's
  static constexpr uint64_t kPage = 4096;

  void* take(uint64_t bytes);  // null: the system has none
  void give(void* block);
  // Its pages are kept, or go where the system cannot move them, and its addresses stay without any: who
  // reads there faults. The caller unmaps so many bytes. 0: it is a small block, and stays one.
  uint64_t vacate(void* block);
  bool holds(uint64_t address) const;  // a block in use begins there
  // Used and kept bytes stay within this. What is used may exceed it: then nothing is kept.
  void keep_within(uint64_t bytes);
  // What was kept all through this stretch and the one before was needed by neither: it goes back.
  void end_stretch();
  void reset_peak();
  SpareCounts counts() const;

  // Around a fork: the child's copy is whole.
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
  void fit(uint64_t more);                   // so many bytes more, within the limit
  void shrink(uint64_t bytes);               // so many kept bytes go back
  void cut(uint64_t start, uint64_t bytes);  // this part of a range is no longer kept
  std::vector<Piece> pieces_for(uint64_t bytes) const;
  void add_used(int64_t bytes);

  mutable std::mutex lock_;
  std::unordered_map<uint64_t, uint64_t> blocks_;  // start -> bytes, in use
  Ranges ranges_;                                  // kept, by address; no two touch
  std::set<std::pair<uint64_t, uint64_t>> sizes_;  // (bytes, start)
  std::map<uint64_t, uint64_t> ages_;              // serial -> start
  std::set<uint64_t> seams_;                       // where a mapping may end: pages move by mapping
  uint64_t serial_ = 0;
  uint64_t least_[2] = {0, 0};  // of kept bytes: in this stretch, in the one before
  uint64_t large_ = 0;  // in blocks in use that are not malloc's: those are few, and not what is limited
  uint64_t spare_ = 0, limit_ = 0, mapped_ = 0, reused_ = 0, gathered_ = 0, moves_ = 0;
  std::atomic<int64_t> used_{0}, peak_{0};  // small blocks are counted without the lock
};

// The one of this process, which ends with it: tensors may outlive everything else.
Spare& spare();
}  // namespace teraio
