// Detects each read of an evicted tensor, below Python. This file is compiled against the installed torch,
// because torch's classes differ between versions.
//
//   an operator begins   RecordFunction calls `begins` on the operator's thread, before any kernel; `begins`
//                        fetches evicted arguments; the arguments' storages are in use until `ends`
//   a mutable pointer    torch 2.13 calls `pointed_at`, which fetches before the caller gets the pointer
//   any other pointer    a pointer in RAM leads to fenced pages, which are inaccessible; a read of a fenced
//                        page faults, and `fault` fills the pages
//   the engine evicts    `teraio_leave` takes the bytes and keeps the size; it refuses a storage in use
//
// Locks: each thread has a lock for its list of storages in use. An operator takes only the lock of its own
// thread, so it does not wait for operators on other threads. An eviction takes the locks of all threads, by
// an object of the class `Everyone`. So the eviction finds a consistent state.
//
//   observer_known.h    storages, threads, locks        observer_gradients.h   calls that need no fetch
//   observer_fences.h   fenced pages                    observer_kernels.h     kernels for these calls
//   observer_reads.h    operators, fetches, faults      this file              what Python calls
#include <c10/core/impl/COW.h>
#include <pthread.h>

#include "observer_kernels.h"

namespace {
void before_fork() {
  // After a change of callbacks, the first operator of a thread takes a lock of torch. If another thread
  // holds this lock during the fork, the lock can never be taken in the child. So update the callbacks before
  // the fork.
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  own();
  service_lock.lock();
  threads_lock.lock();
  for (Thread* thread : threads) thread->lock.lock();
}
void after_fork_in_parent() {
  for (Thread* thread : threads) thread->lock.unlock();
  threads_lock.unlock();
  service_lock.unlock();
}
void after_fork_in_child() {
  for (Thread* thread : threads) thread->lock.unlock();
  threads.assign(1, &own());
  threads_lock.unlock();
  service_lock.unlock();
}
}  // namespace

extern "C" {
bool teraio_materializes() {
  return materializes<StorageImpl>;
}

// Starts the observation of operators. Call this function on the main thread, without an active torch mode.
void teraio_observe(Fetch fetch, KnowsPython state) {
  fetch_in_python = fetch;
  thread_state = state;
  owner = getpid();
  own();
  if (clean == nullptr) {
    clean = new at::ThreadLocalState();
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  }
  ended = false;
  catch_faults();
  add_kernels();
  if (handle == at::INVALID_CALLBACK_HANDLE)
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(begins, ends).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

// Sets two functions of the allocator. `gives` frees a block of RAM. `vacates` takes only the pages of a
// block. The observer then owns the block's addresses.
void teraio_blocks(void (*gives)(void*), uint64_t (*vacates)(void*)) {
  give = gives;
  vacate = vacates;
}

// Ends all fetches. A later read of an evicted tensor raises an error, without a call into Python.
void teraio_end() {
  ended = true;
  std::lock_guard<std::mutex> held(service_lock);
  request_added.notify_all();
}

void teraio_switch(bool on) {
  if (on) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

// Starts the detection of writes into the storage. Call this function when a copy of the storage's bytes
// begins or is valid. This thread may take the storage's address for the copy, until it calls `teraio_watch`.
//
// Returns false in three cases: (1) an operator uses the storage, (2) the storage is copy-on-write, (3) code
// outside of teraio has the storage's address.
bool teraio_copied(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  if (c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks())) return false;
  Everyone everyone;
  if (everyone.uses(storage)) return false;
  Entry& entry = entries[storage];
  if (entry.flags & kPointed) return false;
  entry.flags &= static_cast<uint8_t>(~(kWritten | kDisarmed));
  if (auto found = gradients.find(storage); found != gradients.end()) {
    found->second.in_flight = true;
    found->second.forget_copy();
  }
  everyone.own_thread.in_engine++;
  return true;
}

// Starts to detect when code takes a mutable address of the storage. Such code may write to the storage.
void teraio_watch(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  Everyone everyone;
  Thread& thread = everyone.own_thread;
  thread.in_engine--;
  if (!thread.disarmed.empty() && thread.disarmed.back() == storage) thread.disarmed.pop_back();
  auto found = entries.find(storage);
  if (found == entries.end()) return;
  found->second.flags &= static_cast<uint8_t>(~kDisarmed);
  arm(storage);
}

// Empties the storage: frees its bytes, or moves them into the empty storage `into`. Returns 0 on success.
// Returns 1 if an operator uses the storage, or if code outside of teraio has its address. With `unwritten`,
// returns 2 if code has written to the storage since its copy began.
int teraio_leave(void* address, void* into, bool unwritten) {
  auto* storage = static_cast<StorageImpl*>(address);
  auto* other = static_cast<StorageImpl*>(into);
  c10::DataPtr bytes;  // destroyed after the locks are released: its deleter may wait for the GIL
  std::vector<Answer> old;
  Everyone everyone;
  Entry& entry = entries[storage];
  if (everyone.uses(storage) || entry.flags & kPointed) return 1;
  if (unwritten && entry.flags & kWritten) return 2;
  disarm(storage);
  bytes = std::move(storage->_mutable_data_ptr_no_checks());
  if (retired > kRetiredMost) clear_fences(everyone);
  const bool reads = other == nullptr && everyone.read_elsewhere();
  const bool in_place = reads && fence_in_place(storage, entry, bytes);
  if (!in_place) storage->set_data_ptr_noswap(fence(storage, entry, storage->device()));
  arm(storage);
  entry.flags = kEvicted;
  if (auto found = gradients.find(storage); found != gradients.end()) {
    Gradient& gradient = found->second;
    gradient.in_flight = false;
    gradient.left_with = gradient.scalings.size();
    old.swap(gradient.answers);
    // The bytes are dropped: scalings that the copy lacks are owed again. Or they are kept in a block.
    if (unwritten) {
      gradient.owed = std::exchange(gradient.ran, 0);
    } else if (gradient.forget_copy()) {
      entry.flags |= kWritten;
    }
  }
  if (other == nullptr) return 0;
  other->set_nbytes(storage->nbytes());
  other->set_data_ptr_noswap(std::move(bytes));
  return 0;
}

// Moves the bytes of `from` into the storage, and returns 0. Returns 1 if `from` still has its bytes. There
// are two such cases: (1) the bytes were copied to the fenced pages at the storage's address, (2) the storage
// is already resident. Returns 2 and does nothing if scalings of the bytes are owed.
int teraio_arrive(void* address, void* from) {
  auto* storage = static_cast<StorageImpl*>(address);
  auto* other = static_cast<StorageImpl*>(from);
  std::vector<Answer> old;  // destroyed after the locks are released
  Everyone everyone;
  Entry& entry = entries[storage];
  if (!(entry.flags & kEvicted)) return 1;  // a finalizer has read the storage, so it is already fetched
  if (auto found = gradients.find(storage); found != gradients.end()) {
    if (found->second.owed > 0) return 2;
    old.swap(found->second.answers);
  }
  allow(storage, entry);
  entry.flags &= static_cast<uint8_t>(~kEvicted);
  auto fenced = fences.find(reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get()));
  const bool awaited = entry.flags & kFaulted;
  entry.flags &= static_cast<uint8_t>(~kFaulted);
  // A materializer is torch's callback before code takes a pointer. Without it, code may have taken the
  // fenced address unnoticed, and may later write to this address. So the bytes must be at this address.
  if (fenced != fences.end() && (awaited || !materializes<StorageImpl>) &&
      fill(*fenced->second, other->_mutable_data_ptr_no_checks().get(), storage->nbytes())) {
    if (awaited) entry.flags |= kWritten | kPointed;
    return 1;
  }
  // Leave the materializer (torch's callback before code takes a pointer) in place. If this fetch runs inside
  // the materializer, torch clears it later.
  storage->set_data_ptr_noswap(std::move(other->_mutable_data_ptr_no_checks()));
  other->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  other->set_nbytes(size_t{0});
  return 0;
}

// ---- gradients

// Records that the storage has a gradient. `tag` is the same for the gradients of one weight in all steps.
void teraio_gradient(void* address, int tag) {
  auto* storage = static_cast<StorageImpl*>(address);
  Calls old;  // destroyed after the locks are released
  Everyone everyone;
  Gradient& gradient = gradients[storage];
  gradient.tag = tag;
  if (!is_evicted(storage, everyone)) {
    old.swap(gradient.scalings);
    if (gradient.forget_copy()) entries[storage].flags |= kWritten;
  }
  gradient_count = static_cast<int>(gradients.size());
}

// Sets whether scalings of this gradient may be owed.
void teraio_may_owe(void* address, bool may) {
  Everyone everyone;
  auto found = gradients.find(static_cast<StorageImpl*>(address));
  if (found != gradients.end()) found->second.may_owe = may;
}

// Returns the number of owed scalings of this gradient.
int teraio_owed(void* address) {
  std::lock_guard<Spin> held(own().lock);
  auto found = gradients.find(static_cast<StorageImpl*>(address));
  return found == gradients.end() ? 0 : static_cast<int>(found->second.owed);
}

// Runs the owed scalings of the storage on the bytes of `block`, which a fetch has read. The copy then lacks
// these scalings. If `withheld` is true, the storage does not get the block, and the copy counts as stale.
// Returns null, or an error's text; all scalings are then still owed, and the block is useless.
const char* teraio_scale(void* address, void* block, bool withheld) {
  auto* storage = static_cast<StorageImpl*>(address);
  static thread_local std::string failure;
  const auto seen = see_anywhere(storage);
  if (!seen || seen->owed.empty()) return nullptr;
  try {
    const Plainly plainly;
    at::ThreadLocalStateGuard state(*clean);
    for (const CallOf& each : seen->owed) run_on_block(*each, static_cast<StorageImpl*>(block));
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  Everyone everyone;
  auto found = gradients.find(storage);
  if (found == gradients.end()) return nullptr;
  found->second.owed -= seen->owed.size();
  if (withheld) {
    entries[storage].flags |= kWritten;
  } else {
    found->second.ran += seen->owed.size();
  }
  return nullptr;
}

// Returns true if a step has asked for a number about the gradient in this storage. Returns false if another
// thread may read the bytes in RAM: then `teraio_leave` has to fence the bytes, and cannot move them to a
// block.
bool teraio_is_asked(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  if (gradient_count == 0) return false;
  Everyone everyone;
  auto found = gradients.find(storage);
  if (found == gradients.end() || (storage->device().is_cpu() && everyone.read_elsewhere())) return false;
  auto asked = questions.find(found->second.tag);
  return asked != questions.end() && !asked->second.empty();
}

// Computes the numbers that steps have asked for, from the bytes in `block`, which the gradient has just
// left. Changes the bytes of the block.
void teraio_answer(void* address, void* block) {
  auto* storage = static_cast<StorageImpl*>(address);
  try {
    const auto seen = see_anywhere(storage);
    if (!seen || !seen->evicted || !seen->is_as_left || seen->asked.empty()) return;
    const Plainly plainly;
    at::ThreadLocalStateGuard state(*clean);
    std::vector<Answer> answers = answers_from(*seen, static_cast<StorageImpl*>(block));
    Everyone everyone;
    auto found = gradients.find(storage);
    if (found != gradients.end() && is_evicted(storage, everyone)) found->second.answers.swap(answers);
  } catch (const std::exception&) {
    return;  // the gradient is then fetched for the numbers, and the call raises the error
  }
}

// Writes the number of scalings that were owed so far, and of numbers that were remembered.
void teraio_spared(int64_t* out) {
  out[0] = owed_so_far, out[1] = answered_so_far;
}

// ---- storages

// Forgets a storage. `alive` is false if the storage was freed. `alive` is true if the engine only stops to
// track the storage.
void teraio_forget(void* address, bool alive) {
  auto* storage = static_cast<StorageImpl*>(address);
  std::unordered_map<StorageImpl*, Gradient>::node_type freed;  // destroyed after the locks are released
  Everyone everyone;
  freed = gradients.extract(storage);
  gradient_count = static_cast<int>(gradients.size());
  auto found = entries.find(storage);
  if (found == entries.end()) return;
  if (alive) disarm(storage);
  entries.erase(found);
  reasons.erase(storage);
}

// Returns the storage's flags, such as kEvicted and kWritten.
int teraio_flags(void* address) {
  std::lock_guard<Spin> held(own().lock);
  return flags_under_lock(static_cast<StorageImpl*>(address));
}

// Records that the storage's bytes have a new address, which no code outside of teraio has taken.
void teraio_renewed(void* address) {
  Everyone everyone;
  auto found = entries.find(static_cast<StorageImpl*>(address));
  if (found != entries.end()) found->second.flags &= static_cast<uint8_t>(~kPointed);
}

// Records that code takes the storage's address in a way that torch does not report. Such code may write to
// the storage.
void teraio_point(void* address) {
  Everyone everyone;
  entries[static_cast<StorageImpl*>(address)].flags |= kWritten | kPointed;
}

// Ends a step. From now on, the observer assumes that code no longer has the addresses that it took earlier.
void teraio_unpoint() {
  std::vector<Question> freed;  // destroyed after the locks are released
  Everyone everyone;
  step_now++;
  for (auto& [tag, asked] : questions)
    std::erase_if(asked, [&](Question& each) {
      const bool is_old = step_now - each.step > kAskedWithin;
      if (is_old) freed.push_back(std::move(each));
      return is_old;
    });
  for (auto& [storage, entry] : entries) entry.flags &= static_cast<uint8_t>(~kPointed);
  clear_fences(everyone);
  everyone.forget_reads();
}

// Returns true if any of these tensors is evicted, or is a gradient whose eviction may be in flight.
bool teraio_some_evicted(void** tensors, int count) {
  std::lock_guard<Spin> held(own().lock);
  for (int at = 0; at < count; at++) {
    auto* tensor = static_cast<c10::TensorImpl*>(tensors[at]);
    if (!tensor->has_storage()) continue;
    StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (flags_under_lock(storage) & kEvicted) return true;
    auto gradient = gradients.find(storage);
    if (gradient != gradients.end() && gradient->second.in_flight) return true;
  }
  return false;
}

// Writes the storages that operators use now to `out`. Returns their number, which is at most `capacity`.
int teraio_used(void** out, int capacity) {
  Everyone everyone;
  int count = 0;
  for (const Thread* thread : threads)
    for (StorageImpl* each : thread->used)
      if (entries.find(each) != entries.end() && count < capacity) out[count++] = each;
  return count;
}

// Writes to `out` the storages that operators of user code have used since the last call of this function.
// Returns their number. The order is thread by thread.
int teraio_touched(void** out, int capacity) {
  Everyone everyone;
  int count = 0;
  for (Thread* thread : threads) {
    for (StorageImpl* each : thread->touched)
      if (count < capacity) out[count++] = each;
    thread->touched.clear();
  }
  stretch++;
  return count;
}

// Writes to `out` the streams of this device on which operators of user code have used evictable storages
// since the last call. Returns the number of these streams.
int teraio_streams(int64_t device, int64_t* out, int capacity) {
  Everyone everyone;
  int count = 0;
  for (Thread* thread : threads) {
    for (const c10::Stream& each : thread->streams)
      if (each.device_index() == device && count < capacity) out[count++] = each.id();
    thread->streams.clear();
  }
  return count;
}

void teraio_program(int change) {
  Thread& thread = own();
  std::lock_guard<Spin> held(thread.lock);
  thread.in_program += change;
}
void teraio_engine(int change) {
  Thread& thread = own();
  std::lock_guard<Spin> held(thread.lock);
  thread.in_engine += change;
}

void teraio_rearm() {
  catch_faults();
  Everyone everyone;
  for (Thread* thread : threads) rearm(*thread);
}

// Sets the storage's allocator to the allocator that torch uses for tensors.
void teraio_like_tensors(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  storage->set_allocator(c10::GetAllocator(storage->device_type()));
}

// Sets the text of the error for a read of this storage, because a fetch of the storage failed.
void teraio_refuse(void* address, const char* message) {
  Everyone everyone;
  reasons[static_cast<StorageImpl*>(address)] = message;
}

void teraio_patience(int64_t ms) {
  patience_ms = ms;
}

// Waits for a fetch request of a thread without a Python thread state. Returns the request, or null after
// `teraio_end`. A Python thread of teraio calls this function.
void* teraio_serve() {
  std::unique_lock<std::mutex> held(service_lock);
  request_added.wait(held, [] { return ended || !requests.empty(); });
  if (requests.empty()) return nullptr;
  Request* request = requests.front();
  return request;
}
// Removes the request from the queue, and returns its storages through the arguments. The caller holds the
// GIL. Returns false if the requesting thread no longer waits.
bool teraio_take(void* taken, void*** storages, int* count, const char** place) {
  std::lock_guard<std::mutex> held(service_lock);
  auto* request = static_cast<Request*>(taken);
  auto found = std::find(requests.begin(), requests.end(), request);
  if (found == requests.end()) return false;
  requests.erase(found);
  *storages = request->storages, *count = request->count, *place = request->place;
  request->taken = true;
  answered.notify_all();
  return true;
}
void teraio_served(void* taken) {
  std::lock_guard<std::mutex> held(service_lock);
  static_cast<Request*>(taken)->done = true;
  answered.notify_all();
}
}
