// The end of the process, for functions that the stand-in does not simulate.
#pragma once

namespace standin {

// Prints the message after "the stand-in: ", and aborts the process.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace standin

// Exports a function, because torch or Triton looks it up by its name.
#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))
