// Sees every read of an evicted tensor from below Python. Built against the torch that is there, as
// allocator.cpp is: its classes differ from version to version.
//
//   an operator begins   RecordFunction calls `begins` in the thread that runs it, before any kernel: the
//                        storages of its arguments are in use until `ends`. Those that are evicted are
//                        fetched.
//   a mutable pointer    where torch can tell (2.13), `pointed_at` fetches before the pointer is handed out
//   any other pointer    in RAM: leads to fenced pages, and who reads there faults: `fault` has them filled
//   the engine evicts    `teraio_leave` takes the bytes and keeps the size; refused while someone uses it
//
// Locks: each thread notes what it uses under a lock of its own, which nobody else takes except `Everyone`.
// So an operator begins without waiting for other operators, and an eviction sees all of them at one moment.
//
//   observer_known.h    storages, threads, locks        observer_reads.h    operators, fetches, faults
//   observer_fences.h   fenced pages                    this file           what Python calls
#include <c10/core/impl/COW.h>
#include <pthread.h>

#include "observer_reads.h"

namespace {
void before_fork() {
  // A thread's first operator since a callback came takes a lock of torch's, which another thread may hold at
  // this moment, and the child for ever. So this thread has what that is for.
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

// From now on operators are observed. In the main thread, where no mode is on.
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

// What gives blocks of RAM back, and what gives up their pages alone.
void teraio_blocks(void (*gives)(void*), uint64_t (*vacates)(void*)) {
  give = gives;
  vacate = vacates;
}

// Nobody fetches any more: reading what is evicted is an error from now on, and Python is not asked.
void teraio_end() {
  ended = true;
  std::lock_guard<std::mutex> held(service_lock);
  asked.notify_all();
}

void teraio_switch(bool on) {
  if (on) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

// A copy of its bytes begins, or is good: who writes into it from now on is noted. Until `teraio_watch` this
// thread asks for its address, and reads nothing. False: it is in use.
bool teraio_copied(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  if (c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks())) return false;
  Everyone everyone;
  if (everyone.uses(storage)) return false;
  Entry& entry = entries[storage];
  if (entry.flags & kPointed) return false;
  entry.flags &= static_cast<uint8_t>(~(kWritten | kDisarmed));
  everyone.here.in_engine++;
  return true;
}

// From now on who takes a mutable address of it is seen, once.
void teraio_watch(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  Everyone everyone;
  Thread& thread = everyone.here;
  thread.in_engine--;
  if (!thread.disarmed.empty() && thread.disarmed.back() == storage) thread.disarmed.pop_back();
  auto found = entries.find(storage);
  if (found == entries.end()) return;
  found->second.flags &= static_cast<uint8_t>(~kDisarmed);
  arm(storage);
}

// Frees its bytes, or moves them into an empty storage, if nobody uses them and, with `unwritten`, nobody has
// written into them. 0: done, 1: in use, 2: written.
int teraio_leave(void* address, void* into, bool unwritten) {
  auto* storage = static_cast<StorageImpl*>(address);
  auto* other = static_cast<StorageImpl*>(into);
  c10::DataPtr bytes;  // goes when the locks are free: that of numpy takes the GIL
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

// The bytes of another storage are its own from now on. Whether they were copied to where the fence is, and
// the other storage still has them.
bool teraio_arrive(void* address, void* from) {
  auto* storage = static_cast<StorageImpl*>(address);
  auto* other = static_cast<StorageImpl*>(from);
  Everyone everyone;
  Entry& entry = entries[storage];
  if (!(entry.flags & kEvicted)) return true;  // a finalizer has read it meanwhile
  allow(storage, entry);
  entry.flags &= static_cast<uint8_t>(~kEvicted);
  auto fenced = fences.find(reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get()));
  const bool awaited = entry.flags & kFaulted;
  entry.flags &= static_cast<uint8_t>(~kFaulted);
  // Without a materializer someone may have the address, and write there later.
  if (fenced != fences.end() && (awaited || !materializes<StorageImpl>) &&
      fill(*fenced->second, other->_mutable_data_ptr_no_checks().get(), storage->nbytes())) {
    if (awaited) entry.flags |= kWritten | kPointed;
    return true;
  }
  // The materializer stays: that of a storage which is fetched by it is cleared when it returns.
  storage->set_data_ptr_noswap(std::move(other->_mutable_data_ptr_no_checks()));
  other->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  other->set_nbytes(size_t{0});
  return false;
}

// Its last tensor is gone, or nobody asks any more.
void teraio_forget(void* address, bool alive) {
  auto* storage = static_cast<StorageImpl*>(address);
  Everyone everyone;
  auto found = entries.find(storage);
  if (found == entries.end()) return;
  if (alive) disarm(storage);
  entries.erase(found);
  reasons.erase(storage);
}

// What happened to it: kWritten, kPointed.
int teraio_flags(void* address) {
  std::lock_guard<Spin> held(own().lock);
  auto found = entries.find(static_cast<StorageImpl*>(address));
  return found == entries.end() ? 0 : flags_of(found->second).load();
}

// Its bytes are at another address, and nobody has the old one.
void teraio_renewed(void* address) {
  Everyone everyone;
  auto found = entries.find(static_cast<StorageImpl*>(address));
  if (found != entries.end()) found->second.flags &= static_cast<uint8_t>(~kPointed);
}

// Someone takes its address, of which torch does not tell.
void teraio_point(void* address) {
  Everyone everyone;
  entries[static_cast<StorageImpl*>(address)].flags |= kWritten | kPointed;
}

// Whoever asked for an address has forgotten it.
void teraio_unpoint() {
  Everyone everyone;
  for (auto& [storage, entry] : entries) entry.flags &= static_cast<uint8_t>(~kPointed);
  clear_fences(everyone);
  everyone.forget_reads();
}

// Whether any of these tensors is evicted.
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

// What operators use now. Returns how many; those that do not fit in `out` are left out.
int teraio_used(void** out, int capacity) {
  Everyone everyone;
  int count = 0;
  for (const Thread* thread : threads)
    for (StorageImpl* each : thread->used)
      if (entries.find(each) != entries.end() && count < capacity) out[count++] = each;
  return count;
}

// What operators have used since the last call, in the order of their threads.
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

// The streams of this device's that operators have used what can be evicted on, since the last call.
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

// The bytes that it gets come from where tensors' bytes come from.
void teraio_like_tensors(void* address) {
  auto* storage = static_cast<StorageImpl*>(address);
  storage->set_allocator(c10::GetAllocator(storage->device_type()));
}

// Why it could not be fetched, for who asked.
void teraio_refuse(void* address, const char* message) {
  Everyone everyone;
  reasons[static_cast<StorageImpl*>(address)] = message;
}

void teraio_patience(int64_t ms) {
  patience_ms = ms;
}

// For a thread of Python's: waits for a request of a thread that Python does not know. Null: the end.
void* teraio_serve() {
  std::unique_lock<std::mutex> held(service_lock);
  asked.wait(held, [] { return ended || !requests.empty(); });
  if (requests.empty()) return nullptr;
  Request* request = requests.front();
  return request;
}
// Now that the thread has the GIL: whether the request is still there, and what it asks for.
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
