// A fake CUDA driver without a device. Calls that are asynchronous in the real driver run late in the fake.
//
// A stream is a thread with a queue. Before each task, the thread sleeps for a random time, which a seed
// determines. A wait for an event that was never recorded does nothing. New and freed memory is filled with
// poison (0xDD). On any machine, a missing wait therefore shows as poison, or as older or newer bytes.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {
struct Mark {  // a record of an event on a stream
  std::mutex mutex;
  std::condition_variable passed;
  bool done = false;
  std::chrono::steady_clock::time_point at;
  void pass() {
    std::lock_guard lock(mutex);
    done = true;
    at = std::chrono::steady_clock::now();
    passed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    passed.wait(lock, [&] { return done; });
  }
};

struct Event {
  std::shared_ptr<Mark> last;  // null if the event was never recorded
};

std::atomic<unsigned> seed{1}, delay_us{2000};
std::atomic<int> fail_code{0}, streams_alive{0}, events_alive{0}, pinned{0};

struct Stream;
std::mutex streams_mutex;
std::set<Stream*> streams;

struct Stream {
  std::mutex mutex;
  std::condition_variable more;
  std::deque<std::function<void()>> queue;
  bool stop = false;
  std::minstd_rand draw{seed.fetch_add(1)};
  const unsigned delay = delay_us;
  std::thread thread{[this] { run(); }};

  void run() {
    for (;;) {
      std::unique_lock lock(mutex);
      more.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      auto work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(draw() % (delay + 1)));
      work();
    }
  }
  void push(std::function<void()> work) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    more.notify_one();
  }
};

int contexts[2];
thread_local void* current = &contexts[0];
std::atomic<int> copies_running{0}, unpinned_under_a_copy{0};

void copy(void* to, const void* from, size_t n, void* s) {
  ++copies_running;
  static_cast<Stream*>(s)->push([=] { std::memcpy(to, from, n), --copies_running; });
}
}  // namespace

extern "C" {
int cuCtxGetCurrent(void** out) {
  return *out = current, 0;
}
int cuCtxSetCurrent(void* c) {
  if (c != &contexts[0] && c != &contexts[1]) return 201;
  return current = c, 0;
}
int cuCtxSynchronize() {
  std::lock_guard lock(streams_mutex);
  for (Stream* stream : streams) {
    auto mark = std::make_shared<Mark>();
    stream->push([mark] { mark->pass(); });
    mark->wait();
  }
  return 0;
}
int cuStreamCreate(void** out, unsigned) {
  std::lock_guard lock(streams_mutex);
  *out = *streams.insert(new Stream).first;
  return ++streams_alive, 0;
}
int cuStreamCreateWithPriority(void** out, unsigned flags, int) {
  return cuStreamCreate(out, flags);
}
int cuStreamDestroy_v2(void* p) {
  auto* s = static_cast<Stream*>(p);
  {
    std::lock_guard lock(streams_mutex);
    streams.erase(s);
  }
  {
    std::lock_guard lock(s->mutex);
    s->stop = true;
    s->more.notify_one();
  }
  s->thread.join();
  delete s;
  return --streams_alive, 0;
}
int cuEventCreate(void** out, unsigned) {
  return *out = new Event, ++events_alive, 0;
}
int cuEventDestroy_v2(void* e) {
  return delete static_cast<Event*>(e), --events_alive, 0;
}
int cuEventRecord(void* e, void* s) {
  auto mark = static_cast<Event*>(e)->last = std::make_shared<Mark>();
  static_cast<Stream*>(s)->push([mark] { mark->pass(); });
  return 0;
}
int cuEventSynchronize(void* e) {
  if (auto mark = static_cast<Event*>(e)->last) mark->wait();
  return 0;
}
int cuEventQuery(void* e) {
  auto mark = static_cast<Event*>(e)->last;
  if (!mark) return 0;
  std::lock_guard lock(mark->mutex);
  return mark->done ? 0 : 600;
}
int cuEventElapsedTime(float* ms, void* from, void* to) {
  auto one = static_cast<Event*>(from)->last, other = static_cast<Event*>(to)->last;
  if (!one || !other) return 400;
  std::scoped_lock lock(one->mutex, other->mutex);
  if (!one->done || !other->done) return 600;
  *ms = std::chrono::duration<float, std::milli>(other->at - one->at).count();
  return 0;
}
int cuStreamWaitEvent(void* s, void* e, unsigned) {
  auto mark = static_cast<Event*>(e)->last;
  if (mark) static_cast<Stream*>(s)->push([mark] { mark->wait(); });
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void* s) {
  if (const int code = fail_code.exchange(0)) return code;
  return copy(to, reinterpret_cast<void*>(from), n, s), 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void* s) {
  if (const int code = fail_code.exchange(0)) return code;
  return copy(reinterpret_cast<void*>(to), from, n, s), 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) {
  return ++pinned, 0;
}
int cuMemHostUnregister(void*) {
  unpinned_under_a_copy += copies_running;
  return --pinned, 0;
}

// Functions that the tests call, and the product does not.
uint64_t fake_alloc(size_t n) {
  return reinterpret_cast<uint64_t>(std::memset(::operator new(n), 0xDD, n));
}
void fake_free(uint64_t p, size_t n) {
  std::memset(reinterpret_cast<void*>(p), 0xDD, n);
}  // the memory is kept, so that a read after the free gets poison
void fake_kernel_write(void* s, uint64_t p, const void* bytes, size_t n) {
  static_cast<Stream*>(s)->push([=] { std::memcpy(reinterpret_cast<void*>(p), bytes, n); });
}
void fake_kernel_read(void* s, void* out, uint64_t p, size_t n) {
  static_cast<Stream*>(s)->push([=] { std::memcpy(out, reinterpret_cast<void*>(p), n); });
}
// Blocks the stream until fake_open(), like a kernel whose duration the test chooses.
Mark* fake_gate(void* s) {
  auto* gate = new Mark;
  static_cast<Stream*>(s)->push([gate] { gate->wait(); });
  return gate;
}
void fake_open(void* gate) {
  static_cast<Mark*>(gate)->pass();
}
void fake_set(unsigned first_seed, unsigned delay) {
  seed = first_seed, delay_us = delay;
}
void fake_fail_next(int code) {
  fail_code = code;
}
void fake_use(int device) {
  current = &contexts[device];
}
int fake_current() {
  return static_cast<int>(static_cast<int*>(current) - contexts);
}
int fake_unpinned_under_a_copy() {
  return unpinned_under_a_copy.exchange(0);
}
int fake_pinned() {
  return pinned;
}
int fake_alive() {
  return streams_alive + events_alive + pinned;
}
}
