// A fake CUDA driver, which passes each call to a Python function of the test. This function answers with
// the streams and events of a fake device in virtual time. Copies of the real transfer engine therefore run
// on the same clock as the fake kernels.
#include <cstddef>
#include <cstdint>

namespace {
uint64_t (*ask)(int what, uint64_t a, uint64_t b, uint64_t c, uint64_t d) = nullptr;
int context;
uint64_t number(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
enum { kStream, kWait, kEvent, kRecord, kSynchronize, kToHost, kToDevice };
}  // namespace

extern "C" {
void asked_by(uint64_t (*who)(int, uint64_t, uint64_t, uint64_t, uint64_t)) {
  ask = who;
}
int cuCtxGetCurrent(void** out) {
  return *out = &context, 0;
}
int cuCtxSetCurrent(void*) {
  return 0;
}
int cuCtxSynchronize() {
  return 0;
}
int cuStreamCreate(void** out, unsigned) {
  return *out = reinterpret_cast<void*>(ask(kStream, 0, 0, 0, 0)), 0;
}
int cuStreamCreateWithPriority(void** out, unsigned flags, int) {
  return cuStreamCreate(out, flags);
}
int cuStreamDestroy_v2(void*) {
  return 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return static_cast<int>(ask(kWait, number(stream), number(event), 0, 0));
}
int cuEventCreate(void** out, unsigned) {
  return *out = reinterpret_cast<void*>(ask(kEvent, 0, 0, 0, 0)), 0;
}
int cuEventRecord(void* event, void* stream) {
  return static_cast<int>(ask(kRecord, number(event), number(stream), 0, 0));
}
int cuEventSynchronize(void* event) {
  return static_cast<int>(ask(kSynchronize, number(event), 0, 0, 0));
}
int cuEventDestroy_v2(void*) {
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return static_cast<int>(ask(kToHost, number(to), from, bytes, number(stream)));
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  return static_cast<int>(ask(kToDevice, to, number(from), bytes, number(stream)));
}
int cuMemHostRegister_v2(void*, size_t, unsigned) {
  return 0;
}
int cuMemHostUnregister(void*) {
  return 0;
}
}
