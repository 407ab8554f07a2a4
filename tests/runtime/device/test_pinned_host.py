"""Pinned memory without a GPU: its places, the thread that pins ahead, and copies in pieces."""

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


# ---- places in pinned memory


class Toy:
    """Pins nothing: an arena is an address. The driver refuses more than `most` segments."""

    def __init__(self, most: int = 1000) -> None:
        self.at, self.most = GIB, most
        self.pinned: list[tuple[int, threading.Thread]] = []  # how many bytes, on which thread
        self.goes_on = threading.Event()
        self.goes_on.set()

    def allocate_slabs(self, slab_bytes: int, count: int) -> Any:
        self.pinned.append((slab_bytes * count, threading.current_thread()))
        if threading.current_thread() is not threading.main_thread():
            assert self.goes_on.wait(60)
        if len(self.pinned) > self.most:
            raise OSError(12, "no")
        self.at += 4 * GIB
        return SimpleNamespace(address=self.at, arena_bytes=slab_bytes * count)


def toy_tier(limit: int, toy: Toy | None = None) -> HostTier:
    return HostTier(toy or Toy(), limit)  # type: ignore[arg-type]


def test_places_never_overlap_and_all_memory_comes_back() -> None:
    tier, order = toy_tier(3 * GIB), random.Random(1)
    live: list[PinnedBlock] = []
    for _ in range(3000):
        if order.random() < 0.5 and live:
            tier.release(live.pop(order.randrange(len(live))))
        else:
            place = tier.reserve(order.randrange(1, GIB // 4))
            live += [place] if place else []
        edges = sorted(live)
        assert all(one.address + one.size_bytes <= two.address for one, two in pairwise(edges))
    for place in live:
        tier.release(place)
    assert tier.pinned_bytes == 3 * GIB
    assert sorted(place.size_bytes for place in tier._free) == [GIB] * 3


def test_the_limit_is_kept_and_a_freed_place_serves_again() -> None:
    tier = toy_tier(GIB + GIB // 2)
    one, two = tier.reserve(GIB), tier.reserve(GIB // 2)
    assert one and two
    assert tier.reserve(1) is None
    tier.release(one)
    assert tier.reserve(GIB - 5) == one
    assert tier.pinned_bytes == GIB + GIB // 2


def test_a_tensor_larger_than_a_segment_has_one_of_its_own() -> None:
    tier = toy_tier(8 * GIB)
    place = tier.reserve(2 * GIB + 1)
    assert place is not None
    assert place.size_bytes >= 2 * GIB + 1
    assert tier.pinned_bytes == 3 * GIB


def test_when_no_more_can_be_pinned_what_there_is_stays_in_use() -> None:
    tier = toy_tier(8 * GIB, Toy(most=1))
    one = tier.reserve(GIB)
    assert one is not None
    assert tier.reserve(GIB) is None
    assert "no" in str(tier.refused)
    tier.release(one)
    assert tier.reserve(GIB // 2) is not None
    assert tier.reserve(2 * GIB) is None
    assert tier.pinned_bytes == GIB and len(tier.device.pinned) == 2  # type: ignore[attr-defined]


def test_a_thread_pins_the_next_segment_while_there_is_room_in_the_last_one() -> None:
    toy = Toy()
    tier = toy_tier(8 * GIB, toy)
    toy.goes_on.clear()
    places = [tier.reserve(GIB // 4) for _ in range(4)]  # none of them waits for the thread
    deadline = time.monotonic() + 60
    while len(toy.pinned) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [thread is threading.main_thread() for _, thread in toy.pinned] == [True, False]
    assert None not in places and tier.pinned_bytes == GIB
    toy.goes_on.set()
    assert tier.reserve(GIB // 4) is not None  # of the segment that the thread pins, and of no third one
    assert tier.pinned_bytes == 2 * GIB and len(toy.pinned) == 2


def test_a_thread_that_is_refused_ends_nothing() -> None:
    tier = toy_tier(8 * GIB, Toy(most=1))
    assert [tier.reserve(GIB // 4) is None for _ in range(5)] == [False] * 4 + [True]
    assert tier.refused is not None and tier.limit_bytes == GIB


def test_no_more_than_a_segment_is_pinned_ahead_of_need() -> None:
    """The limit is 64 GiB; what one tensor needs may be more than a segment, and the next is as large."""
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
    """Less than two pieces are one copy, as ever."""
    monkeypatch.setattr(pinned_host, "PIECE_BYTES", 1000)
    for size, expected in ((1, [1]), (1999, [1999]), (2000, [1000, 1000]), (3500, [1000, 1000, 1500])):
        cut = list(pinned_host.piece_bounds(size))
        assert [end - start for start, end in cut] == expected
        assert [start for start, _ in cut] == [0, *accumulate(expected)][:-1]
