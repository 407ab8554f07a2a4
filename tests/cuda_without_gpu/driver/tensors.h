// Tensors that replace CUDA tensors. A replacement is (1) a CPU tensor over the same bytes, (2) a tensor
// without bytes, or (3) a copy of the current value.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/extension.h>

#include <functional>
#include <mutex>
#include <optional>
#include <string>

namespace standin {

using at::Tensor;
using c10::IValue;

// Returns a CPU tensor over the same bytes. The CPU tensor does not keep the bytes alive, because a GPU's
// kernel, too, has only their address.
inline Tensor over_same_bytes(const Tensor& tensor, const std::string& name) {
  const auto& storage = tensor.storage();
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  TORCH_CHECK(storage.nbytes() > 0, "the stand-in: ", name, " is given a tensor without bytes");
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                   at::DataPtr(storage.data_ptr().get(), at::kCPU), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

inline Tensor without_bytes(const Tensor& tensor) {
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Returns a copy of a tensor that is in RAM, as it is at the launch. The kernel gets this copy.
inline Tensor value_of(const Tensor& tensor) {
  Tensor made = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

inline bool is_optional_tensors(const IValue& list) {
  const auto element = list.toList().elementType()->cast<c10::OptionalType>();
  return element != nullptr && element->getElementType()->kind() == c10::TypeKind::TensorType;
}

inline IValue each_tensor(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector())
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    return changed;
  }
  if (value.isList() && is_optional_tensors(value)) {
    c10::List<std::optional<Tensor>> changed;
    for (const IValue& element : value.toListRef())
      changed.push_back(element.isTensor() ? std::optional(change(element.toTensor())) : std::nullopt);
    return changed;
  }
  return value;
}

// Returns a CPU generator that is seeded by the CUDA generator's seed and offset. Advances the offset of the
// CUDA generator.
inline at::Generator numbers_for(const IValue& given, int64_t count) {
  auto generator = given.isGenerator() ? given.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator();
  std::lock_guard lock(generator.mutex());
  auto* cuda = generator.get<at::CUDAGeneratorImpl>();
  const uint64_t seed = cuda->current_seed(), offset = cuda->philox_offset_per_thread();
  cuda->set_philox_offset_per_thread(offset + static_cast<uint64_t>((count + 3) / 4 * 4));
  return at::make_generator<at::CPUGeneratorImpl>(seed * 0x9E3779B97F4A7C15u + offset);
}

}  // namespace standin
