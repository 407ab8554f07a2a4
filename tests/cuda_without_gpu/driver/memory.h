// Memory of the devices, which is the host's and begins as 0xDD; pinned memory; addresses that are reserved.
#pragma once

#include <cstddef>
#include <cstdint>

namespace standin {

enum class Place { kPageable, kPinned, kDevice };

struct Found {
  Place place = Place::kPageable;
  int device = -1;
};

// Where the whole range lies. A range that begins in a device's memory and leaves it ends the process.
Found find(const void* address, size_t bytes);

void* take(int device, size_t bytes);       // null: the device is full
bool give_back(void* address);              // false: it was never taken
bool take_bytes(int device, size_t bytes);  // physical memory without an address
void give_bytes(int device, size_t bytes);
void* reserve(size_t bytes);
void map(void* address, size_t bytes, int device);
void unmap(void* address, size_t bytes);
void* take_pinned(size_t bytes);
bool pin(void* address, size_t bytes);  // false: a part of it is pinned already
bool unpin(void* address, bool free);
size_t used_bytes(int device);
size_t most_bytes(int device);
size_t pinned_bytes();

}  // namespace standin
