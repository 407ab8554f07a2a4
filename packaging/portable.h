// This file is included before each source that is compiled for a wheel. The library then
// runs with older versions of glibc and libstdc++ than the versions of the building machine.
#pragma once
#include <bits/c++config.h>

// glibc 2.30 added `pthread_cond_clockwait`. Without it, waits with a time limit use the system's clock.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK

// GCC 11 added functions to string streams. The library gets its own copy of these templates.
#include <istream>
#include <ostream>
#pragma push_macro("_GLIBCXX_EXTERN_TEMPLATE")
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>
#pragma pop_macro("_GLIBCXX_EXTERN_TEMPLATE")

// GCC 12 gave this symbol a second version. Each older libstdc++ has the first version.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
