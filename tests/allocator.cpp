// An allocator for tests that counts, exactly, the bytes of all CPU tensor storages: alive now, and the peak.
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr size_t kHeader = 64;  // keeps the alignment that torch promises
std::atomic<int64_t> alive{0}, peak{0};

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  alive -= *reinterpret_cast<int64_t*>(block);
  std::free(block);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* block = nullptr;
    if (posix_memalign(&block, kHeader, bytes + kHeader) != 0) throw std::bad_alloc();
    *static_cast<int64_t*>(block) = static_cast<int64_t>(bytes);
    const int64_t now = alive += static_cast<int64_t>(bytes);
    for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {}
    void* data = static_cast<char*>(block) + kHeader;
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
