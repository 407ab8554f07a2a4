// Tensors that stand for others: over the same bytes on the CPU, without bytes, or with a value of now.
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

// A tensor of the CPU over the same bytes. It owns nothing: as a kernel of a GPU it has addresses only.
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

// What a kernel is given of a tensor that lies in RAM: its value when the kernel was launched.
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

// A generator of the CPU whose numbers follow from the CUDA generator's seed and offset, which moves on.
inline at::Generator numbers_for(const IValue& given, int64_t count) {
  auto generator = given.isGenerator() ? given.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator();
  std::lock_guard lock(generator.mutex());
  auto* cuda = generator.get<at::CUDAGeneratorImpl>();
  const uint64_t seed = cuda->current_seed(), offset = cuda->philox_offset_per_thread();
  cuda->set_philox_offset_per_thread(offset + static_cast<uint64_t>((count + 3) / 4 * 4));
  return at::make_generator<at::CPUGeneratorImpl>(seed * 0x9E3779B97F4A7C15u + offset);
}

}  // namespace standin
