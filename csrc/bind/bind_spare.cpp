// Python bindings of the CPU allocator, and the addresses of the functions that torch's allocator calls.
#include <nanobind/stl/pair.h>

#include <new>
#include <utility>

#include "allocator/spare_blocks.h"
#include "bind/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace teraio {
namespace {
void* take(uint64_t bytes) {
  return spare().take(bytes);
}

void give(void* block) {
  spare().give(block);
}

uint64_t vacate(void* block) {
  return spare().vacate(block);
}
}  // namespace

void bind_spare(nb::module_& m) {
  nb::class_<SpareCounts>(m, "SpareCounts")
      .def_ro("used_bytes", &SpareCounts::used)
      .def_ro("peak_bytes", &SpareCounts::peak)
      .def_ro("spare_bytes", &SpareCounts::spare)
      .def_ro("mapped_bytes", &SpareCounts::mapped)
      .def_ro("reused_bytes", &SpareCounts::reused)
      .def_ro("gathered_bytes", &SpareCounts::gathered)
      .def_ro("moves", &SpareCounts::moves)
      .def_ro("limit_bytes", &SpareCounts::limit);
  nb::class_<Spare> cls(m, "Spare");
  cls.attr("LEAST") = Spare::kLeast;
  cls.def(nb::init<>())
      .def(
          "take",
          [](Spare& self, uint64_t bytes) {
            void* block = self.take(bytes);
            if (block == nullptr) throw std::bad_alloc();
            return reinterpret_cast<uint64_t>(block);
          },
          "size_bytes"_a)
      .def(
          "give", [](Spare& self, uint64_t address) { self.give(reinterpret_cast<void*>(address)); },
          "address"_a)
      .def(
          "vacate",
          [](Spare& self, uint64_t address) { return self.vacate(reinterpret_cast<void*>(address)); },
          "address"_a)
      .def("holds", &Spare::holds, "address"_a)
      .def("keep_within", &Spare::keep_within, "size_bytes"_a)
      .def("end_stretch", &Spare::end_stretch)
      .def("reset_peak", &Spare::reset_peak)
      .def("counts", &Spare::counts);
  m.def("spare", &spare, nb::rv_policy::reference);
  m.def("spare_functions",
        [] { return std::make_pair(reinterpret_cast<uint64_t>(&take), reinterpret_cast<uint64_t>(&give)); });
  m.def("spare_vacate", [] { return reinterpret_cast<uint64_t>(&vacate); });
}
}  // namespace teraio
