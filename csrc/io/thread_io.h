// The default I/O engine: `threads` worker threads per file, each with one pread or pwrite at a time. At the
// block sizes in use (4 to 16 MiB), ThreadIo is as fast as io_uring. It works in every container, and with
// every tool that injects faults.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/io.h"

namespace teraio {
class ThreadIo final : public Io {
 public:
  // Takes pairs of a file descriptor and a path. The constructor duplicates each descriptor, so the caller
  // may close the original. The path is used only in messages.
  ThreadIo(const std::vector<std::pair<int, std::string>>& files, int threads);
  ~ThreadIo() override;
  int files() const override;
  int depth() const override { return threads_; }
  std::string path(int file) const override;
  void submit(Request& request) override;
  bool close(uint64_t within_ns) override;
  uint64_t now_ns() const override { return monotonic_ns(); }
  int buffered_files() const override;

  struct State;  // shared with the workers; outlives this object if a worker hangs in a system call

 private:
  int threads_;
  uint64_t born_;
  std::shared_ptr<State> state_;
};
}  // namespace teraio
