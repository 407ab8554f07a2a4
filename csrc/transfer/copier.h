// Copies between a tensor and a slab. HostCopier is for tensors in RAM. CudaCopier is for tensors on a device
// and pinned slabs. CudaCopier waits for `event` before it reads or overwrites the tensor. Both copiers
// return only after the copy is complete, so a finished ticket needs no further wait.
#pragma once
#include <cstddef>
#include <cstdint>

namespace teraio {
struct Copied {
  int error = 0;  // error number of the device driver, or 0
  uint64_t digest = 0;
};

class Copier {
 public:
  virtual ~Copier() = default;
  virtual Copied to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) = 0;
  // `expected`: the required digest of the bytes, or null. After a mismatch the bytes of the target are
  // undefined.
  virtual Copied from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                           const uint64_t* expected) = 0;
};

class HostCopier final : public Copier {
 public:
  Copied to_slab(std::byte* slab, uint64_t source, uint64_t bytes, uint64_t event, bool checked) override;
  Copied from_slab(uint64_t target, const std::byte* slab, uint64_t bytes, uint64_t event,
                   const uint64_t* expected) override;
};
// A copier that copies nothing. Benchmarks and the doctor use it to measure drives and slabs alone.
class NoCopier final : public Copier {
 public:
  Copied to_slab(std::byte*, uint64_t, uint64_t, uint64_t, bool) override { return {}; }
  Copied from_slab(uint64_t, const std::byte*, uint64_t, uint64_t, const uint64_t*) override { return {}; }
};
}  // namespace teraio
