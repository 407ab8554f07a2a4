// The worker threads and their queues. The file also has the loop that continues an operation after EINTR, a
// short count, or a refusal of O_DIRECT.
#include "io/thread_io.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/fork.h"

namespace teraio {
uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}

namespace {
constexpr uint64_t kBlock = 4096;

struct File {
  int fd = -1;
  std::string path;
  std::atomic<bool> buffered{false};
  std::mutex mutex;
  std::condition_variable ready;
  RequestList queue[2];  // [0] prefetch, [1] demand
  bool stop = false;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

// Turns O_DIRECT off for a file. Some file systems accept the flag at open and refuse it at the first
// operation. Returns true if the flag is off now, so that the caller can repeat the operation.
bool give_up_direct(File& file) {
  const int flags = fcntl(file.fd, F_GETFL);
  if (flags < 0) return false;
  if ((flags & O_DIRECT) != 0 && fcntl(file.fd, F_SETFL, flags & ~O_DIRECT) != 0) return false;
  file.buffered = true;
  return true;
}

// Removes the pages of an operation from the page cache, because the budget does not count page cache.
// Returns 0, or the errno of a write that fails only now.
int drop_pages(File& file, const Request& request) {
  const auto offset = static_cast<off_t>(request.offset);
  const auto bytes = static_cast<off_t>(request.bytes);
  if (request.op == Op::write) {
    const unsigned all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (sync_file_range(file.fd, offset, bytes, all) != 0 &&
        (errno == EIO || errno == ENOSPC || errno == EDQUOT))
      return errno;
  }
  posix_fadvise(file.fd, offset, bytes, POSIX_FADV_DONTNEED);
  return 0;
}

// Reads or writes the whole range, with as many system calls as needed. If a call ends within a block, the
// next call starts at the beginning of that block, because O_DIRECT refuses other offsets. The operation ends
// at the end of the file, or after two calls in a row that complete no whole block.
Result operate(File& file, const Request& request) {
  uint64_t done = 0;
  int stuck = 0;
  bool refused = false;
  while (done < request.bytes) {
    std::byte* at = request.buffer + done;
    const uint64_t left = request.bytes - done;
    const auto offset = static_cast<off_t>(request.offset + done);
    const ssize_t n =
        request.op == Op::read ? pread(file.fd, at, left, offset) : pwrite(file.fd, at, left, offset);
    if (n < 0) {
      if (errno == EINTR) continue;
      const int error = errno;
      if (error == EINVAL && !refused && give_up_direct(file)) {
        refused = true;
        continue;
      }
      return {error, done};
    }
    if (static_cast<uint64_t>(n) == left) {
      done = request.bytes;
      break;
    }
    const uint64_t forward = (done + static_cast<uint64_t>(n)) / kBlock * kBlock;
    stuck = forward == done ? stuck + 1 : 0;
    if (n == 0 || stuck == 2) return {0, done};
    done = forward;
  }
  const int late = file.buffered ? drop_pages(file, request) : 0;
  return late != 0 ? Result{late, 0} : Result{0, done};
}

void sleep_ns(uint64_t ns) {
  timespec t{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}
}  // namespace

struct ThreadIo::State {
  std::vector<std::unique_ptr<File>> files;
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable ended;
  int running = 0;
  bool closed = false;
};

namespace {
Request* next_request(File& file) {
  std::unique_lock lock(file.mutex);
  file.ready.wait(lock, [&] { return file.stop || !file.queue[0].empty() || !file.queue[1].empty(); });
  Request* request = file.queue[1].pop();
  if (request == nullptr) request = file.queue[0].pop();
  // Wake the next worker. submit() wakes only the first.
  if (!file.queue[0].empty() || !file.queue[1].empty()) file.ready.notify_one();
  return request;
}

void work(std::shared_ptr<ThreadIo::State> state, File& file) {
  while (Request* request = next_request(file)) {
    if (request->before != nullptr && !request->before(*request)) {
      request->complete(*request, {ECANCELED, 0});
      continue;
    }
    if (request->delay_ns > 0) sleep_ns(request->delay_ns);
    const Result result = request->op == Op::nothing ? Result{0, request->bytes} : operate(file, *request);
    request->complete(*request, result);
  }
  std::lock_guard lock(state->mutex);
  --state->running;
  state->ended.notify_all();
}
}  // namespace

ThreadIo::ThreadIo(const std::vector<std::pair<int, std::string>>& files, int threads)
    : threads_(threads), born_(fork_count()), state_(std::make_shared<State>()) {
  if (files.empty() || files.size() > 64) throw std::invalid_argument("give between 1 and 64 files");
  if (threads < 1 || threads > 64) throw std::invalid_argument("threads per file must be between 1 and 64");
  for (const auto& [fd, path] : files) {
    auto file = std::make_unique<File>();
    file->path = path;
    file->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (file->fd < 0)
      throw std::system_error(errno, std::generic_category(), "cannot duplicate the fd of " + path);
    file->buffered = (fcntl(file->fd, F_GETFL) & O_DIRECT) == 0;
    state_->files.push_back(std::move(file));
  }
  // The workers block all signals, so the interpreter's thread gets all signals. With SIGXFSZ blocked, a
  // write above the file size limit fails with EFBIG.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    for (auto& file : state_->files)
      for (int i = 0; i < threads; ++i) {
        std::lock_guard lock(state_->mutex);
        state_->threads.emplace_back(work, state_, std::ref(*file));
        ++state_->running;
        const std::string name = "teraio-io" + std::to_string(state_->threads.size() - 1);
        pthread_setname_np(state_->threads.back().native_handle(), name.c_str());
      }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    close(5'000'000'000);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

ThreadIo::~ThreadIo() {
  if (born_ == fork_count()) {
    close(5'000'000'000);
    return;
  }
  new std::shared_ptr<State>(
      state_);  // in a forked child: leak the state, because its threads and locks belong to the parent
}

int ThreadIo::files() const {
  return static_cast<int>(state_->files.size());
}
std::string ThreadIo::path(int file) const {
  return state_->files.at(static_cast<size_t>(file))->path;
}

int ThreadIo::buffered_files() const {
  int count = 0;
  for (const auto& file : state_->files) count += file->buffered ? 1 : 0;
  return count;
}

void ThreadIo::submit(Request& request) {
  File& file = *state_->files.at(static_cast<size_t>(request.file));
  bool first = false;
  {
    std::lock_guard lock(file.mutex);
    CHECK(!file.stop);
    first = file.queue[0].empty() && file.queue[1].empty();
    file.queue[request.demand ? 1 : 0].push(request);
  }
  // A submit wakes one worker, and each worker wakes the next. If a submit woke eight workers together, they
  // would preempt the submitting thread for 1 ms (measured).
  if (first) file.ready.notify_one();
}

bool ThreadIo::close(uint64_t within_ns) {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->closed) return state_->running == 0;
    state_->closed = true;
  }
  for (auto& file : state_->files) {
    std::lock_guard lock(file->mutex);
    file->stop = true;
    file->ready.notify_all();
  }
  std::unique_lock lock(state_->mutex);
  const bool all =
      state_->ended.wait_for(lock, std::chrono::nanoseconds(within_ns), [&] { return state_->running == 0; });
  lock.unlock();
  // A thread that hangs in a system call cannot be joined. The thread keeps the state alive. It touches only
  // a slab in quarantine, which no other transfer uses.
  for (auto& thread : state_->threads) all ? thread.join() : thread.detach();
  if (all)
    for (auto& file : state_->files) ::close(std::exchange(file->fd, -1));
  return all;
}
}  // namespace teraio
