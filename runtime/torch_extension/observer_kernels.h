// Kernels that torch's dispatcher calls before the kernels of a device, for the operators of
// observer_gradients.h. If a call needs no bytes of its gradient, the kernels of the device do not run.
#pragma once
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul_ops.h>

#include "observer_reads.h"

namespace {
c10::DispatchKeySet after_this_kernel(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
}

// Returns true if user code calls an operator now, and if gradients exist.
bool is_called_by_user() {
  return !runs_plainly && gradient_count.load(std::memory_order_relaxed) > 0 && own().in_program == 0;
}

// Returns true if this tensor is a gradient whose calls of user code may need no fetch.
bool is_gradient(const at::Tensor& tensor) {
  if (!is_called_by_user()) return false;
  std::lock_guard<Spin> held(own().lock);
  return gradients.contains(storage_of(tensor));
}

void note_written(StorageImpl* storage) {
  std::lock_guard<Spin> held(own().lock);
  auto found = entries.find(storage);
  if (found != entries.end()) flags_of(found->second).fetch_or(kWritten);
}

// Records what a call asks of a gradient on the device, or how it scales the gradient.
void note_call(StorageImpl* storage, const Seen& seen, const CallOf& call) {
  if (call->what != Spares::kScaling) note_question(seen, call);
  if (call->what != Spares::kNorm) {
    note_written(storage);
    add_scaling(storage, seen, call);
  }
}

// Returns true if the numbers of a call are on a GPU. A copy of them costs the start of a kernel.
bool has_gpu_numbers(Inputs inputs) {
  return std::any_of(inputs.begin() + 1, inputs.end(),
                     [](const c10::IValue& each) { return each.isTensor() && !each.toTensor().is_cpu(); });
}

// Does what the call asks, without the bytes of its gradient. Returns false if the call must run.
bool spare(const c10::OperatorHandle& op, Spares what, Inputs inputs, at::Tensor& number) {
  const at::Tensor& gradient = *gradient_of(inputs);
  StorageImpl* storage = storage_of(gradient);
  const auto seen = see(storage);
  if (!seen || !is_whole(gradient, *storage) || !may_wait(what, inputs, gradient)) return false;
  if (!seen->evicted && what == Spares::kScaling && has_gpu_numbers(inputs)) {
    note_written(storage);
    return false;
  }
  const Plainly plainly;
  const CallOf call = call_of(op, what, inputs, gradient);
  const Answer* answer = what == Spares::kScaling ? nullptr : answer_of(*seen, *call);
  if (needs_no_fetch(*seen, *call) && (what == Spares::kNorm || add_scaling(storage, *seen, call))) {
    // A kernel before this one raises the version of a tensor. For a list, the kernels of the device do it.
    if (what == Spares::kScaling && call->is_list && !gradient.is_inference())
      gradient.unsafeGetTensorImpl()->bump_version();
    if (answer == nullptr) return true;
    answered_so_far++;
    note_question(*seen, call);
    if (what == Spares::kNorm) {
      number = answer->number.clone();
    } else {
      at::Tensor found = inputs[1].toTensor();
      at::maximum_out(found, found, answer->number.to(found.device()).view_as(found));
    }
    return true;
  }
  if (is_evicted(storage)) {  // another thread has evicted it since this operator began
    std::vector<StorageImpl*> missing{storage};
    fetch(missing, op.schema().name().c_str());
  }
  if (const auto now = see(storage); now && !now->evicted) note_call(storage, *now, call);
  return false;
}

// Records the calls of a list operator on several gradients, as calls for one gradient each.
void note_list(const c10::OperatorHandle& op, Spares what, Inputs inputs) {
  const Plainly plainly;
  std::vector<c10::IValue> each(inputs.begin(), inputs.end());
  for (const at::Tensor& gradient : inputs[0].toTensorVector()) {
    StorageImpl* storage = gradient.defined() ? storage_of(gradient) : nullptr;
    const auto seen = storage == nullptr ? std::nullopt : see(storage);
    if (!seen || seen->evicted || !is_whole(gradient, *storage) || !may_wait(what, inputs, gradient))
      continue;
    if (what == Spares::kScaling && has_gpu_numbers(inputs)) continue;
    each[0] = c10::List<at::Tensor>({gradient});
    note_call(storage, *seen, call_of(op, what, Inputs(each.data(), each.size()), gradient));
  }
}

// Replaces the arguments of a call on the stack by its results.
void put_results(torch::jit::Stack& stack, Spares what, const at::Tensor& gradient, const at::Tensor& number,
                 size_t count) {
  const bool is_list = stack[stack.size() - count].isList();
  const at::Tensor kept = gradient;  // an argument on the stack may be the last reference
  torch::jit::drop(stack, count);
  if (what == Spares::kScaling && !is_list) stack.emplace_back(kept);
  if (what == Spares::kNorm && is_list) stack.emplace_back(c10::List<at::Tensor>({number}));
  if (what == Spares::kNorm && !is_list) stack.emplace_back(number);
}

template <Spares what>
void call_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Inputs inputs(stack->data() + stack->size() - count, count);
  const bool is_of_many = inputs[0].isList() && inputs[0].toListRef().size() > 1 && is_called_by_user();
  const at::Tensor* gradient = gradient_of(inputs);
  if (!is_of_many && (gradient == nullptr || !is_gradient(*gradient))) {
    op.redispatchBoxed(after_this_kernel(keys), stack);
    return;
  }
  at::Tensor number;
  if (is_of_many) {
    note_list(op, what, inputs);
  } else if (spare(op, what, inputs, number)) {
    put_results(*stack, what, *gradient, number, count);
    return;
  }
  const Plainly plainly;
  op.redispatchBoxed(after_this_kernel(keys), stack);
}

// The same as `call_boxed`, for an operator that much code calls. It makes no stack for other tensors.
template <typename Op, typename... Rest>
at::Tensor& call_unboxed(c10::DispatchKeySet keys, at::Tensor& self, Rest... rest) {
  if (!is_gradient(self)) return Op::redispatch(after_this_kernel(keys), self, rest...);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  const std::array<c10::IValue, 1 + sizeof...(rest)> inputs{self, c10::IValue(rest)...};
  at::Tensor none;
  if (spare(op, Spares::kScaling, Inputs(inputs.data(), inputs.size()), none)) return self;
  const Plainly plainly;
  return Op::redispatch(after_this_kernel(keys), self, rest...);
}

void add_kernel(const std::string& name, c10::KernelFunction kernel) {
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  const size_t dot = name.find('.');
  const c10::OperatorName full{"aten::" + name.substr(0, dot),
                               dot == std::string::npos ? "" : name.substr(dot + 1)};
  kept.push_back(c10::Dispatcher::singleton().registerImpl(full, c10::DispatchKey::BackendSelect,
                                                           std::move(kernel), std::nullopt, nullptr,
                                                           "teraio: calls that need no fetch"));
}

template <typename Op, typename Rest>
void add_unboxed_kernel() {
  const std::string overload = Op::overload_name;
  add_kernel(std::string(Op::name).substr(6) + "." + overload,
             c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN((call_unboxed<Op, Rest>))));
}

// Adds the kernels to torch's dispatcher, if they have not been added yet.
void add_kernels() {
  static bool added = false;
  if (std::exchange(added, true)) return;
  add_unboxed_kernel<at::_ops::mul__Tensor, const at::Tensor&>();
  add_unboxed_kernel<at::_ops::mul__Scalar, const at::Scalar&>();
  add_unboxed_kernel<at::_ops::div__Tensor, const at::Tensor&>();
  add_unboxed_kernel<at::_ops::div__Scalar, const at::Scalar&>();
  std::istringstream scalings(kScalings), norms(kNorms);
  for (std::string name; scalings >> name;)
    if (!name.starts_with("mul_") && !name.starts_with("div_"))
      add_kernel(name, c10::KernelFunction::makeFromBoxedFunction<&call_boxed<Spares::kScaling>>());
  for (std::string name; norms >> name;)
    add_kernel(name, c10::KernelFunction::makeFromBoxedFunction<&call_boxed<Spares::kNorm>>());
  add_kernel(kUnscaling, c10::KernelFunction::makeFromBoxedFunction<&call_boxed<Spares::kUnscaling>>());
}
}  // namespace
