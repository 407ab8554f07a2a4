// A 64-bit digest that is computed while bytes are copied, so that checking costs no extra pass over memory.
//
// Eight lanes take the words of each 64-byte row in turn: lane = (rotl(lane, 29) ^ word) * odd. For a fixed
// lane that is a bijection of the word, for a fixed word a bijection of the lane, and lanes are folded
// together in the same way. So any change confined to one word (every single-bit flip, every wrong byte)
// gives another digest with certainty; other damage goes unnoticed with odds of about 2^-64. It is no defence
// against someone who constructs collisions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace teraio {
uint64_t digest(const std::byte* source, uint64_t bytes);
// Copies and digests in one pass; ranges must not overlap. `digest(source)` gives the same number.
uint64_t copy_digest(std::byte* target, const std::byte* source, uint64_t bytes);
// Copies without a digest, past the caches: the bytes go to a disk or were last seen long ago.
void copy_plain(std::byte* target, const std::byte* source, uint64_t bytes);
}  // namespace teraio
