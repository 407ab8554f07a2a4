// How bytes get between a tensor and a slab. HostCopier: the tensor is in RAM. CudaCopier: the tensor is on a
// device, the slab is pinned, `event` is what must have happened before the tensor may be read (evict) or
// overwritten (fetch). Both return only when the bytes have arrived, so that a finished ticket needs no
// further waiting.
#pragma once
#include <cstddef>
#include <cstdint>

namespace teraio {
struct Copied {
  int error = 0;  // 0, or the device driver's error number
  uint64_t digest = 0;
};

class Copier {
 public:
  virtual ~Copier() = default;
  virtual Copied to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) = 0;
  // `expected`: the digest the bytes must have, or null. On a mismatch the target holds garbage or nothing.
  virtual Copied from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                           const uint64_t* expected) = 0;
};

class HostCopier final : public Copier {
 public:
  Copied to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) override;
  Copied from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                   const uint64_t* expected) override;
};
// Leaves memory alone: what a drive and the slabs can do without a tensor at the other end (benchmarks,
// doctor).
class NoCopier final : public Copier {
 public:
  Copied to_slab(std::byte*, uint64_t, uint64_t, uint64_t, bool) override { return {}; }
  Copied from_slab(uint64_t, const std::byte*, uint64_t, uint64_t, const uint64_t*) override { return {}; }
};
}  // namespace teraio
