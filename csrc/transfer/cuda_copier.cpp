// The copies between device and host, the pool of streams for them, and the look-up of the driver's functions
// by name.
#include "transfer/cuda_copier.h"

#include <dlfcn.h>

#include <stdexcept>

#include "base/fork.h"
#include "transfer/hash.h"

namespace teraio {
namespace {
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: independent of the legacy default stream
constexpr unsigned kBlockingNoTiming = 1 | 2;  // CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;              // CU_MEMHOSTREGISTER_PORTABLE
}  // namespace

struct CudaCopier::Driver {
  void* library = nullptr;
  int (*ctx_get)(void**) = nullptr;
  int (*ctx_set)(void*) = nullptr;
  int (*ctx_synchronize)() = nullptr;
  int (*stream_create)(void**, unsigned) = nullptr;
  int (*stream_create_with_priority)(void**, unsigned, int) = nullptr;
  int (*stream_destroy)(void*) = nullptr;
  int (*stream_wait_event)(void*, void*, unsigned) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  int (*event_synchronize)(void*) = nullptr;
  int (*event_destroy)(void*) = nullptr;
  int (*to_host)(void*, uint64_t, size_t, void*) = nullptr;
  int (*to_device)(uint64_t, const void*, size_t, void*) = nullptr;
  int (*host_register)(void*, size_t, unsigned) = nullptr;
  int (*host_unregister)(void*) = nullptr;

  explicit Driver(const std::string& name) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
    find(ctx_get, "cuCtxGetCurrent");
    find(ctx_set, "cuCtxSetCurrent");
    find(ctx_synchronize, "cuCtxSynchronize");
    find(stream_create, "cuStreamCreate");
    find(stream_create_with_priority, "cuStreamCreateWithPriority");
    find(stream_destroy, "cuStreamDestroy_v2");
    find(stream_wait_event, "cuStreamWaitEvent");
    find(event_create, "cuEventCreate");
    find(event_record, "cuEventRecord");
    find(event_synchronize, "cuEventSynchronize");
    find(event_destroy, "cuEventDestroy_v2");
    find(to_host, "cuMemcpyDtoHAsync_v2");
    find(to_device, "cuMemcpyHtoDAsync_v2");
    find(host_register, "cuMemHostRegister_v2");
    find(host_unregister, "cuMemHostUnregister");
  }

  template <typename Function>
  void find(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
    if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + symbol);
  }
};

// A scope in which the copier's context is current on the calling thread. The end of the scope restores the
// thread's former context. Otherwise user code on this thread would run on the copier's device, because the
// CUDA runtime derives the current device from the context.
class CudaCopier::Current {
 public:
  explicit Current(const CudaCopier& copier) : driver_(*copier.driver_) {
    error = driver_.ctx_get(&before_);
    if (error == 0) error = driver_.ctx_set(copier.context_);
    changed_ = error == 0;
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    if (changed_) driver_.ctx_set(before_);
  }
  int error = 0;

 private:
  Driver& driver_;
  void* before_ = nullptr;
  bool changed_ = false;
};

CudaCopier::CudaCopier(const std::string& library, uint64_t context)
    : driver_(std::make_unique<Driver>(library)), born_(fork_count()) {
  context_ = reinterpret_cast<void*>(context);
  if (context_ == nullptr && (driver_->ctx_get(&context_) != 0 || context_ == nullptr))
    throw std::runtime_error("no CUDA context is current in this thread; touch the device first");
}

// Ignores errors, because after the driver has shut down every call returns an error.
CudaCopier::~CudaCopier() {
  if (born_ != fork_count()) return;  // CUDA does not work after a fork
  const Current current(*this);
  if (current.error != 0) return;  // the driver has shut down and released the arenas
  // Callers' streams may still copy to and from the pinned arenas. Wait for these streams before unpinning.
  if (!pinned_.empty()) driver_->ctx_synchronize();
  for (const Side& side : sides_) {
    driver_->event_destroy(side.arrived);
    driver_->stream_destroy(side.stream);
  }
  for (const auto& slabs : pinned_) driver_->host_unregister(reinterpret_cast<void*>(slabs->address()));
}

int CudaCopier::pin(const std::shared_ptr<Slabs>& slabs) {
  const Current current(*this);
  if (current.error != 0) return current.error;
  const int error =
      driver_->host_register(reinterpret_cast<void*>(slabs->address()), slabs->arena_bytes(), kPortable);
  if (error != 0) return error;
  std::lock_guard lock(mutex_);
  pinned_.push_back(slabs);
  return 0;
}

int CudaCopier::unpin(const std::shared_ptr<Slabs>& slabs) {
  const Current current(*this);
  if (current.error != 0) return current.error;
  std::lock_guard lock(mutex_);
  if (std::erase(pinned_, slabs) == 0) return 0;
  return driver_->host_unregister(reinterpret_cast<void*>(slabs->address()));
}

int CudaCopier::stream(int priority, uint64_t* made) {
  const Current current(*this);
  if (current.error != 0) return current.error;
  void* stream = nullptr;
  if (const int error = driver_->stream_create_with_priority(&stream, kNonBlocking, priority); error != 0)
    return error;
  *made = reinterpret_cast<uint64_t>(stream);
  return 0;
}

int CudaCopier::give_to(uint64_t stream, uint64_t on_device, uint64_t in_host, uint64_t bytes, bool out) {
  const Current current(*this);
  if (current.error != 0) return current.error;
  void* host = reinterpret_cast<void*>(in_host);
  void* queue = reinterpret_cast<void*>(stream);
  return out ? driver_->to_host(host, on_device, bytes, queue)
             : driver_->to_device(on_device, host, bytes, queue);
}

int CudaCopier::take(Side* side) {
  {
    std::lock_guard lock(mutex_);
    if (!sides_.empty()) {
      *side = sides_.back();
      sides_.pop_back();
      return 0;
    }
  }
  if (const int error = driver_->stream_create(&side->stream, kNonBlocking); error != 0) return error;
  const int error = driver_->event_create(&side->arrived, kBlockingNoTiming);
  if (error != 0) driver_->stream_destroy(side->stream);
  return error;
}

void CudaCopier::give(const Side& side) {
  std::lock_guard lock(mutex_);
  sides_.push_back(side);
}

template <typename Copy>
int CudaCopier::run(uint64_t event, Copy copy) {
  Side side;
  if (const int error = driver_->ctx_set(context_); error != 0) return error;
  if (const int error = take(&side); error != 0) return error;
  int error = 0;
  if (event != 0) error = driver_->stream_wait_event(side.stream, reinterpret_cast<void*>(event), 0);
  if (error == 0) error = copy(side.stream);
  if (error == 0) error = driver_->event_record(side.arrived, side.stream);
  if (error == 0) error = driver_->event_synchronize(side.arrived);
  if (error == 0) give(side);  // after an error the stream may still run, so never reuse or destroy it
  return error;
}

Copied CudaCopier::to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) {
  const int error = run(event, [&](void* stream) { return driver_->to_host(slab, source, bytes, stream); });
  return {error, error == 0 && checked ? digest(slab, bytes) : 0};
}

Copied CudaCopier::from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                             const uint64_t* expected) {
  const uint64_t found = expected != nullptr ? digest(slab, bytes) : 0;
  if (expected != nullptr && found != *expected) return {0, found};
  return {run(event, [&](void* stream) { return driver_->to_device(target, slab, bytes, stream); }), found};
}
}  // namespace teraio
