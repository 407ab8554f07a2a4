// The driver interface (libcuda), with only those functions that torch, Triton and teraio use.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "device.h"
#include "entry_points.h"
#include "stop.h"

#define DRIVER STANDIN_EXPORT CUresult

namespace {

using namespace standin;

constexpr size_t kMapGrain = 2 << 20;

Stream* stream_of(CUstream handle) {
  return standin::stream_of(handle, current_device());
}
Event* event_of(CUevent handle) {
  return reinterpret_cast<Event*>(handle);
}
void* address_of(CUdeviceptr number) {
  return reinterpret_cast<void*>(number);
}

// Physical memory, which torch's expandable segments map to addresses.
struct Physical {
  size_t bytes;
  int device;
};

// A kernel that Triton compiled.
struct Function {
  std::string name;
};

// ---- unknown names: one function for each name, because a function does not receive the name by which it
// was called

constexpr int kMostUnknown = 256;
std::array<std::string, kMostUnknown>& unknown_names() {
  static auto* all = new std::array<std::string, kMostUnknown>;
  return *all;
}

template <int kIndex>
[[noreturn]] void unknown() {
  stop("%s is called, and is not modelled", unknown_names()[kIndex].c_str());
}

template <int... kIndices>
constexpr std::array<void (*)(), kMostUnknown> unknown_table(std::integer_sequence<int, kIndices...>) {
  return {&unknown<kIndices>...};
}

void* stops_by_name(const char* name) {
  static constexpr auto table = unknown_table(std::make_integer_sequence<int, kMostUnknown>());
  static std::mutex mutex;
  static std::map<std::string, int> given;
  std::lock_guard lock(mutex);
  const auto [at, is_new] = given.try_emplace(name, static_cast<int>(given.size()));
  if (at->second >= kMostUnknown) stop("more than %d unknown names, %s among them", kMostUnknown, name);
  if (is_new) unknown_names()[static_cast<size_t>(at->second)] = name;
  return reinterpret_cast<void*>(table[static_cast<size_t>(at->second)]);
}

}  // namespace

void* standin::entry_point(const char* name) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW);
  const std::string plain = name;
  for (const char* version : {"_v2", ""})
    if (void* found = dlsym(self, (plain + version).c_str())) return found;
  return stops_by_name(name);
}

int standin::device_attribute(int attribute, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return properties.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX: return properties.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY: return properties.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ: return properties.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return properties.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: return properties.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ: return properties.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock: return static_cast<int>(properties.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return static_cast<int>(properties.sharedMemPerBlockOptin);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(properties.sharedMemPerMultiprocessor);
    case cudaDevAttrWarpSize: return properties.warpSize;
    case cudaDevAttrMultiProcessorCount: return properties.multiProcessorCount;
    case cudaDevAttrComputeCapabilityMajor: return properties.major;
    case cudaDevAttrComputeCapabilityMinor: return properties.minor;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return properties.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxRegistersPerBlock: return properties.regsPerBlock;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return properties.regsPerMultiprocessor;
    case cudaDevAttrUnifiedAddressing: return properties.unifiedAddressing;
    case cudaDevAttrGlobalMemoryBusWidth: return properties.memoryBusWidth;
    case cudaDevAttrL2CacheSize: return properties.l2CacheSize;
    case cudaDevAttrAsyncEngineCount: return properties.asyncEngineCount;
    case cudaDevAttrClockRate: return 1'980'000;
    case cudaDevAttrMemoryClockRate: return 2'619'000;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;  // all other features are missing
  }
}

// ---- devices and contexts

DRIVER cuInit(unsigned) {
  return CUDA_SUCCESS;
}
DRIVER cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
DRIVER cuDeviceGetCount(int* count) {
  *count = settings().devices;
  return CUDA_SUCCESS;
}
DRIVER cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < settings().devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDeviceGetName(char* name, int size, CUdevice) {
  std::snprintf(name, static_cast<size_t>(size), "Stand-in for an H100");
  return CUDA_SUCCESS;
}
DRIVER cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = settings().device_bytes;
  return CUDA_SUCCESS;
}
DRIVER cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = device_attribute(attribute, device);
  return CUDA_SUCCESS;
}
DRIVER cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = static_cast<CUcontext>(context_of(device));
  return CUDA_SUCCESS;
}
DRIVER cuDevicePrimaryCtxRelease_v2(CUdevice) {
  return CUDA_SUCCESS;
}
DRIVER cuCtxGetCurrent(CUcontext* context) {
  *context = static_cast<CUcontext>(context_of(current_device()));
  return CUDA_SUCCESS;
}
DRIVER cuCtxSetCurrent(CUcontext context) {
  const int device = context == nullptr ? 0 : device_of(context);
  if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  set_device(device);
  return CUDA_SUCCESS;
}
DRIVER cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
DRIVER cuCtxSynchronize() {
  synchronize_all(current_device());
  return CUDA_SUCCESS;
}
DRIVER cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}
DRIVER cuCtxPushCurrent_v2(CUcontext context) {
  return cuCtxSetCurrent(context);
}
DRIVER cuCtxPopCurrent_v2(CUcontext* context) {
  return cuCtxGetCurrent(context);
}
DRIVER cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the stand-in";
  return CUDA_SUCCESS;
}
DRIVER cuGetErrorName(CUresult result, const char** text) {
  return cuGetErrorString(result, text);
}

// ---- streams and events

DRIVER cuStreamCreate(CUstream* stream, unsigned flags) {
  *stream = reinterpret_cast<CUstream>(make_stream(current_device(), flags, 0));
  return CUDA_SUCCESS;
}
DRIVER cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  *stream = reinterpret_cast<CUstream>(make_stream(current_device(), flags, priority));
  return CUDA_SUCCESS;
}
DRIVER cuStreamDestroy_v2(CUstream stream) {
  end_stream(stream);
  return CUDA_SUCCESS;
}
DRIVER cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  if (const auto point = event_of(event)->last) stream_of(stream)->wait_for(point);
  return CUDA_SUCCESS;
}
DRIVER cuStreamSynchronize(CUstream stream) {
  stream_of(stream)->synchronize();
  return CUDA_SUCCESS;
}
DRIVER cuEventCreate(CUevent* event, unsigned flags) {
  *event = reinterpret_cast<CUevent>(new Event{nullptr, (flags & CU_EVENT_DISABLE_TIMING) == 0});
  return CUDA_SUCCESS;
}
DRIVER cuEventDestroy_v2(CUevent event) {
  delete event_of(event);
  return CUDA_SUCCESS;
}
DRIVER cuEventRecord(CUevent event, CUstream stream) {
  event_of(event)->last = stream_of(stream)->record();
  return CUDA_SUCCESS;
}
DRIVER cuEventSynchronize(CUevent event) {
  if (const auto point = event_of(event)->last) wait_unlocked([&] { point->wait(); });
  return CUDA_SUCCESS;
}
DRIVER cuEventQuery(CUevent event) {
  const auto point = event_of(event)->last;
  return point == nullptr || point->passed() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

// ---- memory

DRIVER cuMemGetInfo_v2(size_t* free, size_t* total) {
  return static_cast<CUresult>(cudaMemGetInfo(free, total));
}
DRIVER cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  void* made = nullptr;
  if (cudaMalloc(&made, bytes) != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(made);
  return CUDA_SUCCESS;
}
DRIVER cuMemFree_v2(CUdeviceptr address) {
  return static_cast<CUresult>(cudaFree(address_of(address)));
}
DRIVER cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  copy(to, address_of(from), bytes, stream_of(stream));
  return CUDA_SUCCESS;
}
DRIVER cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  copy(address_of(to), from, bytes, stream_of(stream));
  return CUDA_SUCCESS;
}
DRIVER cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
  return pin(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}
DRIVER cuMemHostUnregister(void* address) {
  return unpin(address, false) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
DRIVER cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    stop("cuPointerGetAttribute is asked for attribute %d", static_cast<int>(attribute));
  *static_cast<CUdeviceptr*>(value) = address;
  return find(address_of(address), 1).place == Place::kPageable ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
DRIVER cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                     CUmemAllocationGranularity_flags) {
  *bytes = kMapGrain;
  return CUDA_SUCCESS;
}
DRIVER cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(reserve(bytes));
  return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
DRIVER cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  unmap(address_of(address), bytes);
  return CUDA_SUCCESS;
}
DRIVER cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* about,
                   unsigned long long) {
  const int device = about->location.id;
  if (!take_bytes(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{bytes, device});
  return CUDA_SUCCESS;
}
DRIVER cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* physical = reinterpret_cast<Physical*>(handle);
  give_bytes(physical->device, physical->bytes);
  delete physical;
  return CUDA_SUCCESS;
}
DRIVER cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                unsigned long long) {
  map(address_of(address), bytes, reinterpret_cast<Physical*>(handle)->device);
  return CUDA_SUCCESS;
}
DRIVER cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
DRIVER cuMemUnmap(CUdeviceptr address, size_t bytes) {
  const Found found = find(address_of(address), 1);
  if (found.place == Place::kDevice) synchronize_all(found.device);
  unmap(address_of(address), bytes);
  return CUDA_SUCCESS;
}

// ---- kernels that Triton compiled: they take time and compute nothing

DRIVER cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(new int);
  return CUDA_SUCCESS;
}
DRIVER cuModuleLoad(CUmodule* module, const char*) {
  return cuModuleLoadData(module, nullptr);
}
DRIVER cuModuleUnload(CUmodule module) {
  delete reinterpret_cast<int*>(module);
  return CUDA_SUCCESS;
}
DRIVER cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new Function{name});
  return CUDA_SUCCESS;
}
DRIVER cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1'024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}
DRIVER cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}
DRIVER cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}
DRIVER cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, CUstream stream, void**, void**) {
  launched(reinterpret_cast<Function*>(function)->name, stream_of(stream));
  return CUDA_SUCCESS;
}
DRIVER cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  launched(reinterpret_cast<Function*>(function)->name, stream_of(config->hStream));
  return CUDA_SUCCESS;
}
