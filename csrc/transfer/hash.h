// A 64-bit digest that is computed during a copy. A check of bytes therefore needs no further pass over
// memory.
//
// A row has 64 bytes, which are eight words. Each of eight lanes (64-bit numbers) takes one word of the row
// by this step: lane = (rotl(lane, 29) ^ word) * odd. For a fixed lane the step is a bijection of the word,
// and for a fixed word a bijection of the lane. At the end the same step folds the lanes into one number. So
// a change within one word (a flipped bit, a wrong byte) always changes the digest. The digest misses other
// damage with a probability of about 2^-64. It gives no protection against intentional collisions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace teraio {
uint64_t digest(const std::byte* source, uint64_t bytes);
// Copies bytes and returns their digest, the same as digest(). The ranges must not overlap.
uint64_t copy_digest(std::byte* target, const std::byte* source, uint64_t bytes);
// Copies bytes without a digest.
void copy_plain(std::byte* target, const std::byte* source, uint64_t bytes);
}  // namespace teraio
