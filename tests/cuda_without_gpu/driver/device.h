// Operations of a device, which both of CUDA's interfaces call. These interfaces differ only in their names.
#pragma once

#include <cstddef>
#include <string>

#include "memory.h"
#include "streams.h"

namespace standin {

// Returns the device of the calling thread. A negative number means that the thread has not set a device yet
// and uses device 0.
int current_device();
void set_device(int device);
// Returns the object that represents the device's primary context.
void* context_of(int device);
int device_of(void* context);  // -1 if `context` is not a context of the stand-in

struct Copied {
  bool to_device, from_device;
};
// Copies in the stream's order. As with the real driver, copies to or from pageable memory are synchronous.
void copy(void* to, const void* from, size_t bytes, Stream* stream);
void fill(void* at, int value, size_t bytes, Stream* stream);

// Records the launch of a kernel that the stand-in does not compute. `name` identifies the kernel in the
// report.
void launched(const std::string& name, Stream* stream);

struct Event {
  std::shared_ptr<Point> last;
  bool timed;
};
bool elapsed_ms(Event* from, Event* to, float* ms);  // false if an event was not recorded, passed or timed

struct Counts {
  long kernels, copies, pageable;
};
Counts counts();

}  // namespace standin
