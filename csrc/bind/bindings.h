// The parts of the Python face: each file that binds something adds itself to the module here.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>

#include "io/io.h"

namespace teraio {
// Python holds engines through this, so that no Python reference is ever dropped on a worker thread.
struct PyIo {
  std::shared_ptr<Io> io;
};

void bind_io(nanobind::module_& m);
void bind_transfers(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_spare(nanobind::module_& m);
[[noreturn]] void raise_failure(const struct Failure& failure, const std::string& path,
                                const std::string& name);
}  // namespace teraio
