// What every block on the disks should hold, kept in RAM: one entry per chunk ever written, found by (file,
// offset).
//
// A read is checked twice. Before it starts: does the table say that this extent holds this tensor, this
// generation, this many bytes? After it: do the bytes have the digest that was recorded when they left
// memory? The first catches wrong bookkeeping above us, the second flipped, stale and misplaced blocks below
// us.
//
// An entry is a map node of about 100 bytes per chunk; a rewrite of the same chunk reuses it. Nothing else
// allocates.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace teraio {
struct Block {
  uint64_t bytes = 0;
  uint64_t tag = 0;
  uint64_t generation = 0;
  uint64_t digest = 0;
  bool digested = false;
  bool whole = false;  // false from the start of a write to its confirmed end
};

enum class Mismatch : uint8_t { none, unwritten, torn, tag, generation, length, digest };

class Blocks {
 public:
  explicit Blocks(int files) : files_(static_cast<size_t>(files)) {}
  // The extent's old contents are gone from here on, whatever becomes of the write.
  void begin(int file, uint64_t offset, uint64_t bytes, uint64_t tag, uint64_t generation);
  void commit(int file, uint64_t offset, uint64_t digest, bool digested);
  const Block* find(int file, uint64_t offset) const;
  static Mismatch compare(const Block* block, uint64_t bytes, uint64_t tag, uint64_t generation);
  void forget(int file, uint64_t offset, uint64_t bytes);
  uint64_t count() const;

 private:
  std::vector<std::map<uint64_t, Block>> files_;
};
}  // namespace teraio
