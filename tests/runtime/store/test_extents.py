"""Tests of extents. An extent is the place of one tensor in a store's files.

No block of a file belongs to two extents, and every free block can be reserved.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store_rig import check_extents

from teraio.runtime.store.extents import STRIPE_BYTES, Extents, Piece, round_up_to_blocks

BLOCK = 4096

# Each tuple is one step of a test, and has three numbers. A positive first number reserves this many blocks.
# A first number of 0 releases an extent, and -1 retires one block of an extent, so that the block is never
# used again. The second number chooses the extent. The third number is subtracted from the bytes to reserve.
STEPS = st.lists(
    st.tuples(st.integers(-1, 40), st.integers(0, 10**6), st.integers(0, BLOCK - 1)), max_size=60
)


@settings(max_examples=150, deadline=None)
# The last step reserves a part of a released extent.
@example([(2, 0, 0), (2, 0, 0), (0, 0, 0), (1, 0, 0)], [100])
@given(STEPS, st.lists(st.integers(1, 100), min_size=1, max_size=3))
def test_every_block_has_one_owner_and_free_bytes_can_be_used(
    steps: list[tuple[int, int, int]], files: list[int]
) -> None:
    extents = Extents([blocks * BLOCK for blocks in files])
    live: list[tuple[Piece, ...]] = []
    for blocks, pick, short in steps:
        if blocks > 0:
            size = blocks * BLOCK - short
            free = extents.free_bytes
            pieces = extents.reserve_pieces(size)
            assert (pieces is not None) == (round_up_to_blocks(size) <= free), (
                "it fits exactly if that much is free"
            )
            if pieces is not None:
                assert sum(piece[2] for piece in pieces) == size
                assert all(offset % BLOCK == 0 for _, offset, _ in pieces)
                assert all(size % BLOCK == 0 for _, _, size in pieces[:-1])
                assert extents.free_bytes == free - round_up_to_blocks(size)
                live.append(pieces)
        elif live and blocks == 0:
            extents.release_pieces(live.pop(pick % len(live)))
        elif live:
            file, offset, size = live[pick % len(live)][0]
            skip = pick % (round_up_to_blocks(size) // BLOCK) * BLOCK
            extents.retire_pieces([(file, offset + skip, min(BLOCK, size - skip))])
        check_extents(extents, live)
    for pieces in live:
        extents.release_pieces(pieces)
    check_extents(extents, [])
    assert extents.free_bytes == extents.capacity_bytes - extents.dead_bytes


def test_last_freed_extent_is_reused_first() -> None:
    extents = Extents([100 * BLOCK])
    first, second = extents.reserve_pieces(5000), extents.reserve_pieces(5000)
    assert first and second
    extents.release_pieces(first)
    extents.release_pieces(second)
    assert extents.reserve_pieces(5000) == second and extents.reserve_pieces(5000) == first


def test_mixed_sizes_do_not_grow_without_bound() -> None:
    """After many reservations of mixed sizes, the end of the file is below 1.5 times the peak of the used
    bytes."""
    random_ = random.Random(4)
    extents = Extents([1 << 40])
    live: list[tuple[Piece, ...]] = []
    peak = 0
    for _ in range(20_000):
        if len(live) > 40:
            extents.release_pieces(live.pop(random_.randrange(len(live))))
        pieces = extents.reserve_pieces(int(2 ** random_.uniform(12, 27)))
        assert pieces is not None
        live.append(pieces)
        peak = max(peak, extents.used_bytes)
    assert extents.files[0].end < 1.5 * peak, (extents.files[0].end, peak)
    assert len(extents.files[0].list_free_runs()) < 200
    assert sum(map(len, live)) < 8 * len(live), "extents are fragmented"


def test_stripes_are_distributed_by_weights() -> None:
    extents = Extents([1 << 34, 1 << 34], weights=[3, 1])
    pieces = extents.reserve_pieces(64 * STRIPE_BYTES)
    assert pieces is not None
    by_file = [sum(size for file, _, size in pieces if file == number) for number in (0, 1)]
    assert by_file == [48 * STRIPE_BYTES, 16 * STRIPE_BYTES]
    assert len(pieces) > 16, "the stripes of both drives alternate"


def test_small_tensors_are_spread_over_all_files() -> None:
    extents = Extents([1 << 30] * 4)
    taken = [extents.reserve_pieces(BLOCK) for _ in range(40)]
    counts = [sum(pieces[0][0] == file for pieces in taken if pieces) for file in range(4)]
    assert counts == [10] * 4


def test_other_files_take_the_stripes_of_a_full_file() -> None:
    extents = Extents([2 * STRIPE_BYTES, 6 * STRIPE_BYTES])
    assert extents.reserve_pieces(8 * STRIPE_BYTES) is not None
    assert extents.free_bytes == 0 and extents.reserve_pieces(1) is None


def test_capacity_limits_all_files_together() -> None:
    extents = Extents([100 * BLOCK, 100 * BLOCK], capacity_bytes=50 * BLOCK)
    assert extents.reserve_pieces(51 * BLOCK) is None
    pieces = extents.reserve_pieces(50 * BLOCK)
    assert pieces and extents.reserve_pieces(1) is None
    extents.release_pieces(pieces)
    assert extents.free_bytes == 50 * BLOCK


@pytest.mark.parametrize("keep_whole", [True, False])
def test_retired_blocks_are_never_reserved_again(keep_whole: bool) -> None:
    extents = Extents([10 * BLOCK])
    pieces = extents.reserve_pieces(10 * BLOCK)
    assert pieces
    extents.retire_pieces([(0, 3 * BLOCK, 5000)])
    extents.retire_pieces([(0, 4 * BLOCK, BLOCK)])
    extents.release_pieces(pieces, keep_whole)
    assert extents.dead_bytes == 2 * BLOCK and extents.free_bytes == 8 * BLOCK
    again = extents.reserve_pieces(8 * BLOCK)
    assert again == ((0, 5 * BLOCK, 5 * BLOCK), (0, 0, 3 * BLOCK)) or again == (
        (0, 0, 3 * BLOCK),
        (0, 5 * BLOCK, 5 * BLOCK),
    )
