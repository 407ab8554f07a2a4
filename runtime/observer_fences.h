// Fenced pages: where a pointer leads to whose tensor is evicted from RAM.
#pragma once
#include <c10/util/intrusive_ptr.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>

#include "observer_known.h"

namespace {
struct Fence {
  char* at;
  size_t bytes;
  StorageImpl* storage;  // held weakly: its memory stays, its bytes need not
  bool filled = false;
};
std::map<uintptr_t, std::unique_ptr<Fence>> fences;  // by address; read and changed as `entries` are
std::mutex retired_lock;
// No storage's any more. Who has such an address finds a copy of the bytes of now.
std::vector<Fence*> retired;
constexpr size_t kRetiredMost = 4096;
constexpr size_t kPage = 4096;
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void retire(void* address) {
  auto* fenced = static_cast<Fence*>(address);
  if (fenced->filled) mmap(fenced->at, fenced->bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  fenced->filled = false;
  std::lock_guard<std::mutex> held(retired_lock);
  retired.push_back(fenced);
}

// Under `Everyone`. Null: the system has no more mappings.
c10::DataPtr fence(StorageImpl* storage, c10::Device device) {
  const size_t bytes = (storage->nbytes() + kPage - 1) / kPage * kPage;
  void* at = device.is_cpu() ? mmap(nullptr, bytes, PROT_NONE, kReserved, -1, 0) : MAP_FAILED;
  if (at == MAP_FAILED) return {nullptr, device};
  c10::raw::weak_intrusive_ptr::incref(storage);  // a strong one might wait for the GIL
  auto made = std::make_unique<Fence>(Fence{static_cast<char*>(at), bytes, storage});
  Fence* fenced = made.get();
  fences[reinterpret_cast<uintptr_t>(at)] = std::move(made);
  return {at, fenced, retire, device};
}

// Under `Everyone`: gives back what nobody can have the address of any more, the oldest first.
void clear_fences(size_t keep) {
  std::lock_guard<std::mutex> held(retired_lock);
  const size_t go = retired.size() > keep ? retired.size() - keep : 0;
  for (size_t number = 0; number < go; number++) {
    Fence* fenced = retired[number];
    munmap(fenced->at, fenced->bytes);
    c10::raw::weak_intrusive_ptr::decref(fenced->storage);
    fences.erase(reinterpret_cast<uintptr_t>(fenced->at));
  }
  retired.erase(retired.begin(), retired.begin() + static_cast<ptrdiff_t>(go));
}

// All threads see these bytes there at once; `from` null: bytes that no one can take for good.
bool fill(Fence& fenced, const void* from, size_t bytes) {
  void* fresh = mmap(nullptr, fenced.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return false;
  if (from == nullptr) std::memset(fresh, 0xFF, bytes);
  else std::memcpy(fresh, from, bytes);
  fenced.filled =
      mremap(fresh, fenced.bytes, fenced.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, fenced.at) != MAP_FAILED;
  return fenced.filled;
}
}  // namespace
