// The event loop of the deterministic I/O engine.
#include "io/memory_io.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace teraio {
MemoryIo::MemoryIo(const MemoryShape& shape) : shape_(shape), seed_(shape.seed) {
  if (shape.files < 1 || shape.files > 64 || shape.depth < 1 || shape.depth > 64)
    throw std::invalid_argument("files and depth must be between 1 and 64");
  if (!(shape.ns_per_byte >= 0 && shape.ns_per_byte <= 1e6) || !(shape.jitter >= 0 && shape.jitter <= 1000))
    throw std::invalid_argument("ns_per_byte must be between 0 and 1e6, jitter between 0 and 1000");
  files_.resize(static_cast<size_t>(shape.files));
}

// Returns a random number. The generator is splitmix64: it passes a counter through a bijective function that
// mixes the bits.
uint64_t MemoryIo::random() {
  uint64_t x = seed_ += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

uint64_t MemoryIo::now_ns() const {
  std::lock_guard lock(mutex_);
  return now_ns_;
}

void MemoryIo::advance_to(uint64_t ns) {
  std::lock_guard lock(mutex_);
  now_ns_ = std::max(now_ns_, ns);
}

void MemoryIo::submit(Request& request) {
  std::lock_guard lock(mutex_);
  files_.at(static_cast<size_t>(request.file)).queue[request.demand ? 1 : 0].push(request);
}

Result MemoryIo::operate(const Request& request) {
  if (request.op == Op::nothing) return {0, request.bytes};
  auto& bytes = files_[static_cast<size_t>(request.file)].bytes;
  const uint64_t end = request.offset + request.bytes;
  if (request.op == Op::write) {
    if (end > shape_.size_bytes) return {ENOSPC, 0};
    if (bytes.size() < end) bytes.resize(end);
    std::memcpy(bytes.data() + request.offset, request.buffer, request.bytes);
    return {0, request.bytes};
  }
  if (request.offset >= bytes.size()) return {0, 0};
  const uint64_t there = std::min<uint64_t>(request.bytes, bytes.size() - request.offset);
  std::memcpy(request.buffer, bytes.data() + request.offset, there);
  return {0, there};
}

// Starts one queued request. Returns false if no file has both a queued request and room for another
// operation.
bool MemoryIo::start_one() {
  std::unique_lock lock(mutex_);
  for (File& file : files_) {
    if (file.serving >= shape_.depth) continue;
    Request* request = file.queue[1].pop();
    if (request == nullptr) request = file.queue[0].pop();
    if (request == nullptr) continue;
    ++file.serving;
    lock.unlock();
    const bool wanted = request->before == nullptr || request->before(*request);
    lock.lock();
    if (!wanted) {
      --file.serving;
      lock.unlock();
      request->complete(*request, {ECANCELED, 0});
      return true;
    }
    const double share = static_cast<double>(random() >> 11) * 0x1p-53;
    const double service =
        static_cast<double>(shape_.latency_ns) + static_cast<double>(request->bytes) * shape_.ns_per_byte;
    const auto takes = static_cast<uint64_t>(service * (1 + shape_.jitter * share)) + request->delay_ns;
    events_.push_back({now_ns_ + takes, random(), request});
    std::push_heap(events_.begin(), events_.end(), std::greater<>());
    return true;
  }
  return false;
}

bool MemoryIo::drive() {
  std::lock_guard alone(driving_);
  bool moved = false;
  while (start_one()) moved = true;
  std::unique_lock lock(mutex_);
  if (events_.empty()) return moved;
  std::pop_heap(events_.begin(), events_.end(), std::greater<>());
  const Event event = events_.back();
  events_.pop_back();
  now_ns_ = std::max(now_ns_, event.at);
  --files_[static_cast<size_t>(event.request->file)].serving;
  const Result result = operate(*event.request);
  lock.unlock();
  event.request->complete(*event.request, result);
  return true;
}

std::string MemoryIo::peek(int file, uint64_t offset, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto& have = files_.at(static_cast<size_t>(file)).bytes;
  if (offset > have.size() || bytes > have.size() - offset)
    throw std::invalid_argument("the range ends after the end of the file");
  return {reinterpret_cast<const char*>(have.data() + offset), bytes};
}

void MemoryIo::poke(int file, uint64_t offset, const std::string& bytes) {
  std::lock_guard lock(mutex_);
  auto& have = files_.at(static_cast<size_t>(file)).bytes;
  if (offset > have.size() || bytes.size() > have.size() - offset)
    throw std::invalid_argument("the range ends after the end of the file");
  std::memcpy(have.data() + offset, bytes.data(), bytes.size());
}
}  // namespace teraio
