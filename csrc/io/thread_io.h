// The default engine: `threads` workers per file, each doing one operation at a time with pread or pwrite. As
// fast as io_uring at the block sizes that matter (4 to 16 MiB), allowed in every container, reached by every
// fault tool.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/io.h"

namespace teraio {
class ThreadIo final : public Io {
 public:
  // Takes (fd, path) pairs; each fd is duplicated, so the caller may close its own. The path is for messages
  // only.
  ThreadIo(const std::vector<std::pair<int, std::string>>& files, int threads);
  ~ThreadIo() override;
  int files() const override;
  int depth() const override { return threads_; }
  std::string path(int file) const override;
  void submit(Request& request) override;
  bool close(uint64_t within_ns) override;
  uint64_t now_ns() const override { return monotonic_ns(); }
  int buffered_files() const override;

  struct State;  // shared with the workers: it outlives this object if a worker hangs in the kernel

 private:
  int threads_;
  uint64_t born_;
  std::shared_ptr<State> state_;
};
}  // namespace teraio
