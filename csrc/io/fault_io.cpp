// A shadow is a separate request with the fault. The inner engine runs the shadow in place of the caller's
// request.
#include "io/fault_io.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace teraio {
struct FaultIo::Shadow : Request {
  FaultIo* owner = nullptr;
  Request* original = nullptr;
  Rule rule;
  uint64_t number = 0;  // number of the operation among all reads or all writes, counted from 1
};

void FaultIo::add(const Rule& rule) {
  std::lock_guard lock(mutex_);
  rules_.push_back(rule);
  remembering_ = remembering_ || rule.fault == Fault::stale;
}

void FaultIo::clear() {
  std::lock_guard lock(mutex_);
  rules_.clear();
  remembering_ = false;
  versions_.clear();
}

uint64_t FaultIo::hits() const {
  std::lock_guard lock(mutex_);
  return hits_;
}

uint64_t FaultIo::operations(Op op) const {
  std::lock_guard lock(mutex_);
  return op == Op::nothing ? operations_[0] + operations_[1] : operations_[op == Op::write ? 1 : 0];
}

int FaultIo::dropped() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(dropped_.size() + stalled_.size());
}

// Returns the first rule that fires for this request. Every rule counts the operations that it matches.
Rule FaultIo::match(const Request& request, uint64_t* number) {
  std::lock_guard lock(mutex_);
  *number = ++operations_[request.op == Op::write ? 1 : 0];
  Rule found;
  for (Rule& rule : rules_) {
    if (rule.op != Op::nothing && rule.op != request.op) continue;
    if (rule.file >= 0 && rule.file != request.file) continue;
    ++rule.seen;
    const bool fires = rule.seen == rule.nth || (rule.sticky && rule.seen > rule.nth);
    if (!fires || found.fault != Fault::none) continue;
    ++rule.hits;
    ++hits_;
    found = rule;
  }
  return found;
}

void FaultIo::submit(Request& request) {
  uint64_t number = 0;
  const Rule rule = match(request, &number);
  if (rule.fault == Fault::none && !remembering_) {
    inner_->submit(request);
    return;
  }
  if (rule.fault == Fault::stall) {
    std::lock_guard lock(mutex_);
    stalled_.push_back(&request);
    return;
  }
  auto* shadow = new Shadow;
  static_cast<Request&>(*shadow) = request;
  shadow->owner = this;
  shadow->original = &request;
  shadow->rule = rule;
  shadow->number = number;
  shadow->Request::before = before;
  shadow->Request::complete = complete;
  alter(*shadow, request);
  inner_->submit(*shadow);
}

// Changes the shadow, a copy of the request, by the rule's fault.
void FaultIo::alter(Shadow& shadow, const Request& request) {
  switch (shadow.rule.fault) {
    case Fault::stall:  // cannot occur, because submit() keeps stalled requests
    case Fault::error:
    case Fault::drop: shadow.op = Op::nothing; break;
    case Fault::stale:
      if (request.op == Op::write) shadow.op = Op::nothing;
      break;
    case Fault::shorten: shadow.bytes = request.bytes / 2 / 4096 * 4096; break;
    case Fault::delay: shadow.delay_ns += shadow.rule.delay_ns; break;
    case Fault::neighbour:
      shadow.offset =
          request.offset >= request.bytes ? request.offset - request.bytes : request.offset + request.bytes;
      break;
    case Fault::flip:
    case Fault::kill:
    case Fault::killed:
    case Fault::none: break;
  }
  if (shadow.op != Op::nothing && shadow.bytes == 0) shadow.op = Op::nothing;
}

namespace {
void flip(const Request& request, int64_t bit, uint64_t number) {
  const uint64_t bits = request.bytes * 8;
  const uint64_t which = (bit >= 0 ? static_cast<uint64_t>(bit) : number * 0x9E3779B97F4A7C15) % bits;
  request.buffer[which / 8] ^= static_cast<std::byte>(1 << which % 8);
}
}  // namespace

bool FaultIo::before(Request& request) {
  auto& shadow = static_cast<Shadow&>(request);
  Request& original = *shadow.original;
  if (original.before != nullptr && !original.before(original)) {
    shadow.rule = {};  // the caller cancelled the operation
    return false;
  }
  if (shadow.rule.fault == Fault::kill) ::kill(getpid(), SIGKILL);
  if (original.op == Op::write && shadow.rule.fault == Fault::flip)
    flip(original, shadow.rule.bit, shadow.number);
  if (original.op == Op::write && shadow.owner->remembering_) shadow.owner->remember(original);
  return true;
}

void FaultIo::complete(Request& request, Result result) {
  const std::unique_ptr<Shadow> shadow(&static_cast<Shadow&>(request));
  FaultIo& owner = *shadow->owner;
  Request& original = *shadow->original;
  switch (shadow->rule.fault) {
    case Fault::error: result = {shadow->rule.error, 0}; break;
    case Fault::shorten:
      if (result.error == 0 && shadow->op == Op::nothing) result = {0, 0};
      break;
    case Fault::drop: {
      std::lock_guard lock(owner.mutex_);
      owner.dropped_.push_back(&original);
      return;
    }
    case Fault::flip:
      if (original.op == Op::read) flip(original, shadow->rule.bit, shadow->number);
      break;
    case Fault::stale:
      if (original.op == Op::read) owner.recall(original);
      break;
    case Fault::neighbour:
      if (result.error == 0 && original.op == Op::read && result.bytes < original.bytes) {
        std::memset(original.buffer + result.bytes, 0, original.bytes - result.bytes);
        result.bytes = original.bytes;  // beyond the end of the file, a neighbour reads as zeros
      }
      break;
    case Fault::killed: ::kill(getpid(), SIGKILL); break;
    case Fault::stall:
    case Fault::kill:
    case Fault::delay:
    case Fault::none: break;
  }
  original.complete(original, result);
}

void FaultIo::remember(const Request& request) {
  std::lock_guard lock(mutex_);
  Versions& versions = versions_[{request.file, request.offset}];
  versions.previous = std::move(versions.last);
  versions.last.assign(request.buffer, request.buffer + request.bytes);
}

void FaultIo::recall(const Request& request) {
  std::lock_guard lock(mutex_);
  const auto& previous = versions_[{request.file, request.offset}].previous;
  const uint64_t there = std::min<uint64_t>(previous.size(), request.bytes);
  std::copy_n(previous.data(), there, request.buffer);
  std::memset(request.buffer + there, 0, request.bytes - there);
}

int FaultIo::deliver() {
  std::vector<Request*> late, unbegun;
  {
    std::lock_guard lock(mutex_);
    late.swap(dropped_);
    unbegun.swap(stalled_);
  }
  for (Request* request : late) {
    auto* shadow = new Shadow;
    static_cast<Request&>(*shadow) = *request;
    shadow->owner = this;
    shadow->original = request;
    shadow->Request::before = nullptr;  // `before` already ran, so only the operation runs now
    shadow->Request::complete = complete;
    inner_->submit(*shadow);
  }
  for (Request* request : unbegun) inner_->submit(*request);
  return static_cast<int>(late.size() + unbegun.size());
}

bool FaultIo::close(uint64_t within_ns) {
  const bool joined = inner_->close(within_ns);
  std::lock_guard lock(mutex_);
  stalled_.clear();
  dropped_.clear();  // nothing completes the dropped requests any more, so their owner may free them
  return joined;
}
}  // namespace teraio
