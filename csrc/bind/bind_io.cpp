// Python bindings of ThreadIo, MemoryIo and FaultIo.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>

#include "bind/bindings.h"
#include "io/fault_io.h"
#include "io/memory_io.h"
#include "io/thread_io.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace teraio {
namespace {
struct PyThreadIo : PyIo {};
struct PyMemoryIo : PyIo {
  MemoryIo& memory() const { return static_cast<MemoryIo&>(*io); }
};
struct PyFaultIo : PyIo {
  FaultIo& fault() const { return static_cast<FaultIo&>(*io); }
};

Op op_named(const std::string& name) {
  if (name == "read") return Op::read;
  if (name == "write") return Op::write;
  if (name == "any") return Op::nothing;
  throw std::invalid_argument("op is '" + name + "'; it must be read, write or any");
}

Rule rule_named(const std::string& kind) {
  Rule rule;
  const auto with = [&](Fault fault, int error = 0) {
    rule.fault = fault;
    rule.error = error;
    return rule;
  };
  if (kind == "EIO") return with(Fault::error, EIO);
  if (kind == "ENOSPC") return with(Fault::error, ENOSPC);
  if (kind == "short") return with(Fault::shorten);
  if (kind == "delay") return with(Fault::delay);
  if (kind == "drop") return with(Fault::drop);
  if (kind == "stall") return with(Fault::stall);
  if (kind == "flip") return with(Fault::flip);
  if (kind == "stale") return with(Fault::stale);
  if (kind == "neighbour") return with(Fault::neighbour);
  if (kind == "kill") return with(Fault::kill);
  if (kind == "killed") return with(Fault::killed);
  throw std::invalid_argument("fault is '" + kind +
                              "'; it must be EIO, ENOSPC, short, delay, drop, stall, flip, stale, "
                              "neighbour, kill or killed");
}

void bind_memory(nb::module_& m) {
  nb::class_<PyMemoryIo, PyIo>(m, "MemoryIo")
      .def(
          "__init__",
          [](PyMemoryIo* self, int files, uint64_t size_bytes, int depth, uint64_t latency_ns,
             double ns_per_byte, double jitter, uint64_t seed) {
            const MemoryShape shape{files, size_bytes, depth, latency_ns, ns_per_byte, jitter, seed};
            new (self) PyMemoryIo{{std::make_shared<MemoryIo>(shape)}};
          },
          "files"_a = 1, "size_bytes"_a = 1 << 26, "depth"_a = 4, "latency_ns"_a = 1000,
          "ns_per_byte"_a = 1.0, "jitter"_a = 0.0, "seed"_a = 0)
      .def(
          "peek",
          [](PyMemoryIo& self, int file, uint64_t offset, uint64_t bytes) {
            const std::string text = self.memory().peek(file, offset, bytes);
            return nb::bytes(text.data(), text.size());
          },
          "file"_a, "offset"_a, "size_bytes"_a)
      .def(
          "poke",
          [](PyMemoryIo& self, int file, uint64_t offset, nb::bytes bytes) {
            self.memory().poke(file, offset, {bytes.c_str(), bytes.size()});
          },
          "file"_a, "offset"_a, "data"_a);
}

void bind_fault(nb::module_& m) {
  nb::class_<PyFaultIo, PyIo>(m, "FaultIo")
      .def(
          "__init__",
          [](PyFaultIo* self, PyIo& inner) { new (self) PyFaultIo{{std::make_shared<FaultIo>(inner.io)}}; },
          "inner"_a)
      .def(
          "add",
          [](PyFaultIo& self, const std::string& kind, const std::string& op, uint64_t nth, bool sticky,
             int file, double delay_s, int64_t bit, int error) {
            if (nth < 1 || !(delay_s >= 0 && delay_s < 1e6))
              throw std::invalid_argument("nth must be at least 1, delay_s between 0 and 1e6");
            Rule rule = rule_named(kind);
            rule.op = op_named(op);
            rule.nth = nth, rule.sticky = sticky, rule.file = file, rule.bit = bit;
            rule.delay_ns = static_cast<uint64_t>(delay_s * 1e9);
            if (error != 0) rule.error = error;
            self.fault().add(rule);
          },
          "kind"_a, "op"_a = "any", "nth"_a = 1, "sticky"_a = false, "file"_a = -1, "delay_s"_a = 0.0,
          "bit"_a = -1, "error"_a = 0)
      .def("clear", [](PyFaultIo& self) { self.fault().clear(); })
      .def("deliver", [](PyFaultIo& self) { return self.fault().deliver(); })
      .def(
          "operations",
          [](PyFaultIo& self, const std::string& op) { return self.fault().operations(op_named(op)); },
          "op"_a = "any")
      .def_prop_ro("hits", [](PyFaultIo& self) { return self.fault().hits(); })
      .def_prop_ro("dropped", [](PyFaultIo& self) { return self.fault().dropped(); });
}
}  // namespace

void bind_io(nb::module_& m) {
  nb::class_<PyIo>(m, "Io")
      .def_prop_ro("files", [](PyIo& self) { return self.io->files(); })
      .def_prop_ro("depth", [](PyIo& self) { return self.io->depth(); })
      .def_prop_ro("buffered_files", [](PyIo& self) { return self.io->buffered_files(); })
      .def_prop_ro("now_ns", [](PyIo& self) { return self.io->now_ns(); });
  nb::class_<PyThreadIo, PyIo>(m, "ThreadIo")
      .def(
          "__init__",
          [](PyThreadIo* self, const std::vector<std::pair<int, std::string>>& files, int threads) {
            auto io = std::make_shared<ThreadIo>(files, threads);
            new (self) PyThreadIo{{std::move(io)}};
          },
          "files"_a, "threads"_a = 4);
  bind_memory(m);
  bind_fault(m);
}
}  // namespace teraio
