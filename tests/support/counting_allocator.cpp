// An allocator for tests. It counts the exact bytes of all CPU tensor storages: the bytes now alive, and
// their peak.
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

namespace {

constexpr size_t kAligned = 64;  // alignment in bytes that torch guarantees
std::atomic<int64_t> alive{0}, peak{0};

void* take_from_system(uint64_t bytes) {
  void* block = nullptr;
  return posix_memalign(&block, kAligned, bytes) == 0 ? block : nullptr;
}

using Take = void* (*)(uint64_t bytes);
using Give = void (*)(void* block);
Take take = take_from_system;
Give give = std::free;

struct Block {
  int64_t bytes;
  Give give;  // the function that frees the block
};
std::mutex lock;
// This table holds the size of each block. If each block had a header with its size, the addresses of tensors
// would differ from the addresses without counting.
std::unordered_map<void*, Block> blocks;

void release(void* data) {
  if (data == nullptr) return;
  Block block;
  {
    const std::lock_guard guard(lock);
    block = blocks.at(data);
    blocks.erase(data);
  }
  alive -= block.bytes;
  block.give(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device cpu(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &release, cpu};
    void* data = take(size);
    if (data == nullptr) throw std::bad_alloc();
    const auto bytes = static_cast<int64_t>(size);
    {
      const std::lock_guard guard(lock);
      blocks[data] = {bytes, give};
    }
    const int64_t now = alive += bytes;
    for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {}
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Counting counting;

}  // namespace

extern "C" {
void counting_install() {
  c10::SetCPUAllocator(&counting, 100);
}
// Makes all later allocations take and free memory by these two functions.
void counting_over(Take take_block, Give give_block) {
  take = take_block;
  give = give_block;
}
int64_t counting_alive() {
  return alive;
}
int64_t counting_peak() {
  return peak;
}
void counting_reset_peak() {
  peak = alive.load();
}
}
