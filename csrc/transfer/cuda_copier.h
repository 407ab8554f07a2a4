// Copies between device memory and pinned slabs with CUDA's driver API. The driver library is opened at run
// time, so the build needs no CUDA. On a machine without CUDA, only the constructor of CudaCopier fails.
//
// A copy runs on a stream of the copier. The stream waits for `event` and copies. The worker thread then
// blocks, without spinning, until the copy is complete. In a fetch, the worker verifies the digest of the
// slab's bytes before the copy. Wrong bytes therefore never reach the device.
//
// [Note: unrecorded events] In CUDA a wait for an event that was never recorded returns immediately, without
// an error. The caller must therefore record the event before the call that submits the transfer.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/copier.h"
#include "transfer/slabs.h"

namespace teraio {
class CudaCopier final : public Copier {
 public:
  // `context` is a CUcontext, or 0 for the context that is current on this thread.
  CudaCopier(const std::string& library, uint64_t context);
  ~CudaCopier() override;
  Copied to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) override;
  Copied from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                   const uint64_t* expected) override;
  // Pins the arena of the slabs until unpin(), or until this copier is destroyed. Returns the driver's error
  // number, or 0 for success. Any thread may call pin(), and the thread's current context does not change.
  int pin(const std::shared_ptr<Slabs>& slabs);
  // Unpins the arena. No copy to or from the arena may be in flight.
  int unpin(const std::shared_ptr<Slabs>& slabs);
  // Makes a stream that lives as long as the process. A stream from torch would not do: torch gives out the
  // streams of a pool in turn, so user code could get the same stream.
  int stream(int priority, uint64_t* made);
  // Queues one copy between device memory and pinned host memory on a stream of the caller, and does not wait
  // for the copy. Returns the driver's error number.
  int give_to(uint64_t stream, uint64_t on_device, uint64_t in_host, uint64_t bytes, bool out);

 private:
  struct Driver;
  class Current;
  struct Side {  // a stream for copies, and the event that the copier records after each copy
    void* stream = nullptr;
    void* arrived = nullptr;
  };
  int take(Side* side);
  void give(const Side& side);
  template <typename Copy>
  int run(uint64_t event, Copy copy);

  std::unique_ptr<Driver> driver_;
  void* context_ = nullptr;
  uint64_t born_;
  std::mutex mutex_;
  std::vector<Side> sides_;  // idle streams; at most one per worker thread
  std::vector<std::shared_ptr<Slabs>> pinned_;
};
}  // namespace teraio
