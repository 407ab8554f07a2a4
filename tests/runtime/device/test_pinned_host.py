"""Pinned host memory without a GPU. The tests cover blocks, the thread that pins the next segment, and copies
in pieces."""

from __future__ import annotations

import random
import threading
import time
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from teraio.runtime.device import pinned_host
from teraio.runtime.device.pinned_host import SEGMENT_BYTES, HostTier, PinnedBlock

KIB = 1024
GIB = 2**30


# ---- blocks of pinned memory


class Toy:
    """A device that pins no real memory: a slab is only an address.

    The device refuses to pin more than `most` segments.
    """

    def __init__(self, most: int = 1000) -> None:
        self.at, self.most = GIB, most
        # For each segment: the number of its bytes, and the thread that pinned the segment.
        self.pinned: list[tuple[int, threading.Thread]] = []
        self.may_pin = threading.Event()  # the pinning thread waits for this event
        self.may_pin.set()

    def allocate_slabs(self, slab_bytes: int, count: int) -> Any:
        self.pinned.append((slab_bytes * count, threading.current_thread()))
        if threading.current_thread() is not threading.main_thread():
            assert self.may_pin.wait(60)
        if len(self.pinned) > self.most:
            raise OSError(12, "no")
        self.at += 4 * GIB
        return SimpleNamespace(address=self.at, arena_bytes=slab_bytes * count)


def toy_tier(limit: int, toy: Toy | None = None) -> HostTier:
    return HostTier(toy or Toy(), limit)  # type: ignore[arg-type]


def test_pinned_blocks_never_overlap_and_all_memory_is_freed() -> None:
    tier, order = toy_tier(3 * GIB), random.Random(1)
    live: list[PinnedBlock] = []
    for _ in range(3000):
        if order.random() < 0.5 and live:
            tier.release(live.pop(order.randrange(len(live))))
        else:
            block = tier.reserve(order.randrange(1, GIB // 4))
            live += [block] if block else []
        edges = sorted(live)
        assert all(one.address + one.size_bytes <= two.address for one, two in pairwise(edges))
    for block in live:
        tier.release(block)
    assert tier.pinned_bytes == 3 * GIB
    assert sorted(block.size_bytes for block in tier._free) == [GIB] * 3


def test_limit_holds_and_freed_block_is_reused() -> None:
    tier = toy_tier(GIB + GIB // 2)
    one, two = tier.reserve(GIB), tier.reserve(GIB // 2)
    assert one and two
    assert tier.reserve(1) is None
    tier.release(one)
    assert tier.reserve(GIB - 5) == one
    assert tier.pinned_bytes == GIB + GIB // 2


def test_tensor_larger_than_a_segment_gets_its_own_segment() -> None:
    tier = toy_tier(8 * GIB)
    block = tier.reserve(2 * GIB + 1)
    assert block is not None
    assert block.size_bytes >= 2 * GIB + 1
    assert tier.pinned_bytes == 3 * GIB


def test_refused_pinning_keeps_pinned_blocks_usable() -> None:
    tier = toy_tier(8 * GIB, Toy(most=1))
    one = tier.reserve(GIB)
    assert one is not None
    assert tier.reserve(GIB) is None
    assert "no" in str(tier.refused)
    tier.release(one)
    assert tier.reserve(GIB // 2) is not None
    assert tier.reserve(2 * GIB) is None
    assert tier.pinned_bytes == GIB and len(tier.device.pinned) == 2  # type: ignore[attr-defined]


def test_thread_pins_next_segment_while_last_one_has_free_blocks() -> None:
    toy = Toy()
    tier = toy_tier(8 * GIB, toy)
    toy.may_pin.clear()
    # None of these reservations waits for the pinning thread.
    blocks = [tier.reserve(GIB // 4) for _ in range(4)]
    deadline = time.monotonic() + 60
    while len(toy.pinned) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [thread is threading.main_thread() for _, thread in toy.pinned] == [True, False]
    assert None not in blocks and tier.pinned_bytes == GIB
    toy.may_pin.set()
    # The thread pins the second segment, and this reservation is in that segment. No third segment is needed.
    assert tier.reserve(GIB // 4) is not None
    assert tier.pinned_bytes == 2 * GIB and len(toy.pinned) == 2


def test_refused_pinning_on_thread_lowers_the_limit() -> None:
    tier = toy_tier(8 * GIB, Toy(most=1))
    assert [tier.reserve(GIB // 4) is None for _ in range(5)] == [False] * 4 + [True]
    assert tier.refused is not None and tier.limit_bytes == GIB


def test_at_most_one_segment_is_pinned_ahead() -> None:
    """The next segment has the usual size, or the size of the next tensor if this tensor is larger."""
    for sizes in ([GIB // 10] * 40, [3 * GIB, GIB // 4, GIB // 4], [GIB // 2 + 1] * 5):
        toy = Toy()
        tier = toy_tier(64 * GIB, toy)
        for count, size in enumerate(sizes, 1):
            assert tier.reserve(size) is not None
            whole = -(-max(sizes[:count]) // SEGMENT_BYTES) * SEGMENT_BYTES
            pinned_bytes = sum(size_bytes for size_bytes, _ in toy.pinned)
            assert pinned_bytes <= 2 * sum(sizes[:count]) + 2 * whole
        assert len(toy.pinned) <= len(sizes) + 1


# ---- copies in pieces


def test_a_large_copy_is_cut_into_pieces_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the sizes of the pieces. A copy that is smaller than two pieces is not divided."""
    monkeypatch.setattr(pinned_host, "PIECE_BYTES", 1000)
    for size, expected in ((1, [1]), (1999, [1999]), (2000, [1000, 1000]), (3500, [1000, 1000, 1500])):
        cut = list(pinned_host.piece_bounds(size))
        assert [end - start for start, end in cut] == expected
        assert [start for start, _ in cut] == [0, *accumulate(expected)][:-1]
