// The seam between transfers and disks. Above it: slabs, chunks, priorities, retries, deadlines, checksums.
// Below it: one operation on one file. Three engines stand behind it: ThreadIo (threads and pread/pwrite),
// MemoryIo (deterministic, in memory, virtual time) and FaultIo (a shim that makes chosen operations go
// wrong).
//
//   submit(request)            never blocks, never calls back from inside
//     request.before(request)  on the engine's thread, once per submit: fills the slab (an eviction);
//                              false: skip the operation and complete with ECANCELED
//     the operation            on [offset, offset + bytes) of the file
//     request.complete(...)    on the engine's thread, once: empties the slab (a fetch), hands it back
//
// A request is the caller's memory (one per slab, made once), so that submitting allocates nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace teraio {
enum class Op : uint8_t { read, write, nothing };

struct Result {
  int error = 0;  // an errno, or 0
  uint64_t bytes =
      0;  // done before the error or the end; fewer than asked without an error is a short operation
};

struct Request {
  Op op = Op::nothing;
  bool demand = false;  // overtakes requests that are not
  int file = 0;
  uint64_t offset = 0;
  std::byte* buffer = nullptr;
  uint64_t bytes = 0;
  uint64_t delay_ns = 0;  // wait this long before the operation (faults)
  bool (*before)(Request&) = nullptr;
  void (*complete)(Request&, Result) = nullptr;
  Request* next = nullptr;  // the engine's own list
};

class Io {
 public:
  virtual ~Io() = default;
  bool claim() { return !std::exchange(claimed_, true); }  // false: a transfer engine has it already
  virtual int files() const = 0;
  virtual int depth() const = 0;  // operations worth having in flight per file
  virtual std::string path(int file) const = 0;
  virtual void submit(Request& request) = 0;
  // Joins what runs; true when nothing is left that could still touch a slab.
  virtual bool close(uint64_t within_ns) = 0;
  virtual uint64_t now_ns() const = 0;
  // A driven engine has no threads: whoever waits calls drive() for the next completion; false: nothing is
  // under way.
  virtual bool driven() const { return false; }
  virtual bool drive() { return false; }
  virtual void advance_to(uint64_t) {}
  // Files that refused O_DIRECT at their first operation and go through the page cache since.
  virtual int buffered_files() const { return 0; }

 private:
  bool claimed_ = false;
};

// First in, first out, through Request::next.
class RequestList {
 public:
  void push(Request& request) {
    request.next = nullptr;
    (last_ == nullptr ? first_ : last_->next) = &request;
    last_ = &request;
  }
  Request* pop() {
    Request* request = first_;
    if (request == nullptr) return nullptr;
    first_ = request->next;
    if (first_ == nullptr) last_ = nullptr;
    return request;
  }
  bool empty() const { return first_ == nullptr; }

 private:
  Request* first_ = nullptr;
  Request* last_ = nullptr;
};

uint64_t monotonic_ns();
}  // namespace teraio
