// A CPU allocator for torch. It takes and returns memory through two functions of teraio. This file is
// compiled against the installed torch, because torch's classes differ between versions.
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstring>

namespace {
using Take = void* (*)(uint64_t bytes);
using Give = void (*)(void* block);
Take take_block = nullptr;
Give give_block = nullptr;

struct Spare final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, give_block, cpu};
    void* block = take_block(bytes);
    // This is the text of torch's own error. Libraries search for this text, and then retry a smaller batch.
    TORCH_CHECK(block != nullptr, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                " bytes. Error code 12 (Cannot allocate memory)");
    return {block, block, give_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return give_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Spare allocator;
}  // namespace

extern "C" {
// Installs the allocator. Returns false if torch still uses another allocator, because that one has a higher
// priority.
bool teraio_install(Take take, Give give) {
  take_block = take;
  give_block = give;
  c10::SetCPUAllocator(&allocator, 50);
  return c10::GetCPUAllocator() == &allocator;
}
}
