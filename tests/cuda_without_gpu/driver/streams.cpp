#include "streams.h"

#include <dlfcn.h>
#include <sys/prctl.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "stop.h"

namespace standin {
namespace {

double number(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::strtod(value, nullptr);
}

constexpr int kMostDevices = 16;
std::mutex streams_mutex;
std::set<Stream*>& streams() {
  // This set is never destroyed, because the threads of streams live longer than static objects.
  static auto* all = new std::set<Stream*>;
  return *all;
}
std::atomic<unsigned> seed{1};

}  // namespace

void stop(const char* format, ...) {
  std::fputs("the stand-in: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

const Settings& settings() {
  static const Settings made{
      .devices = static_cast<int>(number("STANDIN_DEVICES", 1)),
      .device_bytes = static_cast<size_t>(number("STANDIN_MIB", 4096)) << 20,
      .late_us = static_cast<unsigned>(number("STANDIN_LATE_US", 200)),
      .bytes_per_second = number("STANDIN_COPY_GB_S", 0) * 1e9,
  };
  if (made.devices < 1 || made.devices > kMostDevices) stop("STANDIN_DEVICES must be 1 to %d", kMostDevices);
  return made;
}

std::atomic<int64_t>& kernel_ns() {
  static std::atomic<int64_t> set{static_cast<int64_t>(number("STANDIN_KERNEL_US", 0) * 1e3)};
  return set;
}

std::atomic<bool>& computes() {
  static std::atomic<bool> set{number("STANDIN_COMPUTES", 1) != 0};
  return set;
}

void Point::pass(Clock::time_point nominal) {
  std::lock_guard lock(mutex_);
  passed_ = true;
  nominal_ = nominal;
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

bool Point::passed() {
  std::lock_guard lock(mutex_);
  return passed_;
}

Clock::time_point Point::nominal() {
  std::lock_guard lock(mutex_);
  return nominal_;
}

void Engine::enter() {
  std::unique_lock lock(mutex_);
  const uint64_t mine = next_++;
  changed_.wait(lock, [&] { return serving_ == mine; });
}

void Engine::leave(Clock::time_point nominal) {
  std::lock_guard lock(mutex_);
  free_at_ = nominal;
  ++serving_;
  changed_.notify_all();
}

Stream::Stream(int device, unsigned flags, int priority)
    : device(device), flags(flags), priority(priority), draw_(seed.fetch_add(1)), thread_([this] {
        run();
      }) {}

Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
    more_.notify_all();
  }
  thread_.join();
}

void Stream::give(Item item) {
  std::lock_guard lock(mutex_);
  item.pushed = Clock::now();
  items_.push_back(std::move(item));
  more_.notify_one();
}

void Stream::push(Work work, Nanoseconds least, Engine* engine) {
  give({.work = std::move(work), .least = least, .engine = engine});
}

std::shared_ptr<Point> Stream::record() {
  auto point = std::make_shared<Point>();
  give({.passes = point});
  return point;
}

void Stream::wait_for(std::shared_ptr<Point> point) {
  give({.waits = std::move(point)});
}

void Stream::synchronize() {
  auto point = record();
  wait_unlocked([&] { point->wait(); });
}

bool Stream::idle() {
  std::lock_guard lock(mutex_);
  return items_.empty() && !busy_;
}

void Stream::run() {
  prctl(PR_SET_TIMERSLACK, 1);  // otherwise, a short sleep takes 50 us longer
  for (;;) {
    std::unique_lock lock(mutex_);
    busy_ = false;
    more_.wait(lock, [this] { return ends_ || !items_.empty(); });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    busy_ = true;
    lock.unlock();
    execute(item);
  }
}

void Stream::execute(Item& item) {
  auto begins = std::max(nominal_, item.pushed);
  if (item.passes) {
    nominal_ = begins;
    item.passes->pass(nominal_);
    return;
  }
  if (item.waits) {
    item.waits->wait();
    nominal_ = std::max(nominal_, item.waits->nominal());
    return;
  }
  if (const unsigned most = settings().late_us; most > 0) begins += std::chrono::microseconds(draw_() % most);
  if (item.engine != nullptr) {
    item.engine->enter();
    begins = std::max(begins, item.engine->free_at());
  }
  std::this_thread::sleep_until(begins);
  item.work();
  const auto ends = begins + item.least;
  std::this_thread::sleep_until(ends);
  // If the work took longer than its set duration, count the real time.
  const auto now = Clock::now();
  const bool overran = now - ends > std::chrono::microseconds(500);
  nominal_ = item.least.count() > 0 && !overran ? ends : now;
  if (item.engine != nullptr) item.engine->leave(nominal_);
}

Stream* make_stream(int device, unsigned flags, int priority) {
  auto* made = new Stream(device, flags, priority);
  std::lock_guard lock(streams_mutex);
  streams().insert(made);
  return made;
}

Stream* stream_of(void* handle, int device) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number > 2) {
    auto* stream = static_cast<Stream*>(handle);
    std::lock_guard lock(streams_mutex);
    if (!streams().contains(stream)) stop("stream %p was destroyed or never made, and is used", handle);
    return stream;
  }
  static std::mutex mutex;
  static Stream* defaults[kMostDevices];
  std::lock_guard lock(mutex);
  if (defaults[device] == nullptr) defaults[device] = make_stream(device, 0, 0);
  return defaults[device];
}

void end_stream(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return;
  auto* stream = static_cast<Stream*>(handle);
  {
    std::lock_guard lock(streams_mutex);
    streams().erase(stream);
  }
  wait_unlocked([&] { delete stream; });
}

void synchronize_all(int device) {
  std::vector<std::shared_ptr<Point>> points;
  {
    std::lock_guard lock(streams_mutex);
    for (Stream* stream : streams())
      if (stream->device == device) points.push_back(stream->record());
  }
  wait_unlocked([&] {
    for (const auto& point : points) point->wait();
  });
}

Engine& engine_out(int device) {
  static Engine engines[kMostDevices];
  return engines[device];
}

Engine& engine_in(int device) {
  static Engine engines[kMostDevices];
  return engines[device];
}

void wait_unlocked(const std::function<void()>& wait) {
  static const auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static const auto running = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (holds == nullptr || save == nullptr || running() == 0 || holds() == 0) {
    wait();
    return;
  }
  void* state = save();
  wait();
  restore(state);
}

}  // namespace standin
