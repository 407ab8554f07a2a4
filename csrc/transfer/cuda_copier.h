// Between device memory and pinned slabs with CUDA's driver API, opened at run time: nothing here needs CUDA
// to build, and a machine without it only learns so when it asks for this copier.
//
// A copy runs on a side stream of ours: it waits for `event` there, copies, and the worker blocks (it does
// not spin) until the copy's own event. A fetch is digested in the slab first, so wrong bytes never reach the
// device. [Note: unrecorded events] To wait for an event that was never recorded is a silent no-op in CUDA.
// So whoever passes an event has recorded it before the call that submits the transfer.
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
  // `context`: a CUcontext, or 0 for the one that is current in this thread.
  CudaCopier(const std::string& library, uint64_t context);
  ~CudaCopier() override;
  Copied to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) override;
  Copied from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                   const uint64_t* expected) override;
  // Pins the arena for the life of this copier; the driver's error number, 0 when it is pinned. On any
  // thread, whose current context stays as it was.
  int pin(const std::shared_ptr<Slabs>& slabs);
  // Ends that: no copy to or from the arena may be under way.
  int unpin(const std::shared_ptr<Slabs>& slabs);
  // Makes a stream that lives as long as the process. Torch takes its streams from a pool in turn, so one of
  // torch's may be a user's as well.
  int stream(int priority, uint64_t* made);
  // Gives a caller's stream one copy between device memory and pinned host memory, and does not wait for it.
  // Returns the driver's error number.
  int give_to(uint64_t stream, uint64_t on_device, uint64_t in_host, uint64_t bytes, bool out);

 private:
  struct Driver;
  class Current;
  struct Side {  // a side stream and the event that ends each copy on it
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
  std::vector<Side> sides_;  // idle ones; there are never more than workers
  std::vector<std::shared_ptr<Slabs>> pinned_;
};
}  // namespace teraio
