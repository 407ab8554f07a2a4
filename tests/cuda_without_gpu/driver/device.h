// What both interfaces of CUDA ask of a device; each of them only names it differently.
#pragma once

#include <cstddef>
#include <string>

#include "memory.h"
#include "streams.h"

namespace standin {

// Of the calling thread. Negative: the thread has not touched a device; it then uses device 0.
int current_device();
void set_device(int device);
// The object that stands for the device's primary context.
void* context_of(int device);
int device_of(void* context);  // -1: not a context of ours

struct Copied {
  bool to_device, from_device;
};
// Copies in the stream's order, as the driver does: to or from pageable memory not asynchronously.
void copy(void* to, const void* from, size_t bytes, Stream* stream);
void fill(void* at, int value, size_t bytes, Stream* stream);

// A kernel that nothing here computes. `name` tells it in the report.
void launched(const std::string& name, Stream* stream);

struct Event {
  std::shared_ptr<Point> last;
  bool timed;
};
bool elapsed_ms(Event* from, Event* to, float* ms);  // false: one of them was not recorded, passed or timed

struct Counts {
  long kernels, copies, pageable;
};
Counts counts();

}  // namespace standin
