// The expected contents of every block on the drives. This table is in RAM. It has one entry per written
// chunk, by file and offset.
//
// The transfer engine checks a read two times. (1) Before the read, the entry must have the requested tensor,
// generation (number of the write) and size. This check finds wrong bookkeeping of the caller. (2) After the
// read, the bytes must have the digest that was recorded at the write. This check finds flipped, stale and
// misplaced blocks of the drive.
//
// An entry is a map node of about 100 bytes. A rewrite of the same chunk reuses the node. The table allocates
// nothing else.
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
  bool whole = false;  // false from the begin of a write until commit()
};

enum class Mismatch : uint8_t { none, unwritten, torn, tag, generation, length, digest };

class Blocks {
 public:
  explicit Blocks(int files) : files_(static_cast<size_t>(files)) {}
  // Records the begin of a write. The old contents of the extent are invalid from now on, even if the write
  // fails.
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
