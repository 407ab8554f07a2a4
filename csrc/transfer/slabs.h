// The buffers for all I/O, pinned copies and checksums: `count` slabs of exactly `slab_bytes`. All slabs are
// allocated together at the start, in one block of memory, the arena.
//
// The arena is aligned to 2 MiB and has MADV_HUGEPAGE. With 4 KiB pages, direct I/O had a half to a third of
// the rate with huge pages. It also took ten times the CPU time. The arena has MADV_DONTFORK, because a child
// process must not share pages that a device still writes to. A slab is quarantined if its operation never
// completed. The device may still write to this slab, so it is never used again.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace teraio {
class Slabs {
 public:
  Slabs(uint64_t slab_bytes, int count);
  // Uses memory that the caller owns and keeps alive, for example pinned memory from a device's allocator.
  // The address must be a multiple of 4096 bytes.
  Slabs(uint64_t address, uint64_t slab_bytes, int count);
  ~Slabs();
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  bool claim() { return !std::exchange(claimed_, true); }  // returns false if another engine uses these slabs
  int take();                                              // returns the index of a free slab, or -1
  void give(int slab);
  void quarantine(int slab);

  std::byte* at(int slab) const { return base_ + static_cast<uint64_t>(slab) * slab_bytes_; }
  uint64_t slab_bytes() const { return slab_bytes_; }
  int count() const { return static_cast<int>(state_.size()); }
  int free() const { return free_count_; }
  int quarantined() const { return quarantined_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(base_); }
  uint64_t arena_bytes() const { return slab_bytes_ * static_cast<uint64_t>(count()); }
  // Returns 2 MiB if huge pages back nine tenths of the arena, otherwise 4096. The function reads
  // /proc/self/smaps.
  uint64_t page_bytes() const;

 private:
  enum class State : uint8_t { free, taken, quarantined };
  void fill(int count);

  std::byte* base_ = nullptr;
  uint64_t slab_bytes_;
  void* mapping_ = nullptr;  // null: the caller owns the memory
  uint64_t mapping_bytes_ = 0;
  uint64_t born_;                                    // fork_count() at construction
  std::atomic<int> quarantined_{0}, free_count_{0};  // read by any thread, written under the engine's lock
  bool claimed_ = false;
  std::vector<State> state_;
  // Last in, first out, because the slab that was used last is most likely in the CPU's cache.
  std::vector<int> free_;
};
}  // namespace teraio
