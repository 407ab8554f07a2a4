// Assertions that stay on. CHECK is for our own bugs; what disks and users do wrong is reported, never
// checked here. It throws, because a wrong argument found at the boundary need not take the process down;
// thrown on a worker thread it ends the process, which is right: the engine's own books are wrong and bytes
// may no longer be where they should.
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
