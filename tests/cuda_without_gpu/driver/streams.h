// Parts of a simulated GPU: (1) streams, (2) points in the order of a stream, and (3) copy engines. A stream
// is a thread with random delays. A copy engine runs one copy at a time.
//
// Each stream has two clocks. The real clock gives the time at which the stream's work ended in this process.
// The nominal clock gives the time at which it would end on a GPU with the set durations. Timing events use
// the nominal clock. So a thread that wakes up late does not look like a slow kernel. Work never begins
// before the time that the nominal clock gives.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace standin {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;
using Work = std::function<void()>;

// Settings from environment variables, which environment.py explains.
struct Settings {
  int devices;
  size_t device_bytes;
  unsigned late_us;         // largest random delay before each piece of work
  double bytes_per_second;  // rate of each copy engine; 0 means as fast as memory
};
const Settings& settings();
// Settings that a process may change while it runs. `kernel_ns` is the least duration of each kernel. If
// `computes` is false, kernels only take time.
std::atomic<int64_t>& kernel_ns();
std::atomic<bool>& computes();

// A position in the order of a stream's work. The stream passes a point when all work before the point has
// ended.
class Point {
 public:
  void pass(Clock::time_point nominal);
  void wait();
  bool passed();
  Clock::time_point nominal();  // valid only after the stream has passed the point

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point nominal_;
};

// A copy engine. It runs one copy at a time, in the order in which the copies become ready. The order does
// not depend on the priorities of streams. According to NVIDIA's documentation, priorities do not affect
// copies between host and device.
class Engine {
 public:
  void enter();
  void leave(Clock::time_point nominal);
  Clock::time_point free_at() const { return free_at_; }  // call it only between enter and leave

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0, serving_ = 0;
  Clock::time_point free_at_{};
};

class Stream {
 public:
  Stream(int device, unsigned flags, int priority);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queues work that takes at least `least`. If there is an `engine`, no other copy uses it while the work
  // runs.
  void push(Work work, Nanoseconds least = Nanoseconds(0), Engine* engine = nullptr);
  std::shared_ptr<Point> record();
  void wait_for(std::shared_ptr<Point> point);
  void synchronize();
  bool idle();

  const int device;
  const unsigned flags;
  const int priority;

 private:
  struct Item {
    Work work;
    Nanoseconds least{};
    Engine* engine = nullptr;
    std::shared_ptr<Point> passes, waits;
    Clock::time_point pushed;
  };
  void give(Item item);
  void run();
  void execute(Item& item);

  std::mutex mutex_;
  std::condition_variable more_, empty_;
  std::deque<Item> items_;
  bool busy_ = false, ends_ = false;
  Clock::time_point nominal_{};
  std::minstd_rand draw_;
  std::thread thread_;
};

// Returns the stream of a handle. Null and CUDA's other special handles mean the device's default stream.
Stream* stream_of(void* handle, int device);
Stream* make_stream(int device, unsigned flags, int priority);
void end_stream(void* handle);
void synchronize_all(int device);
Engine& engine_out(int device);  // for copies from the device to the host
Engine& engine_in(int device);   // for copies from the host to the device

// Waits. If the calling thread holds Python's lock (the GIL), releases the lock meanwhile, because the
// stream's thread may need it.
void wait_unlocked(const std::function<void()>& wait);

}  // namespace standin
