"""The allocation of bytes in a store's files. In: sizes. Out: pieces, each with file, offset and size. The
code in this module does no I/O.

    0            reserved at least once                        end        never reserved            limit
    |--live--|--run--|--live--|--dead--|--live--|--run--|--live--|..........................................|

A live range belongs to an extent, which is the place of one tensor in the files. A run is a range of free
bytes between live ranges. Neighbouring runs are merged. A dead range is never used again.

A released extent is first kept whole. The next request of the same size gets the extent of this size that was
released last. A request of a size that no kept extent has turns all kept extents into runs.

The blocks of a kept extent were written before, which makes later writes faster. In a measurement, the first
write into fresh blocks ran at 0.77 GB/s. The third write into the same blocks ran at 2.15 GB/s.

An extent may consist of several pieces, so scattered free bytes can also be used. A tensor fits if the number
of free bytes is at least the tensor's size, rounded up to 4 KiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

Piece = tuple[int, int, int]  # (file, offset, bytes), the transfer engine's format

BLOCK = 4096  # direct I/O needs offsets and sizes that are multiples of this
STRIPE_BYTES = 4 << 20  # size of a stripe, which is contiguous in one file; smaller transfers are slower
GATHER_BYTES = 1 << 20  # smaller runs are used only if no other bytes are free


def round_up_to_blocks(size_bytes: int) -> int:
    """Round the size up to a multiple of the block size."""
    return -(-size_bytes // BLOCK) * BLOCK


class FileSpace:
    """The free bytes of one file, in whole blocks."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes // BLOCK * BLOCK
        self.end = 0
        self.free_bytes = self.limit_bytes
        self._offsets: list[int] = []  # offsets of the runs (ranges of free bytes), ascending
        self._sizes: dict[int, int] = {}  # offset of each range of free bytes -> its size
        self._by_size: list[tuple[int, int]] = []  # (size, offset) of the ranges of free bytes, ascending

    def list_free_runs(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of each run, ascending by offset. A run is a range of free bytes below
        `end`."""
        return [(offset, self._sizes[offset]) for offset in self._offsets]

    def reserve_runs(self, size: int) -> list[tuple[int, int]]:
        """Reserve `size` bytes and return them as a list of (offset, bytes). A run is a range of free bytes
        below `end`.

        There are three cases. (1) If a run is large enough, use the smallest such run. (2) Otherwise use the
        largest runs, if runs of at least GATHER_BYTES suffice together. (3) Otherwise use bytes that were
        never reserved, and then the largest runs.
        """
        assert 0 < size <= self.free_bytes and size % BLOCK == 0, (size, self.free_bytes)
        self.free_bytes -= size
        fit = bisect_left(self._by_size, (size, 0))
        if fit < len(self._by_size):
            return [self._cut_from_run(self._by_size[fit][1], size)]
        fresh = self.limit_bytes - self.end
        large = sum(run for run, _ in self._by_size if run >= GATHER_BYTES)
        taken: list[tuple[int, int]] = []
        if large < size and fresh:
            taken.append(self._reserve_fresh_bytes(min(fresh, size)))
            size -= taken[-1][1]
        while size:
            run, offset = self._by_size[-1]
            taken.append(self._cut_from_run(offset, min(run, size)))
            size -= taken[-1][1]
        return taken

    def set_limit(self, limit_bytes: int) -> None:
        """Set the largest size that the file may have. The store lowers it when the file has failed to grow,
        and later raises it again."""
        limit_bytes = limit_bytes // BLOCK * BLOCK
        assert limit_bytes >= self.end
        self.free_bytes += limit_bytes - self.limit_bytes
        self.limit_bytes = limit_bytes

    def release_run(self, offset: int, size: int) -> None:
        """Free these bytes, and merge them with neighbouring free bytes."""
        assert size > 0 and offset % BLOCK == 0 and size % BLOCK == 0 and offset + size <= self.end
        self.free_bytes += size
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and self._offsets[at] == offset + size:
            size += self._remove_run(at)
        if at > 0 and self._offsets[at - 1] + self._sizes[self._offsets[at - 1]] == offset:
            offset = self._offsets[at - 1]
            size += self._remove_run(at - 1)
        if offset + size == self.end:
            self.end = offset
        else:
            self._insert_run(offset, size)

    def _reserve_fresh_bytes(self, size: int) -> tuple[int, int]:
        offset, self.end = self.end, self.end + size
        return offset, size

    def _cut_from_run(self, offset: int, size: int) -> tuple[int, int]:
        run = self._remove_run(bisect_left(self._offsets, offset))
        if run > size:
            self._insert_run(offset + size, run - size)
        return offset, size

    def _insert_run(self, offset: int, size: int) -> None:
        insort(self._offsets, offset)
        insort(self._by_size, (size, offset))
        self._sizes[offset] = size

    def _remove_run(self, at: int) -> int:
        offset = self._offsets.pop(at)
        size = self._sizes.pop(offset)
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size


class Extents:
    """The free bytes of all files of a store. A tensor is divided into stripes, which are distributed over
    the files in proportion to the files' weights."""

    def __init__(
        self, limits: Sequence[int], weights: Sequence[int] | None = None, capacity_bytes: int | None = None
    ) -> None:
        self.files = [FileSpace(limit) for limit in limits]
        self.weights = list(weights or [1] * len(limits))
        assert len(self.weights) == len(self.files) and min(self.weights) > 0
        room = sum(file.limit_bytes for file in self.files)
        self.capacity_bytes = room if capacity_bytes is None else min(room, capacity_bytes // BLOCK * BLOCK)
        self.dead_bytes = 0
        self._dead: list[Piece] = []
        # Released extents that are kept whole, by size. The newest is last.
        self._recent: dict[int, list[tuple[Piece, ...]]] = {}
        self._recent_bytes = 0

    def change_weights(self, weights: Sequence[int]) -> None:
        """Distribute later extents over the files in proportion to these weights."""
        assert len(weights) == len(self.files) and min(weights) > 0
        self.weights = list(weights)

    @property
    def used_bytes(self) -> int:
        """Return the number of bytes that are reserved, or dead (never used again)."""
        return sum(file.limit_bytes - file.free_bytes for file in self.files) - self._recent_bytes

    @property
    def free_bytes(self) -> int:
        room = sum(file.free_bytes for file in self.files) + self._recent_bytes
        return min(room, self.capacity_bytes - self.used_bytes)

    def reserve_pieces(self, size_bytes: int) -> tuple[Piece, ...] | None:
        """Return pieces with together `size_bytes`, in the order of the tensor's bytes. Return None if too
        few bytes are free."""
        need = round_up_to_blocks(size_bytes)
        if need > self.free_bytes:
            return None
        recent = self._recent.get(size_bytes)
        if recent:
            self._recent_bytes -= need
            return recent.pop()
        self._merge_recent_into_runs()
        return self._reserve_striped_pieces(size_bytes)

    def release_pieces(self, pieces: Sequence[Piece], keep_whole: bool = True) -> None:
        """Free the extent's pieces, except their dead parts. With `keep_whole`, an extent without dead parts
        is kept whole for the next tensor of the same size."""
        whole = [(file, offset, round_up_to_blocks(size)) for file, offset, size in pieces]
        rest = [left for piece in whole for left in _subtract_dead_parts(piece, self._dead)]
        if rest != whole or not keep_whole:
            for file, offset, size in rest:
                self.files[file].release_run(offset, size)
            return
        size_bytes = sum(size for _, _, size in pieces)
        self._recent.setdefault(size_bytes, []).append(tuple(pieces))
        self._recent_bytes += round_up_to_blocks(size_bytes)

    def retire_pieces(self, pieces: Iterable[Piece]) -> None:
        """Mark these parts of live extents as dead. Dead bytes are never reserved again."""
        for file, offset, size in pieces:
            for left in _subtract_dead_parts((file, offset, round_up_to_blocks(size)), self._dead):
                self._dead.append(left)
                self.dead_bytes += left[2]

    def _merge_recent_into_runs(self) -> None:
        for extents in self._recent.values():
            for pieces in extents:
                for file, offset, size in pieces:
                    self.files[file].release_run(offset, round_up_to_blocks(size))
        self._recent.clear()
        self._recent_bytes = 0

    def _reserve_striped_pieces(self, size_bytes: int) -> tuple[Piece, ...]:
        dealt = self._deal_stripes_to_files(round_up_to_blocks(size_bytes))
        totals = [sum(size for file, size in dealt if file == number) for number in range(len(self.files))]
        taken = [file.reserve_runs(total)[::-1] if total else [] for file, total in zip(self.files, totals)]
        pieces: list[Piece] = []
        for file, stripe in dealt:
            left = stripe
            while left:
                offset, run = taken[file].pop()
                if run > left:
                    taken[file].append((offset + left, run - left))
                part = min(run, left)
                left -= part
                last = pieces[-1] if pieces else (-1, 0, 0)
                if last[0] == file and last[1] + last[2] == offset:
                    pieces[-1] = (file, last[1], last[2] + part)
                else:
                    pieces.append((file, offset, part))
        file, offset, part = pieces[-1]
        pieces[-1] = (file, offset, part - (round_up_to_blocks(size_bytes) - size_bytes))
        return tuple(pieces)

    def _deal_stripes_to_files(self, need: int) -> list[tuple[int, int]]:
        """Return the stripes of a tensor as (file, bytes), in the order of the tensor's bytes.

        Each stripe goes to the file with the smallest relative use. The relative use is the file's used bytes
        plus the stripe's bytes, divided by the file's weight.
        """
        if len(self.files) == 1:
            return [(0, need)]
        free = [file.free_bytes for file in self.files]
        used = [file.limit_bytes - file.free_bytes for file in self.files]
        dealt: list[tuple[int, int]] = []
        while need:
            size = min(STRIPE_BYTES, need)
            roomy = [number for number in range(len(free)) if free[number] >= size]
            if roomy:
                file = min(roomy, key=lambda number: (used[number] + size) / self.weights[number])
            else:
                file = max(range(len(free)), key=free.__getitem__)
                size = free[file]
            dealt.append((file, size))
            free[file] -= size
            used[file] += size
            need -= size
        return dealt


def _subtract_dead_parts(piece: Piece, dead: Iterable[Piece]) -> list[Piece]:
    """Return the parts of the piece that are not dead. Dead bytes are never used again."""
    left = [piece]
    for file, start, size in dead:
        left = [part for one in left for part in _subtract_range(one, file, start, start + size)]
    return left


def _subtract_range(piece: Piece, file: int, start: int, stop: int) -> list[Piece]:
    number, offset, size = piece
    if number != file or offset >= stop or offset + size <= start:
        return [piece]
    before = (number, offset, start - offset)
    after = (number, stop, offset + size - stop)
    return [part for part in (before, after) if part[2] > 0]
