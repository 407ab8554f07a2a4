// The interface between transfers and drives. The transfer engine is responsible for slabs, chunks,
// priorities, retries, deadlines and checksums. For each request, an I/O engine runs only one operation on
// one file. There are three I/O engines. (1) ThreadIo uses threads with pread and pwrite. (2) MemoryIo is
// deterministic, with files in memory and virtual time. (3) FaultIo wraps another I/O engine and injects
// faults.
//
//   submit(request)            never blocks, and calls no callback
//     request.before(request)  fills the slab of an eviction; if `before` returns false, the operation is
//                              skipped and completes with ECANCELED
//     the operation            reads or writes [offset, offset + bytes) of the file
//     request.complete(...)    copies the bytes of a fetch from the slab to the tensor, and returns the slab
//
// Each submit leads to one call of `before` and one call of `complete`. Both run on the I/O engine's thread.
//
// The caller owns the memory of the requests: one request per slab, made at the start. A submit thus
// allocates nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace teraio {
enum class Op : uint8_t { read, write, nothing };

struct Result {
  int error = 0;  // an errno, or 0
  // Number of bytes done before an error or before the end of the file. A short count is a result without an
  // error, with fewer bytes than requested.
  uint64_t bytes = 0;
};

struct Request {
  Op op = Op::nothing;
  bool demand = false;  // true: served before all prefetches
  int file = 0;
  uint64_t offset = 0;
  std::byte* buffer = nullptr;
  uint64_t bytes = 0;
  uint64_t delay_ns = 0;  // time to wait before the operation; only FaultIo sets it
  bool (*before)(Request&) = nullptr;
  void (*complete)(Request&, Result) = nullptr;
  Request* next = nullptr;  // next request in the I/O engine's queue
};

class Io {
 public:
  virtual ~Io() = default;
  // Returns false if another transfer engine uses this object.
  bool claim() { return !std::exchange(claimed_, true); }
  virtual int files() const = 0;
  // Returns the number of operations per file that run at the same time.
  virtual int depth() const = 0;
  virtual std::string path(int file) const = 0;
  virtual void submit(Request& request) = 0;
  // Waits for running operations and joins the threads. Returns true if no thread can touch a slab any more.
  virtual bool close(uint64_t within_ns) = 0;
  virtual uint64_t now_ns() const = 0;
  // A driven engine has no threads. A waiting thread calls drive(), which runs the engine up to the next
  // completion. drive() returns false if there is no operation.
  virtual bool driven() const { return false; }
  virtual bool drive() { return false; }
  virtual void advance_to(uint64_t) {}
  // Returns the number of files whose file system refused O_DIRECT at the first operation. These files use
  // the page cache.
  virtual int buffered_files() const { return 0; }

 private:
  bool claimed_ = false;
};

// A first-in, first-out list, linked by Request::next.
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
