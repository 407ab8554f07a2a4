// An extension in C++ that reads tensors in all ways that extensions use. The caller of a function may hold
// the GIL or not.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

namespace {
at::Tensor tensor(void* address) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      static_cast<c10::TensorImpl*>(address)));
}
double sum(const float* from, int64_t count) {
  double all = 0;
  for (int64_t at = 0; at < count; at++) all += from[at];
  return all;
}
double total(const at::Tensor& of) {
  return at::sum(of, at::kDouble).item<double>();
}
thread_local char message[512];
template <typename Work>
int told(Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, sizeof message, "%s", error.what());
    return 1;
  }
}
at::Tensor scaled(const at::Tensor& from, double by) {
  at::Tensor made = at::empty_like(from);
  const float* read = from.const_data_ptr<float>();
  float* write = made.mutable_data_ptr<float>();
  for (int64_t at = 0; at < from.numel(); at++) write[at] = static_cast<float>(read[at] * by);
  return made;
}
}  // namespace

TORCH_LIBRARY(reader, library) {
  library.def("scaled(Tensor from, float by) -> Tensor", &scaled);
}

extern "C" {
const char* reader_message() {
  return message;
}
int reader_operator(void* of, double* out) {
  return told([&] { *out = total(tensor(of)); });
}
int reader_data(void* of, double* out) {
  return told([&] { *out = sum(tensor(of).data_ptr<float>(), tensor(of).numel()); });
}
int reader_const_data(void* of, double* out) {
  return told([&] { *out = sum(tensor(of).const_data_ptr<float>(), tensor(of).numel()); });
}
int reader_write(void* of, double value) {
  return told([&] {
    float* to = tensor(of).mutable_data_ptr<float>();
    for (int64_t at = 0; at < tensor(of).numel(); at++) to[at] = static_cast<float>(value);
  });
}
// Reads tensors in threads that Python did not start, while the calling thread waits for these threads.
int reader_parallel(void** of, int count, double* out) {
  return told([&] {
    std::vector<at::Tensor> tensors;
    for (int at = 0; at < count; at++) tensors.push_back(tensor(of[at]));
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at++) out[at] = total(tensors[at]);
    });
  });
}
int reader_threads(void** of, int count, double* out) {
  std::vector<at::Tensor> tensors;
  for (int at = 0; at < count; at++) tensors.push_back(tensor(of[at]));  // tensor() takes the GIL
  std::vector<std::thread> threads;
  std::vector<std::string> wrong(count);
  for (int at = 0; at < count; at++)
    threads.emplace_back([&, at] {
      if (told([&] { out[at] = total(tensors[at]); })) wrong[at] = message;
    });
  for (auto& thread : threads) thread.join();
  for (const auto& each : wrong)
    if (!each.empty()) return std::snprintf(message, sizeof message, "%s", each.c_str()), 1;
  return 0;
}
// Starts a thread that reads a tensor in an endless loop.
void reader_forever(void* of) {
  std::thread([of = tensor(of)] {
    for (double found = 0;;) told([&] { found += total(of); });
  }).detach();
}
}
