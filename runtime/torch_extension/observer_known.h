// The observer's tables of storages and threads, and the locks of these tables.
#pragma once
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/flat_hash_map.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {
using c10::StorageImpl;

#ifndef NDEBUG
#error "torch is built with NDEBUG, which changes the layout of RecordFunction: compile this file with NDEBUG"
#endif

// ---- private members of torch's classes; if torch lacks one, this file does not compile

template <typename Tag, typename Tag::type Member>
struct Opened {
  friend constexpr typename Tag::type member(Tag) { return Member; }
};
struct Described {
  using type = std::variant<std::string, at::RecordFunction::schema_ref_t> at::RecordFunction::*;
  friend constexpr type member(Described);
};
template struct Opened<Described, &at::RecordFunction::fn_>;
struct Throws {
  using type = bool StorageImpl::*;
  friend constexpr type member(Throws);
};
template struct Opened<Throws, &StorageImpl::throw_on_immutable_data_ptr_>;

template <typename S>
constexpr bool materializes = requires(S* storage) { storage->has_materializer(); };

// ---- storages and threads

constexpr uint8_t kEvicted = 1;   // the storage has its size, but no bytes
constexpr uint8_t kWritten = 2;   // the storage was written since its copy began
constexpr uint8_t kPointed = 4;   // code outside of teraio took the address in this step
constexpr uint8_t kDisarmed = 8;  // a kernel took the pointer; its next taking is not detected
constexpr uint8_t kRefused = 16;  // a read raises an error, until the reading operator has ended
constexpr uint8_t kFaulted = 32;  // a thread waits for the storage's bytes at the fenced address

struct Fence;
struct Entry {
  uint8_t flags = 0;       // several threads change the flags concurrently, through `flags_of`
  uint32_t touched = 0;    // the value of `stretch` when an operator last used the storage
  Fence* fence = nullptr;  // fence of the last eviction, for reuse by the next
};
std::atomic_ref<uint8_t> flags_of(Entry& entry) {
  return std::atomic_ref<uint8_t>(entry.flags);
}

struct Thread;
constexpr int kReadsFor = 2;  // number of steps for which a reading thread may keep a pointer
std::mutex threads_lock;
std::vector<Thread*> threads;
ska::flat_hash_map<StorageImpl*, Entry> entries;  // read under any thread's lock, changed under all locks
std::atomic<uint32_t> stretch{1};                 // grows with each call of `teraio_touched`

class Spin {
 public:
  void lock() {
    while (taken_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void unlock() { taken_.clear(std::memory_order_release); }

 private:
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
};

// What an operator does that may need no fetch of an evicted gradient (observer_gradients.h).
enum class Spares : uint8_t { kNothing, kScaling, kNorm, kUnscaling };

// The properties of an operator that the observer needs.
struct About {
  const c10::FunctionSchema* schema = nullptr;
  std::string name, overload;
  uint64_t writes = 0;   // one bit per argument, set if the operator writes the argument
  bool looks = false;    // the operator uses no bytes of its arguments
  bool goes_on = false;  // a collective, which may use its arguments after its end
  Spares spares = Spares::kNothing;
};

struct Thread {
  Spin lock;
  std::vector<StorageImpl*> used;     // storages of the operators that run now, outermost operator first
  std::vector<uint32_t> marks;        // the start of each operator's storages in `used`
  std::vector<StorageImpl*> touched;  // storages that user code used since `teraio_touched`
  std::vector<c10::Stream> streams;   // GPU streams on which user code's operators ran
  std::vector<StorageImpl*> missing;  // evicted arguments of the operator that is beginning
  std::unordered_map<const c10::FunctionSchema*, About> known;  // operators of this thread so far
  std::array<About*, 512> recent{};                             // a cache of `known`, indexed by address
  std::vector<StorageImpl*> disarmed;                           // storages whose kDisarmed this thread set
  // Storages with kRefused, each with the number of operators that ran when its read was refused.
  std::vector<std::pair<size_t, StorageImpl*>> refused;
  int in_program = 0;
  int in_engine = 0;
  int reads = 0;  // remaining steps in which this thread may have a pointer from user code
  Thread() {
    std::lock_guard<std::mutex> held(threads_lock);
    threads.push_back(this);
  }
  ~Thread() {
    std::lock_guard<std::mutex> held(threads_lock);
    std::erase(threads, this);
  }
};
// A thread_local object would need an initialization guard in each operator. So this is a pointer.
thread_local Thread* mine = nullptr;
struct Ending {
  ~Ending() { delete std::exchange(mine, nullptr); }
};
[[gnu::noinline]] Thread& begun() {
  static thread_local Ending ending;
  mine = new Thread;
  return *mine;
}
Thread& own() {
  return mine != nullptr ? *mine : begun();
}

// A guard that holds the locks of all threads' tables as long as it exists.
class Everyone {
 public:
  // The calling thread's tables. They are made before this object takes `threads_lock`, because their
  // constructor also takes `threads_lock`.
  Thread& own_thread;
  Everyone() : own_thread(own()), held_(threads_lock) {
    for (Thread* thread : threads) thread->lock.lock();
  }
  ~Everyone() {
    for (Thread* thread : threads) thread->lock.unlock();
  }
  // Returns true if another thread may have a pointer that the observer did not detect.
  bool read_elsewhere() const {
    for (const Thread* thread : threads)
      if (thread != &own_thread && thread->reads > 0) return true;
    return false;
  }
  // Lowers each positive `reads` by one, because a step has ended.
  void forget_reads() {
    for (Thread* thread : threads) thread->reads -= thread->reads > 0;
  }
  bool uses(const StorageImpl* storage) const {
    for (const Thread* thread : threads)
      for (const StorageImpl* each : thread->used)
        if (each == storage) return true;
    return false;
  }

 private:
  std::lock_guard<std::mutex> held_;
};

// Returns the storage's flags, such as kEvicted. The caller holds the lock of its thread, or all locks.
uint8_t flags_under_lock(StorageImpl* storage) {
  auto found = entries.find(storage);
  return found == entries.end() ? uint8_t{0} : flags_of(found->second).load();
}

bool is_evicted(StorageImpl* storage) {
  std::lock_guard<Spin> held(own().lock);
  return flags_under_lock(storage) & kEvicted;
}

bool is_evicted(StorageImpl* storage, const Everyone&) {
  return flags_under_lock(storage) & kEvicted;
}

// ---- mutable pointers: torch 2.13 reports when code takes one

template <typename S>
void pointed_at(S* storage);

template <typename S>
void arm(S* storage) {
  if constexpr (materializes<S>) {
    if (!storage->has_materializer()) storage->set_materializer(&pointed_at<S>);
  }
}

template <typename S>
void disarm(S* storage) {
  if constexpr (materializes<S>) storage->clear_materializer();
}
}  // namespace
