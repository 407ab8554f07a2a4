// The parts of the Python module: each bind_ function adds the bindings of one source file.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>

#include "io/io.h"

namespace teraio {
// The base class of all I/O engines in Python. Worker threads hold the shared pointer and no Python
// reference. So no worker thread releases a Python reference.
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
