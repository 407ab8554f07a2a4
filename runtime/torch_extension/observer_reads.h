// The detection of reads of evicted tensors, and the fetches for these reads.
#pragma once
#include <ATen/ThreadLocalState.h>
#include <ATen/core/function_schema.h>
#include <c10/core/TensorImpl.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <sstream>
#include <unordered_set>

#include "observer_fences.h"
#include "observer_gradients.h"

namespace {
// ---- operators

// torch's operators that use a tensor but not its bytes. Of the operators that create views, only
// `_unsafe_view` is in this list. `learn` finds the others by their schemas.
constexpr const char* kLooks =
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros "
    "new_ones "
    "new_full new_empty_strided is_same_size sym_size sym_stride sym_numel sym_storage_offset stride numel "
    "is_pinned requires_grad_ retain_grad set_data _has_compatible_shallow_copy_type result_type can_cast "
    "is_contiguous dim is_floating_point is_signed is_inference is_neg is_conj __is__ __isnot__ is_set_to "
    "_is_zerotensor _assert_tensor_metadata _unsafe_view";

bool only_looks(const std::string& name) {
  static const std::unordered_set<std::string> known = [] {
    std::unordered_set<std::string> made{"prim::device"};
    std::istringstream names(kLooks);
    for (std::string each; names >> each;) made.insert("aten::" + each);
    return made;
  }();
  return known.contains(name);
}

bool is_torchs(const std::string& name) {
  return name.starts_with("aten::") || name.starts_with("prim");
}

void learn(About& about, const c10::FunctionSchema& schema) {
  about = About{&schema, schema.name(), schema.overload_name()};
  const auto& arguments = schema.arguments();
  for (size_t at = 0; at < arguments.size() && at < 64; at++) {
    const auto* alias = arguments[at].alias_info();
    if (alias != nullptr && alias->isWrite()) about.writes |= uint64_t{1} << at;
  }
  about.goes_on = about.name.starts_with("c10d::") || about.name.starts_with("_c10d_functional::");
  if (!is_torchs(about.name)) return;
  about.spares = spares_fetch(about.name, about.overload);
  about.looks = only_looks(about.name);
  if (arguments.empty() || schema.returns().empty()) return;
  const auto* in = arguments[0].alias_info();
  const auto* out = schema.returns()[0].alias_info();
  about.looks |= in != nullptr && !in->isWrite() && out != nullptr && !out->isWrite();  // returns a view
}

const About& about(Thread& thread, const c10::FunctionSchema& schema) {
  const size_t place =
      reinterpret_cast<uintptr_t>(&schema) / alignof(std::max_align_t) % thread.recent.size();
  About*& found = thread.recent[place];
  if (found == nullptr || found->schema != &schema) found = &thread.known[&schema];
  // A new schema may have the address of a freed schema. So compare the names, too.
  if (found->schema != &schema || found->name != schema.name() || found->overload != schema.overload_name())
    learn(*found, schema);
  return *found;
}

// ---- fetching

using Fetch = int (*)(void** storages, int count, const char* place);
using KnowsPython = void* (*)();
Fetch fetch_in_python = nullptr;
KnowsPython thread_state = nullptr;
std::atomic<bool> ended{true};
pid_t owner = 0;
const at::ThreadLocalState* clean = nullptr;
std::atomic<int64_t> patience_ms{20'000};

// A fetch request of a thread without a Python thread state. The thread cannot wait for the GIL, because the
// holder of the GIL may be waiting for this thread. So a Python thread of teraio fetches for it.
struct Request {
  void** storages;
  int count;
  const char* place;
  bool taken = false, done = false;
};
std::mutex service_lock;
std::condition_variable request_added, answered;
std::deque<Request*> requests;

bool ask_service(void** storages, int count, const char* place) {
  Request request{storages, count, place};
  std::unique_lock<std::mutex> held(service_lock);
  requests.push_back(&request);
  request_added.notify_one();
  answered.wait_for(held, std::chrono::milliseconds(patience_ms), [&] { return request.taken; });
  if (!request.taken) {
    std::erase(requests, &request);
    return false;
  }
  answered.wait(held, [&] { return request.done; });
  return true;
}

std::unordered_map<StorageImpl*, std::string> reasons;  // errors of failed fetches; the lock is `Everyone`

// Makes reads of the storage raise an error. The text of the error is the storage's entry in `reasons`.
// Without an entry, the text is `message`.
void refuse(StorageImpl* storage, const std::string& message) {
  Everyone everyone;
  auto found = entries.find(storage);
  if (found == entries.end() || !(found->second.flags & kEvicted)) return;
  found->second.flags |= kRefused;
  auto reason = reasons.extract(storage);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(reason ? reason.mapped() : message);
  own().refused.emplace_back(own().marks.size(), storage);
}

// Makes reads of the storage work again, after `refuse` has made them raise an error. The caller holds
// `Everyone`.
void allow(StorageImpl* storage, Entry& entry) {
  if (!(entry.flags & kRefused)) return;
  entry.flags &= static_cast<uint8_t>(~kRefused);
  storage->*member(Throws{}) = false;
  storage->get_extra_meta().custom_data_ptr_error_msg_ = std::nullopt;
  disarm(storage);
  arm(storage);  // a new materializer makes torch update the storage's flags
}

// Fetches the storages. Afterwards each storage is resident, or a read of the storage raises an error.
void fetch(std::vector<StorageImpl*>& missing, const char* place) {
  const char* why = nullptr;
  void** storages = reinterpret_cast<void**>(missing.data());
  const int count = static_cast<int>(missing.size());
  if (getpid() != owner) {
    why =
        "was forked from the process that can fetch it. Fork inside `with teraio.resident(model):`, or start "
        "processes by 'spawn'";
  } else if (ended) {
    why = "ends, so it cannot be fetched";
  } else if (thread_state() != nullptr) {
    at::ThreadLocalStateGuard state(*clean);
    fetch_in_python(storages, count, place);
  } else if (!ask_service(storages, count, place)) {
    why =
        "runs other Python code, which may be waiting for the thread that reads it. Read it under `with "
        "teraio.resident(...):`, or in a function that releases the GIL";
  }
  for (StorageImpl* storage : missing) {
    if (!is_evicted(storage)) continue;
    const std::string reads = std::string("teraio: ") + place + " reads an evicted tensor, ";
    refuse(storage,
           reads + (why != nullptr ? std::string("and this process ") + why : "which could not be fetched"));
  }
}

// ---- RecordFunction

void note_stream(Thread& thread, c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (std::find(thread.streams.begin(), thread.streams.end(), stream) == thread.streams.end())
    thread.streams.push_back(stream);
}

void look(Thread& thread, const c10::IValue& value, uint8_t does, std::vector<StorageImpl*>& missing) {
  if (value.isTensor()) {
    c10::TensorImpl* tensor = value.toTensor().unsafeGetTensorImpl();
    if (tensor == c10::UndefinedTensorImpl::singleton() || !tensor->has_storage()) return;
    StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (storage == nullptr) return;
    thread.used.push_back(storage);
    auto found = entries.find(storage);
    if (found == entries.end()) return;
    Entry& entry = found->second;
    auto flags = flags_of(entry);
    if (does != 0) flags.fetch_or(does);
    if (flags.load() & kEvicted) missing.push_back(storage);
    if (thread.in_program > 0 || runs_plainly) return;
    thread.reads = kReadsFor + 1;
    if (!tensor->device().is_cpu()) note_stream(thread, tensor->device());
    const uint32_t now = stretch.load(std::memory_order_relaxed);
    if (std::atomic_ref<uint32_t>(entry.touched).exchange(now) != now) thread.touched.push_back(storage);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) look(thread, each, does, missing);
  }
}

// Returns the gradient of a call that may need no bytes of it, or null. The caller holds the thread's lock.
StorageImpl* gradient_that_may_wait(const Thread& thread, const About& known, Inputs inputs) {
  if (known.spares == Spares::kNothing || runs_plainly || thread.in_program > 0 || gradients.empty())
    return nullptr;
  const at::Tensor* gradient = gradient_of(inputs);
  StorageImpl* storage = gradient == nullptr ? nullptr : storage_of(*gradient);
  if (storage == nullptr || !gradients.contains(storage)) return nullptr;
  return is_whole(*gradient, *storage) && may_wait(known.spares, inputs, *gradient) ? storage : nullptr;
}

// Returns true if the call needs no bytes of this gradient now, or would need none if it were evicted.
bool is_spared(StorageImpl* gradient, Spares what, const c10::OperatorName& name, Inputs inputs) {
  const auto seen = see(gradient);
  if (!seen) return false;
  if (what == Spares::kScaling) return !seen->evicted || seen->may_owe;
  const Plainly plainly;
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
  const CallOf call = call_of(op, what, inputs, *gradient_of(inputs));
  return seen->evicted ? needs_no_fetch(*seen, *call) : is_foreseen(*seen, *call);
}

constexpr const char* kScales = "a scaling of a gradient";  // the same text as SCALING in observer.py

// Ends the eviction of a gradient that is about to be scaled. Otherwise the scaling would make the copy
// stale, and the gradient would have to be copied again.
void end_eviction(StorageImpl* gradient) {
  {
    Everyone everyone;
    auto found = gradients.find(gradient);
    if (found == gradients.end() || !std::exchange(found->second.in_flight, false)) return;
  }
  if (getpid() != owner || ended || thread_state() == nullptr) return;
  at::ThreadLocalStateGuard state(*clean);
  void* storage = gradient;
  fetch_in_python(&storage, 1, kScales);
}

// Lets a collective of a program take pointers to these storages, on any thread, without detection. The
// program keeps the storages resident until it waits for the collective.
void hand_to_collective(const std::vector<StorageImpl*>& storages) {
  Everyone everyone;
  for (StorageImpl* storage : storages) {
    auto found = entries.find(storage);
    if (found == entries.end() || found->second.flags & (kDisarmed | kEvicted)) continue;
    found->second.flags |= kDisarmed;
    disarm(storage);
    everyone.own_thread.disarmed.push_back(storage);
  }
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
  Thread& thread = own();
  const auto* schema = std::get_if<at::RecordFunction::schema_ref_t>(&(function.*member(Described{})));
  const Inputs inputs = function.inputs();
  std::vector<StorageImpl*> wanted, handed;
  StorageImpl* gradient = nullptr;
  uint8_t writes_gradient = 0;
  Spares spares = Spares::kNothing;
  {
    std::lock_guard<Spin> held(thread.lock);
    thread.marks.push_back(static_cast<uint32_t>(thread.used.size()));
    if (schema == nullptr || entries.empty()) return nullptr;
    const About& known = about(thread, schema->get());
    std::vector<StorageImpl*>& missing = thread.missing;
    if (known.looks) return nullptr;
    gradient = gradient_that_may_wait(thread, known, inputs);
    spares = known.spares;
    if (gradient != nullptr && spares != Spares::kNorm && gradients.find(gradient)->second.in_flight) {
      thread.lock.unlock();
      end_eviction(gradient);
      thread.lock.lock();
    }
    missing.clear();
    const bool in_program = thread.in_program > 0;
    const uint8_t goes_on = known.goes_on && !in_program ? kWritten | kPointed : 0;
    uint64_t bit = 1;
    for (const c10::IValue& input : inputs) {
      const uint8_t writes = known.writes & bit ? kWritten : 0;
      if (bit == 1 && gradient != nullptr) {
        thread.used.push_back(gradient);
        writes_gradient = writes;
      } else {
        look(thread, input, writes | goes_on, missing);
      }
      bit <<= 1;
    }
    if (known.goes_on && in_program)
      handed.assign(thread.used.begin() + thread.marks.back(), thread.used.end());
    if (missing.empty() && gradient == nullptr && handed.empty()) return nullptr;
    wanted = missing;
  }
  if (gradient != nullptr && !is_spared(gradient, spares, schema->get().operator_name(), inputs)) {
    std::lock_guard<Spin> held(thread.lock);
    look(thread, inputs[0], writes_gradient, wanted);
  }
  if (!wanted.empty()) fetch(wanted, function.name());
  if (!handed.empty()) hand_to_collective(handed);
  return nullptr;
}

// Restores the detection of taken pointers, for each storage whose pointer a kernel took on this thread. The
// caller holds `Everyone`.
void rearm(Thread& thread) {
  for (StorageImpl* storage : thread.disarmed) {
    auto found = entries.find(storage);
    if (found == entries.end() || !(found->second.flags & kDisarmed)) continue;
    found->second.flags &= static_cast<uint8_t>(~kDisarmed);
    arm(storage);
  }
  thread.disarmed.clear();
}

void ends(const at::RecordFunction&, at::ObserverContext*) {
  Thread& thread = own();
  {
    std::lock_guard<Spin> held(thread.lock);
    if (thread.marks.empty()) return;
    thread.used.resize(thread.marks.back());
    thread.marks.pop_back();
    const bool rearms = thread.marks.empty() && thread.in_program == 0 && !thread.disarmed.empty();
    if (thread.refused.empty() && !rearms) return;
  }
  Everyone everyone;
  if (thread.marks.empty() && thread.in_program == 0) rearm(thread);
  std::erase_if(thread.refused, [&](const auto& each) {
    if (each.first <= thread.marks.size()) return false;
    if (auto found = entries.find(each.second); found != entries.end()) allow(each.second, found->second);
    return true;
  });
}

// Makes reads of the storage work again, after `refuse` has made them raise an error. Only for reads outside
// of operators.
void forgive(StorageImpl* storage) {
  Everyone everyone;
  if (auto found = entries.find(storage); found != entries.end()) allow(storage, found->second);
  std::erase_if(own().refused, [&](const auto& each) { return each.second == storage; });
}

template <typename S>
void pointed_at(S* storage) {
  Thread& thread = own();
  bool evicted = false;
  {
    std::lock_guard<Spin> held(thread.lock);
    auto found = entries.find(storage);
    if (found == entries.end()) return;
    auto flags = flags_of(found->second);
    evicted = flags.load() & kEvicted;
    if (thread.in_program == 0 && thread.in_engine == 0) thread.reads = kReadsFor + 1;
    const bool by_kernel = std::find(thread.used.begin(), thread.used.end(), storage) != thread.used.end();
    if (by_kernel || thread.in_engine > 0 || (thread.in_program > 0 && !evicted)) {
      flags.fetch_or(kDisarmed);
      thread.disarmed.push_back(storage);
    } else {
      flags.fetch_or(kWritten | kPointed);
    }
    if (thread.in_engine > 0) return;
  }
  if (!evicted) return;
  std::vector<StorageImpl*> missing{storage};
  fetch(missing, "a pointer");
  if (!is_evicted(storage)) return;
  const std::string message = storage->get_extra_meta().custom_data_ptr_error_msg_.value_or("");
  forgive(storage);
  TORCH_CHECK(false, message);
}

// ---- faults

struct sigaction others{};  // the previous action for SIGSEGV

constexpr const char* kFault = "a read of memory";  // the same text as FAULT in observer.py

Fence* fence_at(uintptr_t address) {
  std::lock_guard<Spin> held(own().lock);
  auto found = fences.upper_bound(address);
  if (found == fences.begin()) return nullptr;
  Fence* fenced = std::prev(found)->second.get();
  return address < reinterpret_cast<uintptr_t>(fenced->at) + fenced->bytes ? fenced : nullptr;
}

// Fills the fenced pages with the storage's current bytes. Returns false if this fails.
bool serve_fault(Fence* fenced) {
  // The storage is alive, because code that reads its bytes has a tensor of this storage.
  StorageImpl* storage = fenced->storage;
  if (is_released(storage)) return false;
  Thread& thread = own();
  bool evicted = false;
  {
    std::lock_guard<Spin> held(thread.lock);
    thread.reads = kReadsFor + 1;
    thread.used.push_back(storage);  // keep the storage in use until its bytes are copied
    auto found = entries.find(storage);
    if (found != entries.end()) {
      auto flags = flags_of(found->second);
      evicted = flags.load() & kEvicted;
      if (evicted) flags.fetch_or(kFaulted);
    }
  }
  if (evicted) {
    std::vector<StorageImpl*> missing{storage};
    fetch(missing, kFault);
  }
  bool filled = false;
  {
    Everyone everyone;
    const void* now = is_evicted(storage, everyone) ? nullptr : storage->_mutable_data_ptr_no_checks().get();
    filled = now == fenced->at || fill(*fenced, now, storage->nbytes());
  }
  forgive(storage);
  std::lock_guard<Spin> held(thread.lock);
  auto last = std::find(thread.used.rbegin(), thread.used.rend(), storage);
  if (last != thread.used.rend()) thread.used.erase(std::next(last).base());
  return filled;
}

void fault(int, siginfo_t* info, void*) {
  const int error = errno;
  Fence* fenced = fence_at(reinterpret_cast<uintptr_t>(info->si_addr));
  if (fenced == nullptr || !serve_fault(fenced))
    sigaction(SIGSEGV, &others, nullptr);  // the read faults again, under the previous signal action
  errno = error;
}

void catch_faults() {
  struct sigaction now{};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == fault) return;
  others = now;
  struct sigaction ours{};
  ours.sa_sigaction = fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, nullptr);
}

at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
}  // namespace
