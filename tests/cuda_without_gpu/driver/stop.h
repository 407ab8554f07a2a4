// The end of a process that calls a function which the stand-in does not model.
#pragma once

namespace standin {

// Prints "the stand-in: <what>" and aborts.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace standin

// Exports a function that torch or Triton finds by its name.
#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))
