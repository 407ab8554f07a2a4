// A 64-bit digest that is computed during a copy. The check therefore costs no further pass over memory.
//
// Eight lanes take the words of each 64-byte row in turn: lane = (rotl(lane, 29) ^ word) * odd. For a fixed
// lane this step is a bijection of the word, and for a fixed word a bijection of the lane. The lanes are
// folded together by the same step. A change within one word (a flipped bit, a wrong byte) therefore always
// changes the digest. Other damage is missed with a probability of about 2^-64. The digest gives no
// protection against intentional collisions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace teraio {
uint64_t digest(const std::byte* source, uint64_t bytes);
// Copies and digests in one pass. The ranges must not overlap. Returns the same digest as digest().
uint64_t copy_digest(std::byte* target, const std::byte* source, uint64_t bytes);
// Copies bytes without a digest.
void copy_plain(std::byte* target, const std::byte* source, uint64_t bytes);
}  // namespace teraio
