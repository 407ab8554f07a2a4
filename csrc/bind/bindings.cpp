// The Python module of the native part. Its functions take and return integers, so its source files include
// no headers of torch or CUDA.
#include "bind/bindings.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <system_error>

#include "transfer/failure.h"
#include "transfer/hash.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace teraio {
namespace {
const char* class_of(Cause cause) {
  switch (cause) {
    case Cause::full: return "StoreFullError";
    case Cause::write: return "StoreWriteError";
    case Cause::read: return "StoreReadError";
    case Cause::corrupt: return "CorruptTensorError";
    case Cause::timeout:
    case Cause::hung: return "TransferTimeoutError";
    case Cause::copy:
    case Cause::none: break;
  }
  return "StoreError";
}

void translate_system_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& e) {
    nb::object arguments = nb::make_tuple(e.code().value(), e.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}
}  // namespace

void raise_failure(const Failure& f, const std::string& path, const std::string& name) {
  const std::string tensor = name.empty() ? "tag " + std::to_string(f.tag) : name;
  nb::object type = nb::module_::import_("teraio.errors").attr(class_of(f.cause));
  nb::object error = type(describe(f, path, name), "errno"_a = f.error, "tensor"_a = tensor, "path"_a = path);
  error.attr("kind") = cause_name(f.cause);
  error.attr("mismatch") = mismatch_name(f.mismatch);
  error.attr("tag") = f.tag;
  error.attr("generation") = f.generation;
  error.attr("file") = f.file;
  error.attr("offset") = f.offset;
  error.attr("bytes") = f.bytes;
  error.attr("retries") = f.retries;
  error.attr("deadline_s") = static_cast<double>(f.deadline_ns) / 1e9;
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}
}  // namespace teraio

NB_MODULE(_native, m) {
  m.attr("__doc__") = "teraio's native part: the transfer engine, the planner's simulator and search";
  nb::set_leak_warnings(false);  // no warnings, because engines may be alive when the interpreter ends
  nb::register_exception_translator(teraio::translate_system_error);
  teraio::bind_io(m);
  teraio::bind_transfers(m);
  teraio::bind_planner(m);
  teraio::bind_spare(m);
  m.def(
      "digest",
      [](uint64_t address, uint64_t bytes) {
        return teraio::digest(reinterpret_cast<const std::byte*>(address), bytes);
      },
      "address"_a, "size_bytes"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "copy_digest",
      [](uint64_t target, uint64_t source, uint64_t bytes) {
        return teraio::copy_digest(reinterpret_cast<std::byte*>(target),
                                   reinterpret_cast<const std::byte*>(source), bytes);
      },
      "target"_a, "source"_a, "size_bytes"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "copy",
      [](uint64_t target, uint64_t source, uint64_t bytes) {
        teraio::copy_plain(reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source),
                           bytes);
      },
      "target"_a, "source"_a, "size_bytes"_a, nb::call_guard<nb::gil_scoped_release>());
}
