// ATen's operators on CUDA tensors. ATen's CPU kernels compute them, on the same bytes.
//
// The launching thread gets the shapes of the results from the operator's Meta kernel. It allocates the
// results from torch's real caching allocator, and queues the work on the stream. The stream's thread then
// runs the CPU kernel. So the host runs ahead of the stream, as it does with a GPU. A read that comes too
// early gets 0xDD or the previous bytes.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

#include "tensors.h"

extern "C" {
void standin_push(void* stream, int device, std::function<void()>* work);
bool standin_computes();
}

namespace {

using namespace standin;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

std::mutex calls_mutex;
std::map<std::string, long> calls, synchronous;

[[noreturn]] void stop(const std::string& what) {
  std::fprintf(stderr, "the stand-in: %s\n", what.c_str());
  std::abort();
}

// One call of an operator, with its arguments and its device.
struct Call {
  const c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  std::string name;
  Stack given;
  std::optional<c10::Device> device;

  Call(const c10::OperatorHandle& op, Stack* stack)
      : op(op), schema(op.schema()), name(c10::toString(op.operator_name())) {
    const size_t count = schema.arguments().size();
    given.assign(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    for (const IValue& value : given) {
      each_tensor(value, [this](const Tensor& tensor) {
        if (tensor.is_cuda() && !device) device = tensor.device();
        return tensor;
      });
      if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
    }
    if (!device || !device->has_index()) device = c10::Device(at::kCUDA, c10::cuda::current_device());
  }

  bool writes(size_t at) const {
    const auto* alias = schema.arguments()[at].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  bool writes_any() const {
    for (size_t at = 0; at < given.size(); ++at)
      if (writes(at)) return true;
    return false;
  }

  // Returns true if each returned value is an argument to which the operator writes.
  bool returns_arguments() const {
    for (const auto& returned : schema.returns())
      if (returned.alias_info() == nullptr || !returned.alias_info()->isWrite()) return false;
    return true;
  }

  bool has_out() const {
    for (const auto& argument : schema.arguments())
      if (argument.is_out()) return true;
    return false;
  }

  Stack arguments(const c10::Device& on, const std::function<Tensor(const Tensor&)>& of_device) const {
    Stack made;
    for (size_t at = 0; at < given.size(); ++at) {
      const IValue& value = given[at];
      const auto& argument = schema.arguments()[at];
      if (argument.name() == "pin_memory") made.emplace_back();
      else if (value.isDevice()) made.emplace_back(on);
      else if (value.isGenerator() || (argument.name() == "generator" && value.isNone())) made.emplace_back();
      else
        made.push_back(each_tensor(value, [&](const Tensor& tensor) {
          return tensor.is_cuda() ? of_device(tensor) : value_of(tensor);
        }));
    }
    return made;
  }

  // Returns the results of the operator's Meta kernel, or nullopt if the operator has no Meta kernel.
  std::optional<Stack> meta_results() const {
    if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
    Stack stack = arguments(at::kMeta, without_bytes);
    at::AutoDispatchBelowAutograd below;
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const c10::NotImplementedError&) {
      return std::nullopt;
    }
    return stack;
  }

  int64_t elements() const {
    int64_t most = 1;
    for (const IValue& value : given)
      each_tensor(value, [&](const Tensor& tensor) {
        most = std::max(most, tensor.numel());
        return tensor;
      });
    return most;
  }

  Stack cpu_arguments() const {
    Stack made = arguments(at::kCPU, [this](const Tensor& tensor) { return over_same_bytes(tensor, name); });
    for (size_t at = 0; at < made.size(); ++at)
      if (schema.arguments()[at].name() == "generator") made[at] = IValue(numbers_for(given[at], elements()));
    return made;
  }
};

void give_to_stream(const c10::Device& device, std::function<void()> work) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  standin_push(stream.stream(), device.index(), new std::function<void()>(std::move(work)));
}

// Computes the operator. This runs on the stream's thread.
void compute(const c10::OperatorHandle& op, Stack stack, const std::vector<Tensor>& targets,
             const std::string& name) {
  try {
    thread_local const bool alone = (at::set_num_threads(1), true);  // one thread: sums keep a fixed order
    (void)alone;
    at::AutoDispatchBelowAutograd below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t next = 0;
    for (const IValue& result : stack)
      each_tensor(result, [&](const Tensor& tensor) {
        if (next < targets.size()) {
          if (tensor.sizes() != targets[next].sizes())
            stop(name + " returns other sizes than its Meta kernel");
          targets[next++].copy_(tensor);
        }
        return tensor;
      });
    if (next < targets.size()) stop(name + " returns fewer tensors than its Meta kernel");
  } catch (const std::exception& error) {
    stop(name + " failed on its stream: " + error.what());
  }
}

void return_arguments(const Call& call, Stack* stack) {
  for (const auto& returned : call.schema.returns())
    for (size_t at = 0; at < call.given.size(); ++at) {
      const auto* alias = call.schema.arguments()[at].alias_info();
      if (alias != nullptr && *alias == *returned.alias_info()) {
        torch::jit::push(*stack, call.given[at]);
        break;
      }
    }
}

// Increments the version of each tensor in the lists to which the operator writes. The dispatcher does this
// for all other tensors. For lists, it relies on CUDA's kernels.
void bump_versions(const Call& call) {
  for (size_t at = 0; at < call.given.size(); ++at)
    if (call.writes(at) && call.given[at].isTensorList())
      for (const Tensor& tensor : call.given[at].toTensorVector())
        tensor.unsafeGetTensorImpl()->bump_version();
}

// Resizes the argument `out` to the sizes of the result, as a CUDA kernel does.
void resize_out(const Call& call, const Stack& results) {
  size_t at = 0;
  for (size_t argument = 0; argument < call.given.size(); ++argument) {
    if (!call.schema.arguments()[argument].is_out() || !call.given[argument].isTensor()) continue;
    if (at < results.size() && results[at].isTensor())
      at::native::resize_output(call.given[argument].toTensor(), results[at].toTensor().sizes());
    ++at;
  }
}

// Allocates the operator's results and pushes them onto the stack. Returns CPU tensors over the bytes of the
// results. The stream's thread fills them.
std::vector<Tensor> take_results(const Call& call, const Stack& results, Stack* stack) {
  std::vector<Tensor> targets;
  for (const IValue& result : results)
    torch::jit::push(*stack, each_tensor(result, [&](const Tensor& meta) {
      auto made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*call.device));
      targets.push_back(over_same_bytes(made, call.name));
      return made;
    }));
  return targets;
}

// Waits for the stream, and computes the operator now. An operator needs this if the sizes of its results
// depend on the values in a tensor.
void run_now(const Call& call, Stack* stack) {
  c10::cuda::getCurrentCUDAStream(call.device->index()).synchronize();
  std::vector<std::pair<Tensor, Tensor>> pairs;
  Stack inner = call.arguments(at::kCPU, [&](const Tensor& tensor) {
    Tensor made = over_same_bytes(tensor, call.name);
    pairs.emplace_back(tensor, made);
    return made;
  });
  for (size_t at = 0; at < inner.size(); ++at)
    if (call.schema.arguments()[at].name() == "generator")
      inner[at] = IValue(numbers_for(call.given[at], call.elements()));
  {
    at::AutoDispatchBelowAutograd below;
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inner);
  }
  const auto back = [&](const Tensor& result) {
    for (const auto& [device, host] : pairs)
      if (host.is_same(result)) {
        if (host.sizes() != device.sizes()) {
          device.resize_(host.sizes());
          over_same_bytes(device, call.name).copy_(host);
        }
        return device;
      }
    if (!result.device().is_cpu()) return result;
    auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(*call.device));
    if (result.numel() > 0) over_same_bytes(made, call.name).copy_(result);
    return made;
  };
  for (const IValue& value : inner) torch::jit::push(*stack, each_tensor(value, back));
}

bool depends_on_values(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

void note(std::map<std::string, long>& where, const std::string& name) {
  std::lock_guard lock(calls_mutex);
  ++where[name];
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call call(op, stack);
  note(calls, call.name);
  c10::cuda::CUDAGuard guard(*call.device);
  const bool in_place = call.returns_arguments() && call.writes_any();
  std::vector<Tensor> targets;
  if (!in_place || call.has_out()) {
    std::optional<Stack> results;
    if (!depends_on_values(op)) results = call.meta_results();
    if (!results) {
      note(synchronous, call.name);
      run_now(call, stack);
      return;
    }
    if (in_place) resize_out(call, *results);
    else targets = take_results(call, *results, stack);
  }
  if (in_place) return_arguments(call, stack);
  if (in_place && call.name.rfind("aten::_foreach_", 0) == 0) bump_versions(call);
  std::function<void()> work = [] {};
  if (standin_computes())
    work = [op, inner = call.cpu_arguments(), targets, name = call.name] {
      compute(op, inner, targets, name);
    };
  give_to_stream(*call.device, std::move(work));
}

// Copies a tensor. If both tensors have the same dtype and layout, the driver copies the bytes. Otherwise,
// CPU code converts the numbers.
Tensor& copy(c10::DispatchKeySet, Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowAutograd below;
  const bool plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
                     self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                     self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (plain) return at::native::copy_(self, source, non_blocking);
  if (self.is_cuda() && source.is_cuda()) {
    TORCH_CHECK(self.device() == source.device(), "the stand-in: a copy between devices of another layout");
    const Tensor to = over_same_bytes(self, "copy_"), from = over_same_bytes(source, "copy_");
    give_to_stream(self.device(), [to, from] { to.copy_(from); });
    return self;
  }
  if (self.is_cuda()) {
    auto staged = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
    staged.copy_(source);
    const Tensor to = over_same_bytes(self, "copy_");
    give_to_stream(self.device(), [to, staged] { to.copy_(staged); });
    return self;
  }
  c10::cuda::getCurrentCUDAStream(source.device().index()).synchronize();
  self.copy_(over_same_bytes(source, "copy_"));
  return self;
}

std::set<std::string> named(const std::string& names) {
  std::istringstream words(names);
  std::set<std::string> found;
  for (std::string word; words >> word;) found.insert("aten::" + word);
  return found;
}

// Operators that torch's own code for CUDA runs. They allocate memory, make views, or read one value.
const std::set<std::string> kTorchs = named(
    "empty.memory_format empty_strided resize_ resize_as_ view as_strided _reshape_alias unfold view_as_real "
    "view_as_complex set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor "
    "is_set_to "
    "record_stream is_pinned _pin_memory _local_scalar_dense copy_ _fused_sdp_choice");

long install() {
  static std::vector<c10::RegistrationHandleRAII> held;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    if (kTorchs.count(c10::toString(name)) != 0) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
      continue;
    held.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                           c10::KernelFunction::makeFromBoxedFunction<&run>(), std::nullopt,
                                           nullptr, "the stand-in"));
  }
  held.push_back(dispatcher.registerImpl(c10::OperatorName("aten::copy_", ""), c10::DispatchKey::CUDA,
                                         c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy),
                                         std::nullopt, nullptr, "the stand-in"));
  return static_cast<long>(held.size());
}

std::map<std::string, long> copied(const std::map<std::string, long>& counts) {
  std::lock_guard lock(calls_mutex);
  return counts;
}

}  // namespace

PYBIND11_MODULE(operators, module) {
  module.def("install", &install);
  module.def("calls", [] { return copied(calls); });
  module.def("synchronous", [] { return copied(synchronous); });
  module.def("over_same_bytes", [](const Tensor& tensor) { return over_same_bytes(tensor, "Python"); });
}
