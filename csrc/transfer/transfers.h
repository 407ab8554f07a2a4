// The transfer engine. It moves tensors between memory and files in the background, in chunks, through slabs.
//
//   submit --> queued chunks --> flight (slab + lane) --> operation --> slab and lane free --> ticket done
//               per file, direction      copy + digest        retry, continue,
//               and priority             before a write       verify + copy after a read
//
// A piece is a range of a file. A chunk is part of one piece and fits into one slab. The cut into chunks
// depends only on the pieces, so a write and a read of the same pieces have the same chunks. A transfer that
// is larger than all slabs together reuses the slabs. Each file has io.depth() lanes: each chunk in flight
// occupies a lane and a slab. All other chunks wait in the queues of this engine. An urgent transfer (a
// demand) overtakes them, so it waits only for operations in flight.
//
// [Note: full queue] submit() never blocks. It throws QueueFull if `max_transfers` tickets are unfinished.
// The default is 16384, and a step moves only hundreds of tensors. If submit() blocked instead, nobody would
// notice a caller that forgets to wait. An I/O engine without threads would even hang.
//
// [Note: abandoned] When the request of a flight is overdue, the engine abandons the flight. The flight's
// slab is never used again, and its lane is free only if the request completes late. After the abandonment,
// the flight does not touch the tensor. The engine abandons no flight during a copy, because a copy from
// memory to memory always ends. So when a ticket is finished, no thread uses the tensor any more.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "io/io.h"
#include "transfer/blocks.h"
#include "transfer/copier.h"
#include "transfer/failure.h"
#include "transfer/slabs.h"

namespace teraio {
struct Piece {
  int file;
  uint64_t offset;
  uint64_t bytes;
};

struct Order {
  Op op;
  uint64_t address;
  uint64_t bytes;
  const std::vector<Piece>* pieces;
  uint64_t tag;
  uint64_t generation;
  bool demand;
  uint64_t event;        // an event that the device copier waits for; 0: none
  uint64_t deadline_ns;  // time limit of each operation of the drive; 0: the engine's default
};

struct Settings {
  int max_transfers = 16384;
  bool checksums = true;
  uint64_t deadline_ns = 60'000'000'000;
  int write_retries = 1;
  int read_retries = 2;
};

struct Stats {
  uint64_t bytes_written = 0, bytes_read = 0, writes = 0, reads = 0;
  uint64_t write_busy_ns = 0, read_busy_ns = 0;  // time with at least one write, or one read, in flight
  uint64_t copy_out_ns = 0, copy_in_ns = 0;      // time of copies and digests, summed over threads
  uint64_t retries = 0, continued = 0, failed = 0, timeouts = 0, late = 0, cancelled = 0, unobserved = 0;
  uint64_t queued_max = 0, flights_max = 0, submitted = 0, finished = 0;
};

struct Times {
  uint64_t submitted_ns = 0, started_ns = 0, finished_ns = 0;
};

enum class State : uint8_t { free, active, done, failed, cancelled };

struct QueueFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Transfers : public std::enable_shared_from_this<Transfers> {
 public:
  Transfers(std::shared_ptr<Io> io, std::shared_ptr<Slabs> slabs, std::shared_ptr<Copier> copier,
            Settings settings);

  uint64_t submit(const Order& order);
  State state(uint64_t ticket);                    // also abandons the flights of overdue requests
  State wait(uint64_t ticket, uint64_t slice_ns);  // waits at most `slice_ns`, and may return `active`
  Failure failure(uint64_t ticket);
  Times times(uint64_t ticket);
  bool promote(uint64_t ticket);  // makes a prefetch urgent; false: no chunk was queued as prefetch
  bool cancel(uint64_t ticket);   // true: no chunk had started
  void release(uint64_t ticket);  // the caller drops the ticket; an unfinished transfer still runs
  void forget(const std::vector<Piece>& pieces);  // later reads of these extents fail
  std::vector<Piece> lost();                      // extents that a late write may overwrite; never reuse them
  Stats stats();
  int unfinished();
  uint64_t blocks();
  bool close(uint64_t within_ns);  // false: an operation hangs; it cannot touch a tensor
  bool forked() const;
  const std::shared_ptr<Io>& io() const { return io_; }
  const std::shared_ptr<Slabs>& slabs() const { return slabs_; }

 private:
  struct Chunk {
    int file;
    int next;  // the following chunk of this transfer in the same file, or -1
    uint64_t offset, bytes, at;
  };
  struct Cursor {  // a transfer's next chunk in one file, and its neighbours in the file's queue
    int chunk = -1, before = -1, after = -1;
    bool queued = false;
  };
  struct Transfer {
    uint32_t serial = 1;
    State state = State::free;
    Op op = Op::nothing;
    bool demand = false, detached = false, cancelled = false;
    uint64_t address = 0, tag = 0, generation = 0, event = 0, deadline_ns = 0;
    int unissued = 0, flying = 0, started = 0;
    std::vector<Chunk> chunks;
    std::vector<Cursor> cursors;
    Failure failure;
    Times times;
  };
  enum class Stage : uint8_t { idle, issued, copying, running };
  struct Flight : Request {
    Transfers* owner = nullptr;
    int slab = 0, transfer = -1, chunk = -1, retries = 0;
    Stage stage = Stage::idle;
    bool abandoned = false, filled = false, checked = false;
    uint64_t moved = 0, issued_ns = 0, digest = 0;
  };
  struct Queue {
    int first = -1, last = -1;
  };
  struct File {
    Queue queues[2][2];  // indices: [demand][write]
    int flying = 0, lost = 0;
    bool write_turn = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Functions in transfers.cpp: tickets. close() is in closing.cpp.
  Transfer& find(uint64_t ticket);
  int fresh();
  void recycle(int index);
  void cut(Transfer& t, const Order& order);
  void check_order(const Order& order) const;
  // Functions in queues.cpp: queued chunks, and the choice of the next chunk.
  Queue& queue(const Transfer& t, int file);
  void enqueue(int index, int file);
  void unqueue(int index, int file);
  void drop_queued(int index);
  void pump();
  bool issue_one(bool demand);
  void issue(int index, int file);
  // Functions in flights.cpp: chunks in flight.
  static bool before(Request& request);
  static void complete(Request& request, Result result);
  bool fill(Flight& f);
  void land(Flight& f, Result result);
  bool empty_slab(Flight& f, Lock& lock);
  bool send_again(Flight& f, Result result, uint64_t wanted);
  void retire(Flight& f);
  void aim(Flight& f);
  Failure failure_of(const Flight& f, Cause cause, int error) const;
  void fail(int index, const Failure& failure);
  void settle(int index);
  uint64_t expire(uint64_t now);
  void abandon(Flight& f);
  void fail_stuck();
  void busy(Op op, int change);

  std::shared_ptr<Io> io_;
  std::shared_ptr<Slabs> slabs_;
  std::shared_ptr<Copier> copier_;
  const Settings settings_;
  const uint64_t born_;
  std::mutex mutex_;
  std::condition_variable settled_;
  Blocks blocks_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
  std::vector<int> free_;
  std::vector<Flight> flights_;  // one per slab
  std::vector<File> files_;
  std::vector<Piece> lost_;
  Stats stats_;
  int unfinished_ = 0, queued_ = 0, next_file_ = 0, lost_flights_ = 0;
  int in_air_[2] = {0, 0};  // number of flights: index 0 reads, index 1 writes
  uint64_t air_since_[2] = {0, 0};
  bool closed_ = false;
};
}  // namespace teraio
