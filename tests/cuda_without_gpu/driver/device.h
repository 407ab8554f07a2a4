// Operations of a simulated GPU. The driver interface (libcuda) and the runtime interface (libcudart) both
// call these operations.
#pragma once

#include <cstddef>
#include <string>

#include "memory.h"
#include "streams.h"

namespace standin {

// Returns the device of the calling thread. If the thread has not set a device, this is device 0.
int current_device();
void set_device(int device);
// Returns the pointer that identifies the primary context of this device.
void* context_of(int device);
int device_of(void* context);  // -1 if `context` is not a context of the stand-in

struct Copied {
  bool to_device, from_device;
};
// Copies in the stream's order. A copy from pageable memory reads its source before this function returns. A
// copy to pageable memory has ended when this function returns.
void copy(void* to, const void* from, size_t bytes, Stream* stream);
void fill(void* at, int value, size_t bytes, Stream* stream);

// Records the launch of a kernel that the stand-in does not compute. The report of a process contains `name`.
void launched(const std::string& name, Stream* stream);

struct Event {
  std::shared_ptr<Point> last;
  bool timed;
};
bool elapsed_ms(Event* from, Event* to, float* ms);  // false if an event is unrecorded, untimed or not passed

struct Counts {
  long kernels, copies, pageable;
};
Counts counts();

}  // namespace standin
