// The loops of the digest. They use no vector instructions, because SSE2 and AVX2 have no 64-bit multiply.
// One scalar multiply of 8 bytes per cycle is about 24 GB/s at 3 GHz. A copy on one core is slower, so the
// digest does not limit the rate.
#include "transfer/hash.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace teraio {
namespace {
// 2^64 / golden ratio. The number is odd, so multiplication by it is a bijection.
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
constexpr uint64_t kRow = 64;  // eight lanes of eight bytes
constexpr int kTurn = 29;

inline uint64_t rotl(uint64_t x, int k) {
  return (x << k) | (x >> (64 - k));
}
inline uint64_t load(const std::byte* p) {
  uint64_t w;
  std::memcpy(&w, p, 8);
  return w;
}
inline void step(uint64_t& lane, uint64_t word) {
  lane = (rotl(lane, kTurn) ^ word) * kOdd;
}

enum class Store { none, cached, streamed };

template <Store store>
inline void put(std::byte* p, uint64_t word) {
  if constexpr (store == Store::cached) std::memcpy(p, &word, 8);
#if defined(__x86_64__)
  if constexpr (store == Store::streamed)
    _mm_stream_si64(reinterpret_cast<long long*>(p), static_cast<long long>(word));
#else
  if constexpr (store == Store::streamed) std::memcpy(p, &word, 8);
#endif
}

template <Store store>
void rows(uint64_t lanes[8], std::byte* target, const std::byte* source, uint64_t count) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  uint64_t e = lanes[4], f = lanes[5], g = lanes[6], h = lanes[7];
  for (; count > 0; --count, source += kRow, target += store == Store::none ? 0 : kRow) {
    const uint64_t w0 = load(source), w1 = load(source + 8), w2 = load(source + 16), w3 = load(source + 24);
    const uint64_t w4 = load(source + 32), w5 = load(source + 40), w6 = load(source + 48),
                   w7 = load(source + 56);
    step(a, w0), step(b, w1), step(c, w2), step(d, w3), step(e, w4), step(f, w5), step(g, w6), step(h, w7);
    put<store>(target, w0), put<store>(target + 8, w1), put<store>(target + 16, w2),
        put<store>(target + 24, w3);
    put<store>(target + 32, w4), put<store>(target + 40, w5), put<store>(target + 48, w6),
        put<store>(target + 56, w7);
  }
  lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d, lanes[4] = e, lanes[5] = f, lanes[6] = g,
  lanes[7] = h;
}

template <Store store>
uint64_t run(std::byte* target, const std::byte* source, uint64_t bytes) {
  uint64_t lanes[8];
  for (uint64_t i = 0; i < 8; ++i) lanes[i] = (i + 1) * kOdd;
  const uint64_t whole = bytes / kRow;
  rows<store>(lanes, target, source, whole);
  if (const uint64_t rest = bytes % kRow; rest != 0) {
    // Pad the last row with zeros. The digest includes the length, so it distinguishes padding from zero
    // bytes.
    std::byte row[kRow] = {};
    std::memcpy(row, source + whole * kRow, rest);
    rows<Store::none>(lanes, row, row, 1);
    if constexpr (store != Store::none) std::memcpy(target + whole * kRow, row, rest);
  }
#if defined(__x86_64__)
  if constexpr (store == Store::streamed)
    _mm_sfence();  // makes the streamed stores visible to other threads before they use the bytes
#endif
  uint64_t folded = bytes * kOdd;
  for (uint64_t lane : lanes) step(folded, lane);
  folded ^= folded >> 32;
  return folded * kOdd;
}

bool aligned8(const std::byte* p) {
  return reinterpret_cast<uintptr_t>(p) % 8 == 0;
}
// Targets of at least this size are written past the CPU's cache. Smaller targets are written through the
// cache, because they are likely to be read soon.
constexpr uint64_t kStreamFrom = 256 * 1024;
}  // namespace

uint64_t digest(const std::byte* source, uint64_t bytes) {
  return run<Store::none>(nullptr, source, bytes);
}

uint64_t copy_digest(std::byte* target, const std::byte* source, uint64_t bytes) {
  if (bytes >= kStreamFrom && aligned8(target)) return run<Store::streamed>(target, source, bytes);
  return run<Store::cached>(target, source, bytes);
}

void copy_plain(std::byte* target, const std::byte* source, uint64_t bytes) {
  std::memcpy(target, source, bytes);
}
}  // namespace teraio
