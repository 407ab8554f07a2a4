// The transfer engine. It moves tensors between memory and files in the background, in chunks, through slabs.
//
//   submit --> queued chunks --> flight (slab + lane) --> operation --> slab and lane free --> ticket done
//               per file, direction      copy + digest        retry, continue,
//               and priority             before a write       verify + copy after a read
//
// A chunk is part of one piece and fits into one slab. The cut into chunks depends only on the pieces, so a
// write and a read of the same pieces have the same chunks. A transfer larger than all slabs streams through
// the slabs. At most io.depth() chunks of each file are in flight, and each chunk in flight has its own slab.
// All other chunks are queued in this engine. A demand therefore waits for at most the operations that the
// drive already has.
//
// [Note: full queue] submit() never blocks. It throws QueueFull if `max_transfers` tickets are unfinished.
// The default is 16384, and a step moves only hundreds of tensors. If submit() blocked instead, a caller that
// forgets to wait would remain unnoticed. A driven engine would even hang.
//
// [Note: abandoned] When the request of a flight is overdue, the engine abandons the flight. The flight's
// slab is quarantined, and its lane is not free until the request completes late. From then on the flight
// must not touch the tensor. If a copy has begun, the engine waits for its end, because a copy from memory to
// memory always ends. A finished ticket therefore means that no thread uses the tensor any more.
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
  uint64_t deadline_ns;  // time limit per operation, from when the drive gets it; 0: the engine's default
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
  uint64_t write_busy_ns = 0, read_busy_ns = 0;  // time with at least one operation in that direction
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
  State state(uint64_t ticket);                    // also abandons all overdue requests
  State wait(uint64_t ticket, uint64_t slice_ns);  // returns `active` if the slice ends first
  Failure failure(uint64_t ticket);
  Times times(uint64_t ticket);
  bool promote(uint64_t ticket);  // turns a prefetch into a demand; false: no chunk was queued as prefetch
  bool cancel(uint64_t ticket);   // true: no chunk of the transfer had started
  void release(uint64_t ticket);  // an unfinished transfer still runs, and its record is recycled at its end
  void forget(const std::vector<Piece>& pieces);  // marks the contents of these extents as invalid
  std::vector<Piece> lost();                      // extents that a late write may still hit; never reuse them
  Stats stats();
  int unfinished();
  uint64_t blocks();
  bool close(uint64_t within_ns);  // false: an operation hangs; its flight was abandoned and can do no harm
  bool forked() const;
  const std::shared_ptr<Io>& io() const { return io_; }
  const std::shared_ptr<Slabs>& slabs() const { return slabs_; }

 private:
  struct Chunk {
    int file;
    int next;  // the following chunk of this transfer in the same file, or -1
    uint64_t offset, bytes, at;
  };
  struct Cursor {  // position of a transfer in the queue of one file
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

  // transfers.cpp: tickets. closing.cpp: close()
  Transfer& find(uint64_t ticket);
  int fresh();
  void recycle(int index);
  void cut(Transfer& t, const Order& order);
  void check_order(const Order& order) const;
  // queues.cpp: queued chunks, and the choice of the next chunk
  Queue& queue(const Transfer& t, int file);
  void enqueue(int index, int file);
  void unqueue(int index, int file);
  void drop_queued(int index);
  void pump();
  bool issue_one(bool demand);
  void issue(int index, int file);
  // flights.cpp: chunks in flight
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
  int in_air_[2] = {0, 0};  // flights by direction: index 0 reads, index 1 writes
  uint64_t air_since_[2] = {0, 0};
  bool closed_ = false;
};
}  // namespace teraio
