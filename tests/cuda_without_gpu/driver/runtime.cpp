// The runtime interface (libcudart), with only those functions that torch uses. For each other function,
// environment.py adds a function that stops the process.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device.h"
#include "entry_points.h"
#include "stop.h"

#define RUNTIME STANDIN_EXPORT cudaError_t

namespace {

using namespace standin;

constexpr size_t kMallocGrain = 2 << 20;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) {
  return last_error = error;
}

Stream* stream_of(cudaStream_t handle) {
  return standin::stream_of(handle, current_device());
}
Event* event_of(cudaEvent_t handle) {
  return reinterpret_cast<Event*>(handle);
}

cudaError_t made_stream(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(make_stream(current_device(), flags, priority));
  return cudaSuccess;
}

std::mutex names_mutex;
std::map<const void*, std::string>& names() {
  static auto* all = new std::map<const void*, std::string>;
  return *all;
}

// Stops the process if it launches a kernel of torch's own libraries. The stand-in does not compute these
// kernels, so their results would be wrong.
[[noreturn]] void uncomputed(const void* function) {
  std::lock_guard lock(names_mutex);
  const auto at = names().find(function);
  stop("a kernel was launched that operators.cpp does not compute: %s",
       at == names().end() ? "without a name" : at->second.c_str());
}

}  // namespace

// ---- devices

RUNTIME cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return cudaSuccess;
}
RUNTIME cudaGetDevice(int* device) {
  *device = current_device();
  set_device(*device);
  return cudaSuccess;
}
RUNTIME cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return failed(cudaErrorInvalidDevice);
  set_device(device);
  return cudaSuccess;
}
RUNTIME cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
RUNTIME cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
RUNTIME cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= settings().devices) return failed(cudaErrorInvalidDevice);
  cudaDeviceProp made;
  std::memset(&made, 0, sizeof made);
  std::snprintf(made.name, sizeof made.name, "Stand-in for an H100");
  std::memset(made.uuid.bytes, device + 1, sizeof made.uuid.bytes);
  made.totalGlobalMem = settings().device_bytes;
  made.sharedMemPerBlock = 49'152;
  made.sharedMemPerMultiprocessor = 233'472;
  made.sharedMemPerBlockOptin = 232'448;
  made.regsPerBlock = made.regsPerMultiprocessor = 65'536;
  made.warpSize = 32;
  made.maxThreadsPerBlock = made.maxThreadsDim[0] = made.maxThreadsDim[1] = 1'024;
  made.maxThreadsDim[2] = 64;
  made.maxGridSize[0] = 0x7FFFFFFF;
  made.maxGridSize[1] = made.maxGridSize[2] = 65'535;
  made.totalConstMem = 65'536;
  made.major = 9;
  made.multiProcessorCount = 132;
  made.maxThreadsPerMultiProcessor = 2'048;
  made.maxBlocksPerMultiProcessor = 32;
  made.canMapHostMemory = made.concurrentKernels = made.unifiedAddressing = made.managedMemory = 1;
  made.asyncEngineCount = 3;
  made.memoryBusWidth = 5'120;
  made.l2CacheSize = 50 << 20;
  made.pciBusID = made.pciDeviceID = device + 1;
  *properties = made;
  return cudaSuccess;
}
RUNTIME cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = device_attribute(attribute, device);
  return cudaSuccess;
}
RUNTIME cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
RUNTIME cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
RUNTIME cudaDeviceCanAccessPeer(int* value, int, int) {
  *value = 0;
  return cudaSuccess;
}
RUNTIME cudaDeviceSynchronize() {
  synchronize_all(current_device());
  return cudaSuccess;
}

// ---- errors

RUNTIME cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
RUNTIME cudaPeekAtLastError() {
  return last_error;
}
STANDIN_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    default: return "an error of the stand-in";
  }
}
STANDIN_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  return cudaGetErrorString(error);
}

// ---- memory

RUNTIME cudaMemGetInfo(size_t* free, size_t* total) {
  *total = settings().device_bytes;
  *free = *total - used_bytes(current_device());
  return cudaSuccess;
}
RUNTIME cudaMalloc(void** address, size_t bytes) {
  *address = take(current_device(), (bytes + kMallocGrain - 1) / kMallocGrain * kMallocGrain);
  return *address != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
RUNTIME cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  const Found found = find(address, 1);
  if (found.place == Place::kDevice) synchronize_all(found.device);
  return give_back(address) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
RUNTIME cudaHostAlloc(void** address, size_t bytes, unsigned) {
  *address = take_pinned(bytes);
  return *address != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
RUNTIME cudaMallocHost(void** address, size_t bytes) {
  return cudaHostAlloc(address, bytes, 0);
}
RUNTIME cudaFreeHost(void* address) {
  for (int device = 0; device < settings().devices; ++device) synchronize_all(device);
  return unpin(address, true) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
RUNTIME cudaHostRegister(void* address, size_t bytes, unsigned) {
  return pin(address, bytes) ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}
RUNTIME cudaHostUnregister(void* address) {
  return unpin(address, false) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
RUNTIME cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof *attributes);
  const Found found = find(address, 1);
  auto* plain = const_cast<void*>(address);
  switch (found.place) {
    case Place::kDevice:
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = found.device;
      attributes->devicePointer = plain;
      break;
    case Place::kPinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = attributes->hostPointer = plain;
      break;
    case Place::kPageable:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -2;
      attributes->hostPointer = plain;
      break;
  }
  return cudaSuccess;
}
RUNTIME cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  copy(to, from, bytes, stream_of(stream));
  return cudaSuccess;
}
RUNTIME cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes, stream_of(nullptr));
  stream_of(nullptr)->synchronize();
  return cudaSuccess;
}
RUNTIME cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  copy(to, from, bytes, stream_of(stream));
  return cudaSuccess;
}
RUNTIME cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                          size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width,
         stream_of(stream));
  return cudaSuccess;
}
RUNTIME cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  fill(at, value, bytes, stream_of(stream));
  return cudaSuccess;
}
RUNTIME cudaMemset(void* at, int value, size_t bytes) {
  return cudaMemsetAsync(at, value, bytes, nullptr);
}
RUNTIME cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(context_of(device));
  return cudaSuccess;
}

// ---- streams and events

RUNTIME cudaStreamCreate(cudaStream_t* stream) {
  return made_stream(stream, 0, 0);
}
RUNTIME cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return made_stream(stream, flags, 0);
}
RUNTIME cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return made_stream(stream, flags, priority);
}
RUNTIME cudaStreamDestroy(cudaStream_t stream) {
  end_stream(stream);
  return cudaSuccess;
}
RUNTIME cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
RUNTIME cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream)->synchronize();
  return cudaSuccess;
}
RUNTIME cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream)->idle() ? cudaSuccess : failed(cudaErrorNotReady);
}
RUNTIME cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const auto point = event_of(event)->last) stream_of(stream)->wait_for(point);
  return cudaSuccess;
}
RUNTIME cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
RUNTIME cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                 cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}
RUNTIME cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
RUNTIME cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  stream_of(stream)->push([=] { function(argument); });
  return cudaSuccess;
}
RUNTIME cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{nullptr, (flags & cudaEventDisableTiming) == 0});
  return cudaSuccess;
}
RUNTIME cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
RUNTIME cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event_of(event)->last = stream_of(stream)->record();
  return cudaSuccess;
}
RUNTIME cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
RUNTIME cudaEventSynchronize(cudaEvent_t event) {
  if (const auto point = event_of(event)->last) wait_unlocked([&] { point->wait(); });
  return cudaSuccess;
}
RUNTIME cudaEventQuery(cudaEvent_t event) {
  const auto point = event_of(event)->last;
  return point == nullptr || point->passed() ? cudaSuccess : failed(cudaErrorNotReady);
}
RUNTIME cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return elapsed_ms(event_of(from), event_of(to), ms) ? cudaSuccess : failed(cudaErrorNotReady);
}

// ---- kernels of torch's libraries

RUNTIME cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  uncomputed(function);
}
RUNTIME cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  uncomputed(function);
}
RUNTIME cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  uncomputed(function);
}
STANDIN_EXPORT int __cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, void*) {
  uncomputed(function);
}
STANDIN_EXPORT int __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return 0;
}
RUNTIME cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1'024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
RUNTIME cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                               unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
STANDIN_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
STANDIN_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
STANDIN_EXPORT void __cudaUnregisterFatBinary(void**) {}
STANDIN_EXPORT void __cudaInitModule(void**) {}
STANDIN_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
STANDIN_EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                           void*, void*, void*, int*) {
  std::lock_guard lock(names_mutex);
  names()[host] = name;
}

// ---- lookup of the driver's functions by name

RUNTIME cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                         cudaDriverEntryPointQueryResult* result) {
  *function = entry_point(name);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
