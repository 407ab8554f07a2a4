// Assertions that are also active in release builds. CHECK finds bugs of teraio. Errors of disks and of user
// code are reported by other means. CHECK throws, so a wrong argument from Python does not end the process.
// On a worker thread the exception ends the process. The engine's state is then wrong, and bytes may be in
// the wrong place.
#pragma once
#include <stdexcept>
#include <string>

#define TERAIO_TEXT_(x) #x
#define TERAIO_TEXT(x) TERAIO_TEXT_(x)
#define CHECK(condition)                                                                                    \
  do {                                                                                                      \
    if (!(condition)) [[unlikely]]                                                                          \
      throw std::logic_error(                                                                               \
          std::string("teraio: broken invariant `" #condition "` at " __FILE__ ":" TERAIO_TEXT(__LINE__))); \
  } while (0)
