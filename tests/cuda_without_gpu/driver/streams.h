// Streams as threads that are late; points in their order; engines that one copy uses at a time.
//
// Each stream keeps two clocks. The real one says when its work has really been done; the nominal one says
// when a GPU with the durations that were set would have done it. Timing events tell the nominal clock, so
// that a thread that wakes up late does not count as a slow kernel. A stream never runs ahead of either
// clock.
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

// What may be set in the environment; see environment.py.
struct Settings {
  int devices;
  size_t device_bytes;
  unsigned late_us;         // a piece of work begins up to so much later than it could
  double bytes_per_second;  // of each copy engine; 0: as fast as memory is
};
const Settings& settings();
// What a process may change: how long each kernel takes at least; whether it does more than take time.
std::atomic<int64_t>& kernel_ns();
std::atomic<bool>& computes();

// A place in a stream's order: passed when all work before it is done.
class Point {
 public:
  void pass(Clock::time_point nominal);
  void wait();
  bool passed();
  Clock::time_point nominal();  // only after it was passed

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point nominal_;
};

// One copy at a time, in the order in which the copies are ready. Priorities of streams do not matter here,
// as NVIDIA's documentation says of copies between the host and a device.
class Engine {
 public:
  void enter();
  void leave(Clock::time_point nominal);
  Clock::time_point free_at() const { return free_at_; }  // between enter and leave

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

  // Gives the stream work that takes at least `least`; with an engine, no other work of that engine
  // meanwhile.
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

// By the handle that torch knows it by; the special handles are the device's default stream.
Stream* stream_of(void* handle, int device);
Stream* make_stream(int device, unsigned flags, int priority);
void end_stream(void* handle);
void synchronize_all(int device);
Engine& engine_out(int device);  // device -> host
Engine& engine_in(int device);   // host -> device

// Waits without Python's lock if the calling thread holds it: the stream's thread may need it.
void wait_unlocked(const std::function<void()>& wait);

}  // namespace standin
