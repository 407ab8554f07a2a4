// The arena (the memory of all slabs), and the size of its pages.
#include "transfer/slabs.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/fork.h"

namespace teraio {
namespace {
constexpr uint64_t kHuge = 2 << 20;
constexpr uint64_t kPage = 4096;

void check_shape(uint64_t slab_bytes, int count) {
  if (slab_bytes == 0 || slab_bytes % kPage != 0 || slab_bytes > (uint64_t{1} << 30))
    throw std::invalid_argument("slab_bytes is " + std::to_string(slab_bytes) +
                                "; it must be a multiple of 4096 between 4096 and 1 GiB");
  if (count < 1 || count > 4096)
    throw std::invalid_argument("slab count is " + std::to_string(count) + "; it must be between 1 and 4096");
}
}  // namespace

Slabs::Slabs(uint64_t slab_bytes, int count) : slab_bytes_(slab_bytes), born_(fork_count()) {
  check_shape(slab_bytes, count);
  const uint64_t arena = slab_bytes * static_cast<uint64_t>(count);
  // Round the size up, because otherwise the arena's last page would not be a huge page.
  const uint64_t whole = (arena + kHuge - 1) / kHuge * kHuge;
  mapping_bytes_ = whole + kHuge;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(),
                            "cannot map " + std::to_string(mapping_bytes_) + " bytes for slabs");
  base_ = reinterpret_cast<std::byte*>((reinterpret_cast<uint64_t>(mapping_) + kHuge - 1) / kHuge * kHuge);
  madvise(base_, whole, MADV_HUGEPAGE);  // may fail; page_bytes() reports the page size in use
  madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
  std::memset(base_, 0, arena);  // causes all page faults now, and none during a transfer
  fill(count);
}

Slabs::Slabs(uint64_t address, uint64_t slab_bytes, int count)
    : slab_bytes_(slab_bytes), born_(fork_count()) {
  check_shape(slab_bytes, count);
  if (address == 0 || address % kPage != 0)
    throw std::invalid_argument("the arena's address must be a multiple of 4096");
  base_ = reinterpret_cast<std::byte*>(address);
  fill(count);
}

Slabs::~Slabs() {
  // Do not unmap in a forked child. There the arena is not mapped (MADV_DONTFORK), and other memory may be at
  // its addresses.
  if (mapping_ != nullptr && born_ == fork_count()) munmap(mapping_, mapping_bytes_);
}

void Slabs::fill(int count) {
  state_.assign(static_cast<size_t>(count), State::free);
  free_.reserve(static_cast<size_t>(count));
  for (int i = count - 1; i >= 0; --i) free_.push_back(i);
  free_count_ = count;
}

int Slabs::take() {
  if (free_.empty()) return -1;
  const int slab = free_.back();
  free_.pop_back();
  --free_count_;
  CHECK(state_[static_cast<size_t>(slab)] == State::free);
  state_[static_cast<size_t>(slab)] = State::taken;
  return slab;
}

void Slabs::give(int slab) {
  CHECK(state_.at(static_cast<size_t>(slab)) == State::taken);
  state_[static_cast<size_t>(slab)] = State::free;
  free_.push_back(slab);
  ++free_count_;
}

void Slabs::quarantine(int slab) {
  CHECK(state_.at(static_cast<size_t>(slab)) == State::taken);
  state_[static_cast<size_t>(slab)] = State::quarantined;
  ++quarantined_;
}

uint64_t Slabs::page_bytes() const {
  std::ifstream maps("/proc/self/smaps");
  const uint64_t first = address(), last = first + arena_bytes();
  uint64_t huge = 0;
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long from = 0, to = 0, kilobytes = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) inside = from < last && to > first;
    else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kilobytes) == 1)
      huge += kilobytes * 1024;
  }
  return huge >= arena_bytes() / 10 * 9 ? kHuge : kPage;
}
}  // namespace teraio
