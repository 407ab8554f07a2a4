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
  StorageImpl* storage;            // held weakly: its memory stays, its bytes need not
  std::atomic<bool> idle = false;  // its storage has bytes. Who has this address finds a copy of them
  std::atomic<bool> filled = false;
  int ends = 0;  // of steps, since it is idle and its storage is fenced elsewhere
};
std::map<uintptr_t, std::unique_ptr<Fence>> fences;  // by address; read and changed as `entries` are
std::atomic<size_t> retired{0};                      // since they were last cleared
constexpr size_t kRetiredMost = 4096;
constexpr size_t kPage = 4096;
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// The allocator's: gives up the pages of a block, and leaves its addresses to us.
uint64_t (*vacate)(void* block) = nullptr;
void (*give)(void* block) = nullptr;
// Small blocks that another thread may read: of this step, and of the one before.
std::vector<c10::DataPtr> read_still, read_before;
size_t read_still_bytes = 0;
constexpr size_t kReadStillMost = 2 << 20;
constexpr size_t kSmall = 64 << 10;

void empty(Fence& fenced) {
  // In this order: where another thread fills it at this moment, it counts as filled, and is emptied later.
  if (fenced.filled.exchange(false)) mmap(fenced.at, fenced.bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
}

void retire(void* address) {
  auto* fenced = static_cast<Fence*>(address);
  empty(*fenced);
  retired++;
  fenced->idle = true;
}

bool is_gone(StorageImpl* storage) {
  return c10::raw::weak_intrusive_ptr::use_count(storage) == 0;
}

// When a step has ended, or many were retired: gives back what nobody can have the address of any more. That
// of a storage which may be evicted again is kept for it, without bytes. Threads that may be reading have two
// steps more.
void clear_fences(const Everyone& everyone) {
  const bool reading = everyone.read_elsewhere();
  read_before = std::move(read_still);
  read_still.clear();
  read_still_bytes = 0;
  retired = 0;
  for (auto each = fences.begin(); each != fences.end();) {
    Fence& fenced = *each->second;
    auto found = entries.find(fenced.storage);
    const bool again = found != entries.end() && found->second.fence == &fenced;
    const bool over = fenced.idle && !again && (!reading || fenced.ends++ == kReadsFor);
    if (over || (fenced.idle && is_gone(fenced.storage))) {
      munmap(fenced.at, fenced.bytes);
      if (again) found->second.fence = nullptr;
      c10::raw::weak_intrusive_ptr::decref(fenced.storage);
      each = fences.erase(each);
    } else {
      if (fenced.idle) empty(fenced);
      ++each;
    }
  }
}

Fence* new_fence(StorageImpl* storage, size_t bytes, void* at) {
  c10::raw::weak_intrusive_ptr::incref(storage);  // a strong one might wait for the GIL
  auto& made = fences[reinterpret_cast<uintptr_t>(at)];
  made.reset(new Fence{static_cast<char*>(at), bytes, storage});
  return made.get();
}

// Under `Everyone`: fences it where it is, for threads that read there at this moment. Whether that was done.
bool fence_in_place(StorageImpl* storage, Entry& entry, c10::DataPtr& bytes) {
  if (vacate == nullptr || bytes.get_deleter() != give) return false;
  void* at = bytes.get();
  if (const uint64_t fenced = vacate(at)) {
    bytes.release_context();
    bytes.clear();
    entry.fence = new_fence(storage, fenced, at);
    storage->set_data_ptr_noswap({at, entry.fence, retire, storage->device()});
    return true;
  }
  if (storage->nbytes() < kSmall && read_still_bytes + storage->nbytes() < kReadStillMost) {
    read_still_bytes += storage->nbytes();
    read_still.push_back(std::move(bytes));
  }
  return false;
}

// Under `Everyone`. Null: the system has no more mappings.
c10::DataPtr fence(StorageImpl* storage, Entry& entry, c10::Device device) {
  if (!device.is_cpu()) return {nullptr, device};
  const size_t bytes = (storage->nbytes() + kPage - 1) / kPage * kPage;
  Fence* fenced = entry.fence;
  if (fenced != nullptr && fenced->idle && !fenced->filled && fenced->bytes == bytes) {
    fenced->idle = false;
  } else {
    void* at = mmap(nullptr, bytes, PROT_NONE, kReserved, -1, 0);
    if (at == MAP_FAILED) return {nullptr, device};
    fenced = entry.fence = new_fence(storage, bytes, at);
  }
  return {fenced->at, fenced, retire, device};
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
