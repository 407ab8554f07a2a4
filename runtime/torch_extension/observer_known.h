// What is known of storages and threads, and the locks around it.
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
#error "torch is built with NDEBUG, which changes the layout of RecordFunction: build this with it, too"
#endif

// ---- private members of torch's, by their names: a torch without them does not compile this

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

// ---- what is known of storages and threads

constexpr uint8_t kEvicted = 1;   // it keeps its size, and has no bytes
constexpr uint8_t kWritten = 2;   // since the engine last asked
constexpr uint8_t kPointed = 4;   // someone took its address in this step
constexpr uint8_t kDisarmed = 8;  // a kernel took its pointer: the next one that is taken is not seen
constexpr uint8_t kRefused = 16;  // reading raises an error, until the operator has ended that asked
constexpr uint8_t kFaulted = 32;  // someone waits for its bytes at the fenced address

struct Fence;
struct Entry {
  uint8_t flags = 0;  // by several readers at once: through `flags_of`
  uint32_t touched = 0;
  Fence* fence = nullptr;  // where it was evicted last, and is again
};
std::atomic_ref<uint8_t> flags_of(Entry& entry) {
  return std::atomic_ref<uint8_t>(entry.flags);
}

struct Thread;
constexpr int kReadsFor = 2;  // steps after that with its last read, a thread may have a pointer
std::mutex threads_lock;
std::vector<Thread*> threads;
ska::flat_hash_map<StorageImpl*, Entry> entries;  // read under any thread's lock, changed under all of them
std::atomic<uint32_t> stretch{1};

class Spin {
 public:
  void lock() {
    while (taken_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void unlock() { taken_.clear(std::memory_order_release); }

 private:
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
};

// What is known of an operator.
struct About {
  const c10::FunctionSchema* schema = nullptr;
  std::string name, overload;
  uint64_t writes = 0;
  bool looks = false;
  bool goes_on = false;  // it may use its arguments when it has ended: a collective
};

struct Thread {
  Spin lock;
  std::vector<StorageImpl*> used;  // by operators that have begun, outermost first
  std::vector<uint32_t> marks;     // where each of them begins in `used`
  std::vector<StorageImpl*> touched;
  std::vector<c10::Stream> streams;                             // of a GPU, where they ran
  std::vector<StorageImpl*> missing;                            // of the operator that begins
  std::unordered_map<const c10::FunctionSchema*, About> known;  // the operators that it has run
  std::array<About*, 512> recent{};                             // of these, the last by address
  std::vector<StorageImpl*> disarmed;
  std::vector<std::pair<size_t, StorageImpl*>> refused;  // with how many operators had begun by then
  int in_program = 0;
  int in_engine = 0;
  int reads = 0;  // steps for which it counts as one that reads, out of programs, what can be evicted
  Thread() {
    std::lock_guard<std::mutex> held(threads_lock);
    threads.push_back(this);
  }
  ~Thread() {
    std::lock_guard<std::mutex> held(threads_lock);
    std::erase(threads, this);
  }
};
thread_local Thread* mine = nullptr;  // a pointer needs no guard at each operator
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

class Everyone {
 public:
  Thread& here;  // this one's, which is known before the lock is held: to become so takes it
  Everyone() : here(own()), held_(threads_lock) {
    for (Thread* thread : threads) thread->lock.lock();
  }
  ~Everyone() {
    for (Thread* thread : threads) thread->lock.unlock();
  }
  // Whether another thread than this one may hold a pointer, which nobody sees.
  bool read_elsewhere() const {
    for (const Thread* thread : threads)
      if (thread != &here && thread->reads > 0) return true;
    return false;
  }
  // A step has ended.
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

// ---- mutable pointers: torch 2.13 says when one is taken

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
