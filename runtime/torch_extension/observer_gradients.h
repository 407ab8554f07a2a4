// Calls of operators on evicted gradients that need no fetch.
//
//   a scaling      multiplies or clamps each number of a gradient in place. A call on an evicted gradient is
//                  owed: a later fetch reads the bytes, and then the same operator runs on them
//   a norm         is a number about a gradient's bytes, for which an earlier step has asked. It is computed
//                  when the gradient is evicted, by the same operator, from the bytes that are about to be
//                  freed. A call on the evicted gradient returns this number
//   an unscaling   is GradScaler's operator: a scaling and a check for infinite numbers, which is remembered
//                  like a norm
//
// A remembered number is valid until the gradient's bytes are on the device again. If scalings are owed, a
// number is valid only for the same scalings: they ran on the bytes before the number was computed.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <sstream>

#include "observer_known.h"

namespace {
// ---- the operators

constexpr const char* kScalings =
    "mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar clamp_ clamp_min_ clamp_max_ nan_to_num_ "
    "_foreach_mul_.Tensor _foreach_mul_.Scalar _foreach_div_.Tensor _foreach_div_.Scalar "
    "_foreach_clamp_min_.Scalar _foreach_clamp_max_.Scalar";
constexpr const char* kNorms = "linalg_vector_norm _foreach_norm.Scalar";
constexpr const char* kUnscaling = "_amp_foreach_non_finite_check_and_unscale_";

Spares spares_fetch(const std::string& name, const std::string& overload) {
  static const auto known = [] {
    std::unordered_map<std::string, Spares> made;
    const auto add = [&made](const char* list, Spares what) {
      std::istringstream names(list);
      for (std::string each; names >> each;) made.emplace("aten::" + each, what);
    };
    add(kScalings, Spares::kScaling);
    add(kNorms, Spares::kNorm);
    add(kUnscaling, Spares::kUnscaling);
    return made;
  }();
  auto found = known.find(overload.empty() ? name : name + "." + overload);
  return found == known.end() ? Spares::kNothing : found->second;
}

// ---- calls

// The operator of a call, the shape of its gradient, and its other arguments. Its tensors have one number
// each, and are copies, because user code may change the originals.
struct Call {
  c10::OperatorHandle op;
  Spares what;
  bool is_list;  // the operator takes a list, and the gradient is its only element
  at::ScalarType type;
  std::vector<int64_t> sizes, strides;
  std::vector<c10::IValue> arguments;
  size_t nbytes() const {
    return static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  }
  std::optional<c10::Stream> stream;  // the GPU stream on which the copies were made
};
using CallOf = std::shared_ptr<const Call>;
using Calls = std::vector<CallOf>;
using Inputs = c10::ArrayRef<const c10::IValue>;

// Returns the current stream of a GPU, or nothing for a CPU.
std::optional<c10::Stream> stream_on(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Makes later work on the stream `second` wait for the work on the stream `first` so far.
void order(const std::optional<c10::Stream>& first, const std::optional<c10::Stream>& second) {
  if (!first || !second || *first == *second) return;
  c10::Event done(first->device_type());
  done.record(*first);
  done.block(*second);
}

// Returns the gradient of a call: the first argument, or the only element of the list that it is.
const at::Tensor* gradient_of(Inputs inputs) {
  if (inputs.empty()) return nullptr;
  const c10::IValue* first = &inputs[0];
  if (first->isList()) {
    const auto& list = first->toListRef();
    if (list.size() != 1) return nullptr;
    first = &list[0];
  }
  return first->isTensor() && first->toTensor().defined() ? &first->toTensor() : nullptr;
}

StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

constexpr c10::DispatchKeySet kStrange =
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::FuncTorchGradWrapper,
                         c10::DispatchKey::FuncTorchBatched});

// Returns true if each byte of the storage belongs to exactly one number of the tensor.
bool is_whole(const at::Tensor& tensor, const StorageImpl& storage) {
  return tensor.layout() == at::kStrided && at::isFloatingType(tensor.scalar_type()) &&
         tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         !tensor.key_set().has_any(kStrange) &&
         static_cast<size_t>(tensor.numel()) * tensor.itemsize() == storage.nbytes();
}

bool is_number(const at::Tensor& tensor, const at::Tensor& gradient) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.numel() == 1 && !tensor.is_complex() &&
         !tensor.key_set().has_any(kStrange) && tensor.has_storage() &&
         (tensor.is_cpu() || tensor.device() == gradient.device()) && !tensor.is_alias_of(gradient);
}

// Returns true if the call needs no bytes of another tensor than its gradient, and if it cannot fail later.
bool may_wait(Spares what, Inputs inputs, const at::Tensor& gradient) {
  for (size_t at = 1; at < inputs.size(); at++) {
    const c10::IValue& each = inputs[at];
    if (each.isTensor()) {
      const bool fits = is_number(each.toTensor(), gradient);
      if (!fits || (what != Spares::kUnscaling && each.toTensor().dim() != 0)) return false;
    } else if (!each.isNone() && !each.isInt() && !each.isDouble() && !each.isBool() && !each.isIntList()) {
      return false;
    }
  }
  return true;
}

// Returns a copy of a tensor that has one number.
at::Tensor copy_of_number(const at::Tensor& number) {
  at::Tensor copied = number.detach().clone();
  if (number.unsafeGetTensorImpl()->is_wrapped_number())
    copied.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copied;
}

CallOf call_of(const c10::OperatorHandle& op, Spares what, Inputs inputs, const at::Tensor& gradient) {
  auto call = std::make_shared<Call>(Call{op,
                                          what,
                                          inputs[0].isList(),
                                          gradient.scalar_type(),
                                          gradient.sizes().vec(),
                                          gradient.strides().vec(),
                                          {},
                                          stream_on(gradient.device())});
  // The second argument of an unscaling is the result of its check, and no number that it reads.
  for (size_t at = what == Spares::kUnscaling ? 2 : 1; at < inputs.size(); at++)
    call->arguments.push_back(inputs[at].isTensor() ? copy_of_number(inputs[at].toTensor()) : inputs[at]);
  return call;
}

bool same_number(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_same(other)) return true;
  if (one.scalar_type() != other.scalar_type() || one.device() != other.device() || one.dim() != other.dim())
    return false;
  const at::Tensor left = one.cpu(), right = other.cpu();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.itemsize()) == 0;
}

bool same_argument(const c10::IValue& one, const c10::IValue& other) {
  if (one.isTensor() || other.isTensor())
    return one.isTensor() && other.isTensor() && same_number(one.toTensor(), other.toTensor());
  if (one.isNone() || other.isNone()) return one.isNone() && other.isNone();
  if (one.isDouble() && other.isDouble()) {
    const double left = one.toDouble(), right = other.toDouble();
    return std::memcmp(&left, &right, sizeof left) == 0;
  }
  if (one.isInt() && other.isInt()) return one.toInt() == other.toInt();
  if (one.isBool() && other.isBool()) return one.toBool() == other.toBool();
  return one.isIntList() && other.isIntList() && one.toIntVector() == other.toIntVector();
}

// Returns true if both calls have the same operator, and gradients of the same shape.
bool same_operator(const Call& one, const Call& other) {
  return one.op == other.op && one.is_list == other.is_list && one.type == other.type &&
         one.sizes == other.sizes && one.strides == other.strides &&
         one.arguments.size() == other.arguments.size();
}

// Returns true if both calls change the same bytes in the same way.
bool same_call(const Call& one, const Call& other) {
  if (&one == &other) return true;
  if (!same_operator(one, other)) return false;
  for (size_t at = 0; at < one.arguments.size(); at++)
    if (!same_argument(one.arguments[at], other.arguments[at])) return false;
  return true;
}

// Returns true if both calls give the same number for the same bytes. The check of an unscaling does not
// depend on its scale.
bool same_question(const Call& one, const Call& other) {
  return one.what == Spares::kUnscaling ? same_operator(one, other) : same_call(one, other);
}

bool same_calls(const Calls& one, const Calls& other, bool (*same)(const Call&, const Call&) = same_call) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [same](const CallOf& left, const CallOf& right) { return same(*left, *right); });
}

// ---- gradients

// A number that user code has asked for, about a gradient on which these scalings had run since it was made.
struct Question {
  CallOf call;
  Calls scalings;
  uint32_t step;      // the last step with this question
  int surprises = 0;  // number of steps, one after another, whose scalings had other numbers than before
  bool is_foreseen() const { return surprises < 2; }
};

// The answer of a question about an evicted gradient.
struct Answer {
  CallOf call;
  Calls owed;  // the scalings that had run on the bytes when the number was computed, and not on the copy
  at::Tensor number;
  int threads;  // the number of threads of the computation, on which the order of a sum depends
  std::optional<c10::Stream> stream;  // the GPU stream of the computation
};

struct Gradient {
  int tag = 0;             // the same for the gradients of one weight in all steps
  bool in_flight = false;  // a copy of the bytes has begun, and may not have ended
  bool may_owe = true;     // false if an update of the gradient is owed: it reads the bytes as they are
  Calls scalings;          // since the gradient was made
  size_t owed = 0;         // how many of `scalings`, the last ones, have not run on the bytes yet
  size_t ran = 0;        // how many of `scalings`, the last ones, have run on the bytes, and not on the copy
  size_t left_with = 0;  // number of `scalings` when the bytes left the storage
  std::vector<Answer> answers;
  Calls owed_calls() const { return Calls(scalings.end() - static_cast<ptrdiff_t>(owed), scalings.end()); }
  // Without its copy, the gradient is its bytes alone. Returns true if the copy lacked scalings.
  bool forget_copy() { return std::exchange(ran, 0) > 0; }
};

constexpr size_t kScalingsMost = 16;  // an older scaling of a resident gradient is forgotten
constexpr size_t kQuestionsMost = 8;  // questions that are kept for each gradient
constexpr uint32_t kAskedWithin = 3;  // a question is forgotten after so many steps without it

// These tables are never destroyed, because their tensors must not be freed after torch has ended. They are
// read under any thread's lock, and changed under all locks.
auto& gradients = *new std::unordered_map<StorageImpl*, Gradient>;
auto& questions = *new std::unordered_map<int, std::vector<Question>>;
std::atomic<int> gradient_count{0};
std::atomic<int64_t> owed_so_far{0}, answered_so_far{0};  // calls that needed no fetch
std::atomic<uint32_t> step_now{1};
thread_local bool runs_plainly = false;  // true: this thread runs a call of this file

struct Plainly {
  bool before = std::exchange(runs_plainly, true);
  ~Plainly() { runs_plainly = before; }
};

// What the tables say about a gradient. It is copied, because a comparison of numbers may wait for a GPU.
struct Seen {
  bool evicted = false, may_owe = false;
  bool is_as_left = false;  // no scaling has been added since the bytes left the storage
  int tag = 0;
  Calls scalings, owed;
  std::vector<Answer> answers;
  std::vector<Question> asked;
};

std::optional<Seen> see_anywhere(StorageImpl* storage) {
  std::lock_guard<Spin> held(own().lock);
  auto found = gradients.find(storage);
  if (found == gradients.end()) return std::nullopt;
  const Gradient& gradient = found->second;
  Seen seen{(flags_under_lock(storage) & kEvicted) != 0,
            gradient.may_owe,
            gradient.left_with == gradient.scalings.size(),
            gradient.tag,
            gradient.scalings,
            gradient.owed_calls(),
            gradient.answers,
            {}};
  if (auto asked = questions.find(gradient.tag); asked != questions.end()) seen.asked = asked->second;
  return seen;
}

// Returns nothing in a program, because its calls are not user code's.
std::optional<Seen> see(StorageImpl* storage) {
  return own().in_program > 0 ? std::nullopt : see_anywhere(storage);
}

const Answer* answer_of(const Seen& seen, const Call& call) {
  for (const Answer& each : seen.answers)
    if (each.threads == at::get_num_threads() && same_question(*each.call, call) &&
        same_calls(each.owed, seen.owed) && call.stream == each.stream)
      return &each;
  return nullptr;
}

// Returns the place of this question in `seen.asked`, or a negative number.
int question_of(const Seen& seen, const Call& call) {
  for (size_t at = 0; at < seen.asked.size(); at++)
    if (same_question(*seen.asked[at].call, call) &&
        same_calls(seen.asked[at].scalings, seen.scalings, same_operator))
      return static_cast<int>(at);
  return -1;
}

// Returns true if the engine would have the answer if the gradient were evicted.
bool is_foreseen(const Seen& seen, const Call& call) {
  const int at = question_of(seen, call);
  return at >= 0 && seen.asked[static_cast<size_t>(at)].is_foreseen();
}

// Returns true if the call needs no bytes of the gradient now.
bool needs_no_fetch(const Seen& seen, const Call& call) {
  if (!seen.evicted || !seen.may_owe) return false;
  return call.what == Spares::kScaling || answer_of(seen, call) != nullptr;
}

// Adds a scaling to the gradient. If the gradient is evicted, the scaling is owed. Returns false if the
// gradient is not as it was seen.
bool add_scaling(StorageImpl* storage, const Seen& seen, const CallOf& call) {
  Calls freed;  // destroyed after the locks are released
  Everyone everyone;
  auto found = gradients.find(storage);
  if (found == gradients.end()) return false;
  Gradient& gradient = found->second;
  const bool evicted = is_evicted(storage, everyone);
  if (evicted != seen.evicted || gradient.owed != seen.owed.size() || (evicted && !gradient.may_owe))
    return false;
  if (!evicted) gradient.forget_copy();  // the caller has recorded the write
  gradient.scalings.push_back(call);
  if (evicted) {
    gradient.owed++;
    owed_so_far++;
  } else if (gradient.scalings.size() > kScalingsMost) {
    freed.swap(gradient.scalings);
  }
  return true;
}

// Records a question, so that the next step can foresee it.
void note_question(const Seen& seen, const CallOf& call) {
  const int at = question_of(seen, *call);
  Question now{call, seen.scalings, step_now};
  if (at >= 0) {
    const Question& before = seen.asked[static_cast<size_t>(at)];
    const bool surprise = !same_calls(before.scalings, seen.scalings);
    now.surprises = surprise ? before.surprises + 1 : 0;
  }
  Everyone everyone;
  auto& asked = questions[seen.tag];
  if (at < 0 && asked.size() < kQuestionsMost) {
    asked.push_back(now);
  } else if (at >= 0 && static_cast<size_t>(at) < asked.size()) {
    std::swap(asked[static_cast<size_t>(at)], now);  // `now` is destroyed after the locks are released
  }
}

// ---- the computation of owed scalings and of answers

// Runs the call on the bytes of a block. Returns the number that the call gives.
at::Tensor run_on_block(const Call& call, StorageImpl* block) {
  const auto options = at::TensorOptions().dtype(call.type).device(block->device());
  const c10::Storage storage(c10::intrusive_ptr<StorageImpl>::reclaim_copy(block));
  at::Tensor tensor = at::empty({0}, options);
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(call.sizes, call.strides);
  TORCH_CHECK(is_whole(tensor, *block), "the gradient has ", block->nbytes(), " bytes, and not ",
              tensor.nbytes());
  const auto now = stream_on(block->device());
  order(call.stream, now);
  torch::jit::Stack stack;
  at::Tensor found;
  if (call.is_list) {
    stack.emplace_back(c10::List<at::Tensor>({tensor}));
  } else {
    stack.emplace_back(tensor);
  }
  if (call.what == Spares::kUnscaling) {
    found = at::zeros({1}, options.dtype(at::kFloat));
    stack.emplace_back(found);
  }
  stack.insert(stack.end(), call.arguments.begin(), call.arguments.end());
  call.op.callBoxed(stack);
  order(now, call.stream);  // the call's numbers are freed in the order of their own stream
  if (call.what == Spares::kUnscaling) return found;
  if (call.what == Spares::kScaling) return {};
  return call.is_list ? stack.at(0).toTensorVector().at(0) : stack.at(0).toTensor();
}

// Computes the answers of the questions about a gradient, from the bytes in `block`, which the gradient has
// just left. The block's bytes are scaled, because nobody reads them afterwards.
std::vector<Answer> answers_from(const Seen& seen, StorageImpl* block) {
  std::vector<Answer> answers;
  std::vector<Question> asked = seen.asked;
  // An unscaling changes the bytes, so other questions about the same bytes come first.
  const auto place = [](const Question& each) {
    return std::make_pair(each.scalings.size(), each.call->what == Spares::kUnscaling);
  };
  std::stable_sort(asked.begin(), asked.end(),
                   [&](const Question& one, const Question& other) { return place(one) < place(other); });
  Calls ran = seen.scalings;
  for (const Question& each : asked) {
    if (each.call->nbytes() != block->nbytes()) continue;  // the weight has another size now
    if (!each.is_foreseen() || each.scalings.size() < ran.size()) continue;
    if (!same_calls(ran, Calls(each.scalings.begin(), each.scalings.begin() + std::ssize(ran)))) continue;
    for (size_t at = ran.size(); at < each.scalings.size(); at++) {
      run_on_block(*each.scalings[at], block);
      ran.push_back(each.scalings[at]);
    }
    Calls owed = seen.owed;
    owed.insert(owed.end(), ran.begin() + std::ssize(seen.scalings), ran.end());
    answers.push_back({each.call, owed, run_on_block(*each.call, block), at::get_num_threads(),
                       stream_on(block->device())});
    if (each.call->what == Spares::kUnscaling) ran.push_back(each.call);
  }
  return answers;
}
}  // namespace
