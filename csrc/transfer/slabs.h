// The only buffers that disks, pinned copies and checksums ever see: `count` slabs of exactly `slab_bytes`,
// taken once.
//
// 2 MiB aligned with MADV_HUGEPAGE: with 4 KiB pages direct I/O ran at a half to a third of the rate and ten
// times the CPU. MADV_DONTFORK: a child must not share pages a device is still writing to. A quarantined slab
// belonged to an operation that never came back; the device may still write to it, so it is never handed out
// again.
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
  // Over memory someone else owns and keeps alive (pinned by a device's own allocator, say); 4096-byte
  // aligned.
  Slabs(uint64_t address, uint64_t slab_bytes, int count);
  ~Slabs();
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  bool claim() { return !std::exchange(claimed_, true); }  // false: an engine has them already
  int take();                                              // a slab's index, or -1 when none is free
  void give(int slab);
  void quarantine(int slab);

  std::byte* at(int slab) const { return base_ + static_cast<uint64_t>(slab) * slab_bytes_; }
  uint64_t slab_bytes() const { return slab_bytes_; }
  int count() const { return static_cast<int>(state_.size()); }
  int free() const { return free_count_; }
  int quarantined() const { return quarantined_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(base_); }
  uint64_t arena_bytes() const { return slab_bytes_ * static_cast<uint64_t>(count()); }
  // 2 MiB if the kernel backs nine tenths of the arena with huge pages, else 4096; read from
  // /proc/self/smaps.
  uint64_t page_bytes() const;

 private:
  enum class State : uint8_t { free, taken, quarantined };
  void fill(int count);

  std::byte* base_ = nullptr;
  uint64_t slab_bytes_;
  void* mapping_ = nullptr;  // null: the memory is someone else's
  uint64_t mapping_bytes_ = 0;
  uint64_t born_;                                    // fork_count() at birth
  std::atomic<int> quarantined_{0}, free_count_{0};  // read by whoever asks, written under the engine's lock
  bool claimed_ = false;
  std::vector<State> state_;
  std::vector<int> free_;  // last in, first out: the warmest slab goes out again
};
}  // namespace teraio
