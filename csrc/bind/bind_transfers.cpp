// Python bindings of Slabs and Transfers. The bindings convert arguments, release the GIL, and handle signals
// during a wait. At the end of the process, they close all engines.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "bind/bindings.h"
#include "transfer/cuda_copier.h"
#include "transfer/transfers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace teraio {
namespace {
struct PySlabs {
  std::shared_ptr<Slabs> slabs;
};

struct PyCopier {
  std::shared_ptr<Copier> copier;
};
struct PyNoCopier : PyCopier {};
struct PyCudaCopier : PyCopier {};

struct PyTransfers;
std::vector<PyTransfers*> alive;  // guarded by the GIL

struct PyTransfers {
  std::shared_ptr<Transfers> engine;
  explicit PyTransfers(std::shared_ptr<Transfers> e) : engine(std::move(e)) { alive.push_back(this); }
  PyTransfers(const PyTransfers&) = delete;
  PyTransfers& operator=(const PyTransfers&) = delete;
  ~PyTransfers() {
    std::erase(alive, this);
    if (engine->forked()) {
      new std::shared_ptr<Transfers>(engine);  // in a forked child: leak the engine, because threads of the
                                               // parent may hold the engine's locks
      return;
    }
    nb::gil_scoped_release release;
    engine->close(5'000'000'000);
  }
};

using PieceTuple = std::tuple<int, uint64_t, uint64_t>;

uint64_t to_ns(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9)
    throw std::invalid_argument("a time must be between 0 and 1e9 seconds");
  return static_cast<uint64_t>(std::llround(seconds * 1e9));
}

std::vector<Piece> to_pieces(const std::vector<PieceTuple>& tuples) {
  std::vector<Piece> pieces;
  pieces.reserve(tuples.size());
  for (const auto& [file, offset, bytes] : tuples) pieces.push_back({file, offset, bytes});
  return pieces;
}

uint64_t submit(PyTransfers& self, Op op, uint64_t address, uint64_t bytes,
                const std::vector<PieceTuple>& tuples, uint64_t tag, uint64_t generation, bool demand,
                uint64_t event, double deadline_s) {
  const std::vector<Piece> pieces = to_pieces(tuples);
  return self.engine->submit(
      {op, address, bytes, &pieces, tag, generation, demand, event, to_ns(deadline_s)});
}

// Waits in slices of 100 ms, so that Ctrl-C interrupts the wait. After an interrupt the ticket is still
// valid.
State wait(PyTransfers& self, uint64_t ticket) {
  for (;;) {
    State state;
    {
      nb::gil_scoped_release release;
      state = self.engine->wait(ticket, 100'000'000);
    }
    if (state != State::active) return state;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

bool wait_and_raise(PyTransfers& self, uint64_t ticket, const std::string& name, bool keep) {
  const State state = wait(self, ticket);
  const Failure failure = state == State::failed ? self.engine->failure(ticket) : Failure{};
  if (!keep) self.engine->release(ticket);
  if (state == State::failed) raise_failure(failure, self.engine->io()->path(failure.file), name);
  return state == State::done;
}

const char* state_name(State state) {
  switch (state) {
    case State::free: return "free";
    case State::active: return "active";
    case State::done: return "done";
    case State::failed: return "failed";
    case State::cancelled: return "cancelled";
  }
  return "free";
}

nb::dict stats(PyTransfers& self) {
  const Stats s = self.engine->stats();
  const Slabs& slabs = *self.engine->slabs();
  nb::dict d;
  const auto seconds = [](uint64_t ns) { return static_cast<double>(ns) / 1e9; };
  d["bytes_written"] = s.bytes_written, d["bytes_read"] = s.bytes_read;
  d["writes"] = s.writes, d["reads"] = s.reads;
  d["write_busy_s"] = seconds(s.write_busy_ns), d["read_busy_s"] = seconds(s.read_busy_ns);
  d["copy_out_s"] = seconds(s.copy_out_ns), d["copy_in_s"] = seconds(s.copy_in_ns);
  d["retries"] = s.retries, d["continued"] = s.continued, d["failed"] = s.failed, d["timeouts"] = s.timeouts;
  d["late"] = s.late, d["cancelled"] = s.cancelled, d["unobserved_failures"] = s.unobserved;
  d["queued_max"] = s.queued_max, d["flights_max"] = s.flights_max;
  d["submitted"] = s.submitted, d["finished"] = s.finished, d["unfinished"] = self.engine->unfinished();
  d["slabs_free"] = slabs.free(), d["slabs_quarantined"] = slabs.quarantined();
  d["blocks"] = self.engine->blocks(), d["buffered_files"] = self.engine->io()->buffered_files();
  return d;
}

std::vector<PieceTuple> lost(PyTransfers& self) {
  std::vector<PieceTuple> tuples;
  for (const Piece& piece : self.engine->lost()) tuples.emplace_back(piece.file, piece.offset, piece.bytes);
  return tuples;
}

void bind_slabs(nb::module_& m) {
  nb::class_<PySlabs>(m, "Slabs")
      .def(
          "__init__",
          [](PySlabs* self, uint64_t slab_bytes, int count, uint64_t address) {
            std::shared_ptr<Slabs> slabs;
            {
              nb::gil_scoped_release release;  // because the constructor writes to all bytes of the arena
              slabs = address == 0 ? std::make_shared<Slabs>(slab_bytes, count)
                                   : std::make_shared<Slabs>(address, slab_bytes, count);
            }
            new (self) PySlabs{std::move(slabs)};
          },
          "slab_bytes"_a, "count"_a, "address"_a = 0)
      .def_prop_ro("slab_bytes", [](PySlabs& s) { return s.slabs->slab_bytes(); })
      .def_prop_ro("count", [](PySlabs& s) { return s.slabs->count(); })
      .def_prop_ro("free", [](PySlabs& s) { return s.slabs->free(); })
      .def_prop_ro("quarantined", [](PySlabs& s) { return s.slabs->quarantined(); })
      .def_prop_ro("address", [](PySlabs& s) { return s.slabs->address(); })
      .def_prop_ro("arena_bytes", [](PySlabs& s) { return s.slabs->arena_bytes(); })
      .def_prop_ro("page_bytes", [](PySlabs& s) { return s.slabs->page_bytes(); });
}

// Calls a function of the copier, and keeps the copier and the arena alive during the call, even if other
// threads release them.
template <int (CudaCopier::*call)(const std::shared_ptr<Slabs>&)>
int with_arena(PyCudaCopier& self, PySlabs& slabs) {
  const std::shared_ptr<Copier> held = self.copier;
  const std::shared_ptr<Slabs> arena = slabs.slabs;
  nb::gil_scoped_release release;
  return (static_cast<CudaCopier&>(*held).*call)(arena);
}

void bind_copiers(nb::module_& m) {
  nb::class_<PyCopier>(m, "Copier");
  nb::class_<PyNoCopier, PyCopier>(m, "NoCopier").def("__init__", [](PyNoCopier* self) {
    new (self) PyNoCopier{{std::make_shared<NoCopier>()}};
  });
  nb::class_<PyCudaCopier, PyCopier>(m, "CudaCopier")
      .def(
          "__init__",
          [](PyCudaCopier* self, const std::string& library, uint64_t context) {
            new (self) PyCudaCopier{{std::make_shared<CudaCopier>(library, context)}};
          },
          "library"_a = "libcuda.so.1", "context"_a = 0)
      .def("pin", with_arena<&CudaCopier::pin>, "slabs"_a)
      .def("unpin", with_arena<&CudaCopier::unpin>, "slabs"_a)
      .def(
          "stream",
          [](PyCudaCopier& self, int priority) {
            uint64_t made = 0;
            const int error = static_cast<CudaCopier&>(*self.copier).stream(priority, &made);
            if (error != 0)
              throw std::runtime_error("the CUDA driver failed to make a stream (error " +
                                       std::to_string(error) + ")");
            return made;
          },
          "priority"_a = 0)
      .def(
          "give_to",
          [](PyCudaCopier& self, uint64_t stream, uint64_t on_device, uint64_t in_host, uint64_t bytes,
             bool out) {
            auto& copier = static_cast<CudaCopier&>(*self.copier);
            nb::gil_scoped_release release;  // because the driver blocks the call while its queue is full
            return copier.give_to(stream, on_device, in_host, bytes, out);
          },
          "stream"_a, "on_device"_a, "in_host"_a, "bytes"_a, "out"_a);
}

void make_transfers(PyTransfers* self, PyIo& io, PySlabs& slabs, bool checksums, double deadline_s,
                    int max_transfers, int write_retries, int read_retries, PyCopier* copier) {
  const Settings settings{max_transfers, checksums, to_ns(deadline_s), write_retries, read_retries};
  std::shared_ptr<Copier> chosen;
  if (copier == nullptr) chosen = std::make_shared<HostCopier>();
  else chosen = copier->copier;
  new (self) PyTransfers(std::make_shared<Transfers>(io.io, slabs.slabs, chosen, settings));
}

template <Op op>
uint64_t submit_op(PyTransfers& self, uint64_t address, uint64_t bytes, const std::vector<PieceTuple>& pieces,
                   uint64_t tag, uint64_t generation, bool demand, uint64_t event, double deadline_s) {
  return submit(self, op, address, bytes, pieces, tag, generation, demand, event, deadline_s);
}

void close_all() {
  std::vector<std::shared_ptr<Transfers>> engines;
  for (PyTransfers* t : alive) engines.push_back(t->engine);
  nb::gil_scoped_release release;
  for (const auto& engine : engines) engine->close(5'000'000'000);
}
}  // namespace

void bind_transfers(nb::module_& m) {
  bind_slabs(m);
  bind_copiers(m);
  nb::exception<QueueFull>(m, "QueueFull", PyExc_RuntimeError);
  nb::class_<PyTransfers>(m, "Transfers")
      .def("__init__", make_transfers, "io"_a, "slabs"_a, nb::kw_only(), "checksums"_a = true,
           "deadline_s"_a = 60.0, "max_transfers"_a = 16384, "write_retries"_a = 1, "read_retries"_a = 2,
           "copier"_a.none() = nb::none())
      .def("out", submit_op<Op::write>, "address"_a, "size_bytes"_a, "pieces"_a, "tag"_a, "generation"_a,
           "demand"_a = false, "event"_a = 0, "deadline_s"_a = 0.0)
      .def("into", submit_op<Op::read>, "address"_a, "size_bytes"_a, "pieces"_a, "tag"_a, "generation"_a,
           "demand"_a = false, "event"_a = 0, "deadline_s"_a = 0.0)
      .def(
          "done", [](PyTransfers& t, uint64_t ticket) { return t.engine->state(ticket) != State::active; },
          "ticket"_a)
      .def(
          "state", [](PyTransfers& t, uint64_t ticket) { return state_name(t.engine->state(ticket)); },
          "ticket"_a)
      .def("wait", wait_and_raise, "ticket"_a, "name"_a = "", "keep"_a = false)
      .def(
          "cancel", [](PyTransfers& t, uint64_t ticket) { return t.engine->cancel(ticket); }, "ticket"_a)
      .def(
          "promote", [](PyTransfers& t, uint64_t ticket) { return t.engine->promote(ticket); }, "ticket"_a)
      .def(
          "release", [](PyTransfers& t, uint64_t ticket) { t.engine->release(ticket); }, "ticket"_a)
      .def(
          "times",
          [](PyTransfers& t, uint64_t ticket) {
            const Times times = t.engine->times(ticket);
            return std::make_tuple(times.submitted_ns, times.started_ns, times.finished_ns);
          },
          "ticket"_a)
      .def(
          "forget",
          [](PyTransfers& t, const std::vector<PieceTuple>& pieces) { t.engine->forget(to_pieces(pieces)); },
          "pieces"_a)
      .def("lost", lost)
      .def("stats", stats)
      .def(
          "close",
          [](PyTransfers& t, double within_s) {
            const uint64_t within_ns = to_ns(within_s);
            nb::gil_scoped_release release;
            return t.engine->close(within_ns);
          },
          "within_s"_a = 5.0);
  m.def("close_all", close_all);
  nb::module_::import_("atexit").attr("register")(m.attr("close_all"));
}
}  // namespace teraio
