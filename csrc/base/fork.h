// Detection of forks. Worker threads do not survive a fork, and their mutexes may be copied while locked. An
// engine made before the fork must therefore not be used in the child. Before a function of the engine takes
// a lock, the function compares the fork count with the count at the engine's construction.
#pragma once
#include <cstdint>

namespace teraio {
// Returns the number of forks between the first process that loaded this module and this process.
uint64_t fork_count();
}  // namespace teraio
