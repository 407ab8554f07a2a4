// Parts of a device: (1) streams, (2) points in the order of a stream, and (3) copy engines. A stream is a
// thread with random delays. A copy engine runs one copy at a time.
//
// Each stream keeps two clocks. The real clock gives the time at which the stream's work has really ended.
// The nominal clock gives the time at which a GPU with the set durations would have ended this work. Timing
// events report the nominal clock, so a thread that wakes up late does not count as a slow kernel. A stream
// never runs ahead of either clock.
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

// Settings from the environment. environment.py explains the variables.
struct Settings {
  int devices;
  size_t device_bytes;
  unsigned late_us;         // the largest random delay of one piece of work
  double bytes_per_second;  // the rate of each copy engine; 0: as fast as memory
};
const Settings& settings();
// Settings that a process may change. `kernel_ns` is the least duration of each kernel. `computes` is false
// if kernels only take time.
std::atomic<int64_t>& kernel_ns();
std::atomic<bool>& computes();

// A position in a stream's order. The stream passes a point when all earlier work has ended.
class Point {
 public:
  void pass(Clock::time_point nominal);
  void wait();
  bool passed();
  Clock::time_point nominal();  // valid only after the point was passed

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point nominal_;
};

// A copy engine, which runs one copy at a time in the order in which the copies become ready. According to
// NVIDIA's documentation, the priorities of streams do not affect copies between host and device.
class Engine {
 public:
  void enter();
  void leave(Clock::time_point nominal);
  Clock::time_point free_at() const { return free_at_; }  // valid only between the calls of enter and leave

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

  // Queues work that takes at least `least`. If `engine` is given, the work occupies the engine alone while
  // it runs.
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

// Returns the stream of torch's handle. CUDA's special handles mean the device's default stream.
Stream* stream_of(void* handle, int device);
Stream* make_stream(int device, unsigned flags, int priority);
void end_stream(void* handle);
void synchronize_all(int device);
Engine& engine_out(int device);  // the engine for copies from the device to the host
Engine& engine_in(int device);   // the engine for copies from the host to the device

// Waits, and releases Python's lock meanwhile if the calling thread holds it, because the stream's thread may
// need the lock.
void wait_unlocked(const std::function<void()>& wait);

}  // namespace standin
