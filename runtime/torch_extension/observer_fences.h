// Fenced pages. While a tensor in RAM is evicted, the pages at its address are inaccessible. So a read at
// this address faults, and the observer fetches the tensor.
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
  StorageImpl* storage;              // a weak reference, which keeps the object alive but not its bytes
  std::atomic<bool> idle = false;    // the storage has its bytes at another address
  std::atomic<bool> filled = false;  // the pages have a copy of the bytes
  int ends = 0;                      // ends of steps while the fence was idle and a thread might read
};
std::map<uintptr_t, std::unique_ptr<Fence>> fences;  // by address; guarded by the locks of `entries`
std::atomic<size_t> retired{0};                      // fences that became idle since `clear_fences` last ran
constexpr size_t kRetiredMost = 4096;
constexpr size_t kPage = 4096;
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Functions of the allocator. `give` frees a block. `vacate` takes only the pages of a block, so that the
// observer owns the block's addresses.
uint64_t (*vacate)(void* block) = nullptr;
void (*give)(void* block) = nullptr;
// Bytes of small evicted storages that another thread may still read. The storages in `read_still` were
// evicted in this step. The storages in `read_before` were evicted in the previous step.
std::vector<c10::DataPtr> read_still, read_before;
size_t read_still_bytes = 0;
constexpr size_t kReadStillMost = 2 << 20;
constexpr size_t kSmall = 64 << 10;

void empty(Fence& fenced) {
  // Reset `filled` before the mmap. Another thread may fill the fence in between. It then sets `filled`
  // again, and a later call empties the fence.
  if (fenced.filled.exchange(false)) mmap(fenced.at, fenced.bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
}

void retire(void* address) {
  auto* fenced = static_cast<Fence*>(address);
  empty(*fenced);
  retired++;
  fenced->idle = true;
}

bool is_released(StorageImpl* storage) {
  return c10::raw::weak_intrusive_ptr::use_count(storage) == 0;
}

// Unmaps each fence whose address no code can have any more. A fence is idle if its storage has its bytes at
// another address. `teraio_unpoint` calls this function at the end of a step. `teraio_leave` calls it when
// many fences are idle.
//
// A storage keeps its last fence, without bytes, for its next eviction. If another thread may still read at
// an idle fence, the fence is kept for two more steps.
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
    if (over || (fenced.idle && is_released(fenced.storage))) {
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
  // The reference is weak, because the release of a strong reference might wait for the GIL.
  c10::raw::weak_intrusive_ptr::incref(storage);
  auto& made = fences[reinterpret_cast<uintptr_t>(at)];
  made.reset(new Fence{static_cast<char*>(at), bytes, storage});
  return made.get();
}

// Makes the pages at the storage's current address inaccessible, because other threads may be reading at this
// address. Returns false if this is impossible. The caller holds `Everyone`.
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

// Returns fenced (inaccessible) pages for the storage. Returns null if the storage is on a GPU, or if the
// system allows no more mappings. The caller holds `Everyone`.
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

// Fills the fenced pages with the bytes at `from`. The bytes appear for all threads at the same moment. If
// `from` is null, sets all bytes to 0xFF, which is NaN in a float.
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
