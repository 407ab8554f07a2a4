"""A planned fetch that finds no room is late: it begins when there is room, before those that come after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from teraio.plan import Evict, Fetch, Plan
from teraio.runtime.follow import Follower, Here, table_of
from teraio.runtime.records import State
from teraio.runtime.step import Expectation

TICKS = 4


class World:
    """Toy physics: tensors of some bytes, all away, and so much room; what begins is listed."""

    def __init__(self, room: int, **sizes: int) -> None:
        self.room = room
        self.begun: list[str] = []
        self.records = {name: self.record(name, size) for name, size in sizes.items()}
        counts = SimpleNamespace(planned_moves=0, skipped_moves=0)
        self.mover: Any = SimpleNamespace(counts=counts, begin_fetch=self.arrive, end_evict=self.leave)
        self.residency: Any = SimpleNamespace(
            by_name=self.records,
            serial=1,
            failed={},
            in_use=lambda record: False,
            begin_evict=lambda record, tier: setattr(record, "state", State.LEAVING),
            makes_way=lambda extra_bytes, tick: extra_bytes <= self.room,
        )
        self.expected = Expectation(("p",), (TICKS,))

    @staticmethod
    def record(name: str, size: int) -> Any:
        return SimpleNamespace(
            name=name, size_bytes=size, state=State.AWAY, evictable=True, key=name, dead=lambda: False
        )

    def arrive(self, record: Any) -> None:
        self.begun.append(record.name)
        self.room -= record.size_bytes
        record.state = State.DEVICE

    def leave(self, record: Any) -> None:
        self.room += record.size_bytes
        record.state = State.AWAY

    def follow(self, *moves: Evict | Fetch) -> None:
        self.expected.follow(plan := Plan("", "greedy", 8, (), moves), table_of(plan, TICKS))
        self.follower = Follower(self.residency, self.mover)

    def at(self, tick: int, live_bytes: int = 0) -> list[str]:
        """What begins at this tick."""
        before = len(self.begun)
        if self.expected.moves_at(tick):
            self.follower.follow(Here(self.expected, tick, live_bytes), ())
        return self.begun[before:]


def test_a_late_fetch_begins_at_the_first_slot_with_room_and_in_the_order_of_the_plan() -> None:
    world = World(3, a=2, b=2, c=1)
    world.follow(Fetch("a", "ssd", 0, 3), Fetch("b", "ssd", 0, 3), Fetch("c", "ssd", 1, 3))
    assert world.at(0) == ["a"]
    assert not world.at(1, live_bytes=1), "neither b nor, beside what the kernel holds, c"
    assert world.expected.moves_at(2), "no move is planned there, but two are late"
    assert not world.at(2, live_bytes=1)
    world.room = 4
    assert world.at(3) == ["b", "c"]
    assert not world.expected.late
    assert not world.expected.moves_at(2)
    counts = world.mover.counts
    assert (counts.planned_moves, counts.skipped_moves) == (1, 2)


def test_what_came_in_another_way_is_not_late_any_more() -> None:
    world = World(0, a=2)
    world.follow(Fetch("a", "ssd", 0, 3))
    assert not world.at(0)
    world.records["a"].state = State.DEVICE  # a kernel needed it
    world.room = 2
    assert not world.at(1)
    assert not world.expected.late


@pytest.mark.parametrize("gone", ["by its plan", "with its last tensor"])
def test_what_is_to_be_gone_is_not_fetched_late(gone: str) -> None:
    world = World(0, a=2)
    world.follow(Fetch("a", "ssd", 0, 3), Evict("a", "ssd", 1))
    assert not world.at(0)
    if gone == "with its last tensor":
        world.records["a"].dead = lambda: True
    world.room = 2
    assert not world.at(1)
    assert not world.at(2)


def test_another_plan_knows_nothing_of_what_was_late() -> None:
    world = World(0, a=2)
    world.follow(Fetch("a", "ssd", 0, 3))
    assert not world.at(0)
    world.follow()
    world.room = 2
    assert not world.at(1)
