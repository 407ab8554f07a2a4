// The failure of a transfer, as numbers. Only a caller that raises an error makes a message from the numbers.
#pragma once
#include <cstdint>
#include <string>

#include "io/io.h"
#include "transfer/blocks.h"

namespace teraio {
enum class Cause : uint8_t { none, full, write, read, corrupt, timeout, hung, copy };

struct Failure {
  Cause cause = Cause::none;
  Mismatch mismatch = Mismatch::none;
  Op op = Op::nothing;
  int error = 0;
  int file = 0;
  int retries = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t tag = 0;
  uint64_t generation = 0;
  uint64_t found = 0;  // the value in the table or computed from the bytes; `expected` is the required value
  uint64_t expected = 0;
  uint64_t deadline_ns = 0;
};

// Returns the error message: tensor, place, numbers and remedy. `name` is the name of the tensor, or empty.
std::string describe(const Failure& failure, const std::string& path, const std::string& name);
const char* cause_name(Cause cause);
const char* mismatch_name(Mismatch mismatch);
}  // namespace teraio
