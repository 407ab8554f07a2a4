// The error messages of failed transfers.
#include "transfer/failure.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace teraio {
namespace {
std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
  return text;
}

std::string errno_text(int error) {
  if (error == 0) return "a short count at the end of the file";
  const char* name = strerrorname_np(error);
  const char* words = strerrordesc_np(error);
  return std::string(name ? name : "errno " + std::to_string(error)) + " (" + (words ? words : "unknown") +
         ")";
}

std::string corrupt_text(const Failure& f) {
  switch (f.mismatch) {
    case Mismatch::unwritten: return "the block was never written";
    case Mismatch::torn: return "the last write of the block has not completed";
    case Mismatch::tag:
      return "the block belongs to tag " + std::to_string(f.found) + ", not to " + std::to_string(f.expected);
    case Mismatch::generation:
      return "the block has generation " + std::to_string(f.found) + ", expected " +
             std::to_string(f.expected);
    case Mismatch::length:
      return "the block was written with " + std::to_string(f.found) + " bytes, expected " +
             std::to_string(f.expected);
    case Mismatch::digest:
      return "the bytes read have digest " + hex(f.found) + ", the bytes written had " + hex(f.expected) +
             " (flipped, stale or misplaced block)";
    case Mismatch::none: break;
  }
  return "unknown";
}
}  // namespace

const char* cause_name(Cause cause) {
  switch (cause) {
    case Cause::none: return "none";
    case Cause::full: return "full";
    case Cause::write: return "write";
    case Cause::read: return "read";
    case Cause::corrupt: return "corrupt";
    case Cause::timeout: return "timeout";
    case Cause::hung: return "hung";
    case Cause::copy: return "copy";
  }
  return "none";
}

const char* mismatch_name(Mismatch mismatch) {
  switch (mismatch) {
    case Mismatch::none: return "";
    case Mismatch::unwritten: return "unwritten";
    case Mismatch::torn: return "torn";
    case Mismatch::tag: return "tag";
    case Mismatch::generation: return "generation";
    case Mismatch::length: return "length";
    case Mismatch::digest: return "digest";
  }
  return "";
}

std::string describe(const Failure& f, const std::string& path, const std::string& name) {
  const std::string verb = f.op == Op::write ? "write" : "read";
  const std::string what = (name.empty() ? "tensor" : "tensor '" + name + "'") + " (tag " +
                           std::to_string(f.tag) + ", generation " + std::to_string(f.generation) + ")";
  const std::string where =
      std::to_string(f.bytes) + " bytes at offset " + std::to_string(f.offset) + " of " + path;
  const std::string times = std::to_string(f.retries) + (f.retries == 1 ? " retry" : " retries");
  const std::string tries = f.retries == 0 ? "" : " after " + times;
  switch (f.cause) {
    case Cause::full:
      return "no room to write " + what + ": " + where + " ended in " + errno_text(f.error) +
             ". The copy in memory was kept. Free space there, raise the file size limit (ulimit -f) or give "
             "another store directory";
    case Cause::write:
      return "write of " + what + " failed" + tries + ": " + where + " ended in " + errno_text(f.error) +
             ". The copy in memory was kept. Check the drive (dmesg, smartctl) or give another store "
             "directory";
    case Cause::read:
      return "read of " + what + " failed" + tries + ": " + where + " ended in " + errno_text(f.error) +
             ". Check the drive (dmesg, smartctl); repeat the step or resume from the last checkpoint";
    case Cause::corrupt:
      return what + " was read with wrong bytes: " + where + ": " + corrupt_text(f) +
             ". The bytes were not used. Check the drive (dmesg, smartctl); repeat the step or resume from "
             "the last checkpoint";
    case Cause::timeout:
      return verb + " of " + what + " did not complete within " + std::to_string(f.deadline_ns / 1000000) +
             " ms: " + where +
             ". Its buffer is quarantined and will not be used again. The drive hangs or lost the "
             "request (dmesg); a longer deadline helps if it is only slow";
    case Cause::hung:
      return verb + " of " + what + " was not started: " + where +
             ". Requests that never completed hold every lane or every slab; the drive hangs (dmesg). Give "
             "another store directory";
    case Cause::copy:
      return verb + " of " + what + " failed between device and slab with driver error " +
             std::to_string(f.error) + " (" + std::to_string(f.bytes) +
             " bytes). The device is in error; restart the program";
    case Cause::none: break;
  }
  return "no failure";
}
}  // namespace teraio
