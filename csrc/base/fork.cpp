// A counter of forks. A function registered with pthread_atfork increments the counter in each forked child.
// Reading the counter takes one atomic load. Comparing process ids instead would take 0.1 us per call of
// getpid().
#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace teraio {
namespace {
std::atomic<uint64_t> forks{0};
void in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
}
const int registered = pthread_atfork(nullptr, nullptr, in_child);
}  // namespace

uint64_t fork_count() {
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}
}  // namespace teraio
