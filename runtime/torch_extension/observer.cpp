// Detects each read of an evicted tensor below Python. This file is compiled against the installed torch,
// because torch's classes differ between versions.
//
//   an operator begins   RecordFunction calls `begins` on the operator's thread, before any kernel; `begins`
//                        fetches evicted arguments; the arguments' storages are in use until `ends`
//   a mutable pointer    torch 2.13 calls `pointed_at`, which fetches before the caller gets the pointer
//   any other pointer    a pointer in RAM leads to fenced pages; a read of a fenced page faults, and `fault`
//                        fills the pages
//   the engine evicts    `teraio_leave` takes the bytes and keeps the size; it refuses a storage in use
//
// Locks: each thread has a lock, under which it records its storages in use. Only `Everyone` takes the locks
// of all threads. So an operator begins without waiting for other operators, and an eviction sees a
// consistent state of all threads.
//
//   observer_known.h    storages, threads, locks        observer_reads.h    operators, fetches, faults
//   observer_fences.h   fenced pages                    this file           what Python calls
#include <c10/core/impl/COW.h>
#include <pthread.h>

#include "observer_reads.h"

namespace {
void before_fork() {
  // After a change of callbacks, a thread's first operator takes a lock of torch. If another thread holds
  // this lock during the fork, the child can never take the lock. So the forking thread updates its callbacks
  // before the fork.
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

// Starts the observation of operators. Call it on the main thread, without an active torch mode.
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
  if (handle == at::INVALID_CALLBACK_HANDLE)
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(begins, ends).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

// Sets two functions of the allocator. `gives` frees a block of RAM. `vacates` frees only the block's pages,
// and leaves the addresses to the observer.
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

// Starts the detection of writes into the storage. Call it when a copy of the storage's bytes begins or is
// valid. Until `teraio_watch`, this thread may take the storage's address to make this copy. Returns false if
// the storage is in use or copy-on-write, or if code outside of teraio has the storage's address.
bool teraio_copied(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  if (c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks())) return false;
  Everyone everyone;
  if (everyone.uses(storage)) return false;
  Entry& entry = entries[storage];
  if (entry.flags & kPointed) return false;
  entry.flags &= static_cast<uint8_t>(~(kWritten | kDisarmed));
  everyone.own_thread.in_engine++;
  return true;
}

// Starts to detect when code takes a mutable address of the storage.
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

// Frees the storage's bytes, or moves them into the empty storage `into`. Returns 0 on success, and 1 if the
// storage is in use. With `unwritten`, returns 2 if code has written to the storage since its copy began.
int teraio_leave(void* address, void* into, bool unwritten) {
  auto* storage = static_cast<StorageImpl*>(address);
  auto* other = static_cast<StorageImpl*>(into);
  c10::DataPtr bytes;  // destroyed after the locks are released, because numpy's deleter takes the GIL
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
  if (other == nullptr) return 0;
  other->set_nbytes(storage->nbytes());
  other->set_data_ptr_noswap(std::move(bytes));
  return 0;
}

// Moves the bytes of `from` into the storage. Returns true if `from` still has its bytes. There are two such
// cases: (1) the bytes were copied to the fenced address, (2) the storage is already resident.
bool teraio_arrive(void* address, void* from) {
  auto* storage = static_cast<StorageImpl*>(address);
  auto* other = static_cast<StorageImpl*>(from);
  Everyone everyone;
  Entry& entry = entries[storage];
  if (!(entry.flags & kEvicted)) return true;  // a read in a finalizer has already fetched the storage
  allow(storage, entry);
  entry.flags &= static_cast<uint8_t>(~kEvicted);
  auto fenced = fences.find(reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get()));
  const bool awaited = entry.flags & kFaulted;
  entry.flags &= static_cast<uint8_t>(~kFaulted);
  // If torch has no materializer, code may have taken the fenced address unnoticed. Such code may later write
  // to this address.
  if (fenced != fences.end() && (awaited || !materializes<StorageImpl>) &&
      fill(*fenced->second, other->_mutable_data_ptr_no_checks().get(), storage->nbytes())) {
    if (awaited) entry.flags |= kWritten | kPointed;
    return true;
  }
  // The materializer is not cleared here. If this fetch runs inside the materializer, torch clears it later.
  storage->set_data_ptr_noswap(std::move(other->_mutable_data_ptr_no_checks()));
  other->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  other->set_nbytes(size_t{0});
  return false;
}

// Forgets a storage. Without `alive`, the storage was freed. With `alive`, the engine no longer tracks the
// storage.
void teraio_forget(void* address, bool alive) {
  auto* storage = static_cast<StorageImpl*>(address);
  Everyone everyone;
  auto found = entries.find(storage);
  if (found == entries.end()) return;
  if (alive) disarm(storage);
  entries.erase(found);
  reasons.erase(storage);
}

// Returns the storage's flags.
int teraio_flags(void* address) {
  std::lock_guard<Spin> held(own().lock);
  auto found = entries.find(static_cast<StorageImpl*>(address));
  return found == entries.end() ? 0 : flags_of(found->second).load();
}

// Records that the storage's bytes have a new address, which no code outside of teraio has taken.
void teraio_renewed(void* address) {
  Everyone everyone;
  auto found = entries.find(static_cast<StorageImpl*>(address));
  if (found != entries.end()) found->second.flags &= static_cast<uint8_t>(~kPointed);
}

// Records that code takes the storage's address in a way that torch does not report.
void teraio_point(void* address) {
  Everyone everyone;
  entries[static_cast<StorageImpl*>(address)].flags |= kWritten | kPointed;
}

// Ends a step. From now on, assumes that code no longer has the addresses that it took earlier.
void teraio_unpoint() {
  Everyone everyone;
  for (auto& [storage, entry] : entries) entry.flags &= static_cast<uint8_t>(~kPointed);
  clear_fences(everyone);
  everyone.forget_reads();
}

// Returns true if any of these tensors is evicted.
bool teraio_some_evicted(void** tensors, int count) {
  std::lock_guard<Spin> held(own().lock);
  for (int at = 0; at < count; at++) {
    auto* tensor = static_cast<c10::TensorImpl*>(tensors[at]);
    if (!tensor->has_storage()) continue;
    auto found = entries.find(tensor->unsafe_storage().unsafeGetStorageImpl());
    if (found != entries.end() && flags_of(found->second).load() & kEvicted) return true;
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

// Writes the storages that user code's operators have used since the last call of this function to `out`,
// thread by thread.
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

// Writes to `out` the device's streams on which operators used evictable storages since the last call.
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

// Sets the error message for readers of a storage whose fetch failed.
void teraio_refuse(void* address, const char* message) {
  Everyone everyone;
  reasons[static_cast<StorageImpl*>(address)] = message;
}

void teraio_patience(int64_t ms) {
  patience_ms = ms;
}

// Waits until a thread without a Python thread state requests a fetch. Returns this request, or null after
// `teraio_end`. A Python thread of teraio calls this function.
void* teraio_serve() {
  std::unique_lock<std::mutex> held(service_lock);
  request_added.wait(held, [] { return ended || !requests.empty(); });
  if (requests.empty()) return nullptr;
  Request* request = requests.front();
  return request;
}
// Removes the request from the queue and returns its storages through the arguments. The caller holds the
// GIL. Returns false if the requesting thread stopped waiting.
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
