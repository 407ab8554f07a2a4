// How the stand-in ends a process that asks for what it does not model.
#pragma once

namespace standin {

// Prints "the stand-in: <what>" and aborts.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace standin

// A function that torch or Triton finds by its name.
#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))
