#include "device.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "stop.h"

namespace standin {
namespace {

thread_local int current = -1;
char contexts[16];
std::atomic<long> kernels{0}, copies{0}, pageable{0};
std::mutex names_mutex;
std::map<std::string, long>& names() {
  static auto* all = new std::map<std::string, long>;
  return *all;
}

Nanoseconds duration(size_t bytes) {
  const double rate = settings().bytes_per_second;
  return Nanoseconds(rate > 0 ? static_cast<int64_t>(static_cast<double>(bytes) / rate * 1e9) : 0);
}

}  // namespace

int current_device() {
  return current < 0 ? 0 : current;
}
void set_device(int device) {
  current = device;
}
void* context_of(int device) {
  return &contexts[device];
}

int device_of(void* context) {
  const auto* at = static_cast<char*>(context);
  return at >= contexts && at < contexts + sizeof contexts ? static_cast<int>(at - contexts) : -1;
}

void copy(void* to, const void* from, size_t bytes, Stream* stream) {
  if (bytes == 0) return;
  ++copies;
  const Found target = find(to, bytes), source = find(from, bytes);
  const bool out = target.place != Place::kDevice, in = source.place != Place::kDevice;
  Engine* engine = nullptr;
  if (out && !in) engine = &engine_out(source.device);
  if (in && !out) engine = &engine_in(target.device);
  const Nanoseconds least = engine != nullptr ? duration(bytes) : Nanoseconds(0);
  // Copy pageable memory now, because the caller may overwrite it as soon as this function returns.
  if (source.place == Place::kPageable) {
    ++pageable;
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    stream->push([=] { std::memcpy(to, staged->data(), bytes); }, least, engine);
  } else {
    stream->push([=] { std::memcpy(to, from, bytes); }, least, engine);
  }
  if (target.place == Place::kPageable) {
    ++pageable;
    stream->synchronize();
  }
}

void fill(void* at, int value, size_t bytes, Stream* stream) {
  find(at, bytes);
  stream->push([=] { std::memset(at, value, bytes); }, Nanoseconds(kernel_ns()));
}

void launched(const std::string& name, Stream* stream) {
  ++kernels;
  {
    std::lock_guard lock(names_mutex);
    ++names()[name];
  }
  stream->push([] {}, Nanoseconds(kernel_ns()));
}

bool elapsed_ms(Event* from, Event* to, float* ms) {
  if (!from->timed || !to->timed || !from->last || !to->last) return false;
  if (!from->last->passed() || !to->last->passed()) return false;
  *ms = std::chrono::duration<float, std::milli>(to->last->nominal() - from->last->nominal()).count();
  return true;
}

Counts counts() {
  return {kernels, copies, pageable};
}

}  // namespace standin

// Prints the launched kernels, the copies and the peak of used memory.
STANDIN_EXPORT void standin_report() {
  using namespace standin;
  const Counts all = counts();
  std::fprintf(stderr, "the stand-in: %ld kernels without numbers, %ld copies (%ld of pageable memory)\n",
               all.kernels, all.copies, all.pageable);
  for (int device = 0; device < settings().devices; ++device)
    std::fprintf(stderr, "the stand-in: device %d: %zu MiB at most\n", device, most_bytes(device) >> 20);
  for (const auto& [name, count] : names()) std::fprintf(stderr, "  %ld x %s\n", count, name.c_str());
}

STANDIN_EXPORT long standin_kernels() {
  return standin::counts().kernels;
}
STANDIN_EXPORT size_t standin_used(int device) {
  return standin::used_bytes(device);
}
STANDIN_EXPORT size_t standin_most(int device) {
  return standin::most_bytes(device);
}
STANDIN_EXPORT size_t standin_pinned() {
  return standin::pinned_bytes();
}
STANDIN_EXPORT void standin_set_kernel_us(double us) {
  standin::kernel_ns() = static_cast<int64_t>(us * 1e3);
}
STANDIN_EXPORT void standin_set_computes(bool set) {
  standin::computes() = set;
}
STANDIN_EXPORT bool standin_computes() {
  return standin::computes();
}

// Queues a function from operators.cpp on a stream. The function takes at least the set duration of a kernel.
STANDIN_EXPORT void standin_push(void* stream, int device, std::function<void()>* work) {
  using namespace standin;
  std::shared_ptr<std::function<void()>> kept(work);
  stream_of(stream, device)->push([kept] { (*kept)(); }, Nanoseconds(kernel_ns()));
}
STANDIN_EXPORT void standin_synchronize(void* stream, int device) {
  standin::stream_of(stream, device)->synchronize();
}
