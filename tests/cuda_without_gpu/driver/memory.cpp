#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "stop.h"
#include "streams.h"

namespace standin {
namespace {

constexpr int kFresh = 0xDD;
constexpr size_t kPage = 4096;

struct Range {
  size_t bytes;
  int device;  // -1 for pinned memory
};

std::mutex mutex;
std::map<uintptr_t, Range>& ranges() {
  static auto* all = new std::map<uintptr_t, Range>;
  return *all;
}
size_t used[16], most[16], pinned = 0;

uintptr_t number(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

std::map<uintptr_t, Range>::iterator around(uintptr_t at) {
  auto next = ranges().upper_bound(at);
  if (next == ranges().begin()) return ranges().end();
  --next;
  return at < next->first + next->second.bytes ? next : ranges().end();
}

void* anonymous(size_t bytes, int protection) {
  void* made = mmap(nullptr, std::max(bytes, kPage), protection,
                    MAP_PRIVATE | MAP_ANONYMOUS | (protection == PROT_NONE ? MAP_NORESERVE : 0), -1, 0);
  return made == MAP_FAILED ? nullptr : made;
}

bool count_in(int device, size_t bytes) {
  if (used[device] + bytes > settings().device_bytes) return false;
  used[device] += bytes;
  most[device] = std::max(most[device], used[device]);
  return true;
}

}  // namespace

Found find(const void* address, size_t bytes) {
  std::lock_guard lock(mutex);
  const uintptr_t begin = number(address), end = begin + bytes;
  auto at = around(begin);
  if (at == ranges().end()) return {};
  const int device = at->second.device;
  // The range may continue in the next mapped range, if this one is adjacent and of the same device.
  for (uintptr_t reached = at->first + at->second.bytes; reached < end;) {
    at = ranges().find(reached);
    if (at == ranges().end() || at->second.device != device) {
      if (device < 0) return {};
      stop("%zu bytes at %p leave the memory of device %d", bytes, address, device);
    }
    reached += at->second.bytes;
  }
  return {device < 0 ? Place::kPinned : Place::kDevice, device};
}

void* take(int device, size_t bytes) {
  std::lock_guard lock(mutex);
  if (!count_in(device, bytes)) return nullptr;
  void* made = anonymous(bytes, PROT_READ | PROT_WRITE);
  if (made == nullptr) stop("the host has no %zu bytes for device %d", bytes, device);
  std::memset(made, kFresh, bytes);
  ranges()[number(made)] = {bytes, device};
  return made;
}

bool give_back(void* address) {
  std::lock_guard lock(mutex);
  const auto at = ranges().find(number(address));
  if (at == ranges().end() || at->second.device < 0) return false;
  used[at->second.device] -= at->second.bytes;
  munmap(address, std::max(at->second.bytes, kPage));
  ranges().erase(at);
  return true;
}

bool take_bytes(int device, size_t bytes) {
  std::lock_guard lock(mutex);
  return count_in(device, bytes);
}

void give_bytes(int device, size_t bytes) {
  std::lock_guard lock(mutex);
  used[device] -= bytes;
}

void* reserve(size_t bytes) {
  return anonymous(bytes, PROT_NONE);
}

void map(void* address, size_t bytes, int device) {
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) stop("mapped what was not reserved");
  std::memset(address, kFresh, bytes);
  std::lock_guard lock(mutex);
  ranges()[number(address)] = {bytes, device};
}

void unmap(void* address, size_t bytes) {
  std::lock_guard lock(mutex);
  madvise(address, bytes, MADV_DONTNEED);
  mprotect(address, bytes, PROT_NONE);
  const uintptr_t end = number(address) + bytes;
  auto at = ranges().lower_bound(number(address));
  while (at != ranges().end() && at->first < end) at = ranges().erase(at);
}

void* take_pinned(size_t bytes) {
  void* made = anonymous(bytes, PROT_READ | PROT_WRITE);
  if (made != nullptr) pin(made, bytes);
  return made;
}

bool pin(void* address, size_t bytes) {
  std::lock_guard lock(mutex);
  const uintptr_t begin = number(address);
  const auto next = ranges().lower_bound(begin);
  if (around(begin) != ranges().end() || (next != ranges().end() && next->first < begin + bytes))
    return false;
  ranges()[begin] = {bytes, -1};
  pinned += bytes;
  return true;
}

bool unpin(void* address, bool free) {
  std::lock_guard lock(mutex);
  const auto at = ranges().find(number(address));
  if (at == ranges().end() || at->second.device >= 0) return false;
  pinned -= at->second.bytes;
  if (free) munmap(address, std::max(at->second.bytes, kPage));
  ranges().erase(at);
  return true;
}

size_t used_bytes(int device) {
  std::lock_guard lock(mutex);
  return used[device];
}

size_t most_bytes(int device) {
  std::lock_guard lock(mutex);
  return most[device];
}

size_t pinned_bytes() {
  std::lock_guard lock(mutex);
  return pinned;
}

}  // namespace standin
