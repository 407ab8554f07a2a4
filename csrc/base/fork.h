// Which side of a fork we are on. Worker threads do not survive a fork and their mutexes may be copied
// locked, so an engine made before the fork must not be touched in the child: every entry asks here before it
// takes any lock.
#pragma once
#include <cstdint>

namespace teraio {
// The number of forks between the first process that loaded this module and this one.
uint64_t fork_count();
}  // namespace teraio
