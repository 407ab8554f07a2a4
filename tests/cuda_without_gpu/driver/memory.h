// Memory of the simulated GPUs (host memory, filled with 0xDD at first), pinned memory, and reserved
// addresses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace standin {

enum class Place { kPageable, kPinned, kDevice };

struct Found {
  Place place = Place::kPageable;
  int device = -1;
};

// Returns the kind of memory that contains the whole range, and its device. If a range begins in a device's
// memory but does not end there, the stand-in ends the process.
Found find(const void* address, size_t bytes);

void* take(int device, size_t bytes);       // null if the device has too little free memory
bool give_back(void* address);              // false if `address` is not from `take`
bool take_bytes(int device, size_t bytes);  // takes memory of the device without giving it an address
void give_bytes(int device, size_t bytes);
void* reserve(size_t bytes);
void map(void* address, size_t bytes, int device);
void unmap(void* address, size_t bytes);
void* take_pinned(size_t bytes);
bool pin(void* address, size_t bytes);  // false if a part of this memory is already pinned
bool unpin(void* address, bool free);
size_t used_bytes(int device);
size_t most_bytes(int device);
size_t pinned_bytes();

}  // namespace standin
