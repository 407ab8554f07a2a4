"""A planned fetch that finds no room is late: it begins when there is room, before those that come after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from teraio.errors import StoreError
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.runtime.ledger.device_shortage import DeviceShortage
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.pending_evictions import PendingEvictions
from teraio.runtime.ledger.record import State
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.step.plan_follower import PlanFollower, SlotPosition
from teraio.runtime.step.tracker import Expectation

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
            begin_evict_if_resizable=lambda record, tier: setattr(record, "state", State.LEAVING),
            try_room_by_planned_evictions=lambda extra_bytes, tick: extra_bytes <= self.room,
        )
        self.residency.shortage = DeviceShortage(self.mover, lambda stays: None)  # type: ignore[arg-type]
        self.residency.pending_evictions = PendingEvictions(
            lambda record: record.name in self.used, self.leave
        )
        self.used: set[str] = set()
        self.expected = Expectation(("p",), (TICKS,))

    @staticmethod
    def record(name: str, size: int) -> Any:
        return SimpleNamespace(
            name=name,
            size_bytes=size,
            state=State.AWAY,
            evictable=True,
            key=name,
            pending=None,
            is_dead=lambda: False,
        )

    def writing(self, name: str) -> Any:
        """It is here, and its write takes until someone says that it is done."""
        record, done = self.records[name], SimpleNamespace(is_so=False)
        record.state, record.pending = State.DEVICE, SimpleNamespace(done=lambda: done.is_so)
        return done

    def arrive(self, record: Any) -> None:
        self.begun.append(record.name)
        self.room -= record.size_bytes
        record.state = State.DEVICE

    def leave(self, record: Any) -> None:
        assert record.state is State.LEAVING
        self.room += record.size_bytes
        record.state = State.AWAY

    def follow(self, *moves: Evict | Fetch) -> None:
        self.expected.set_plan(Plan("", "greedy", 8, (), moves))
        self.follower = PlanFollower(self.residency, self.mover)

    def at(self, tick: int, live_bytes: int = 0) -> list[str]:
        """What begins at this tick."""
        before = len(self.begun)
        if self.expected.has_moves_at(tick):
            self.follower.follow_plan_at_slot(SlotPosition(self.expected, tick, live_bytes), ())
        return self.begun[before:]


def test_a_late_fetch_begins_at_the_first_slot_with_room_and_in_the_order_of_the_plan() -> None:
    world = World(3, a=2, b=2, c=1)
    world.follow(Fetch("a", "ssd", 0, 3), Fetch("b", "ssd", 0, 3), Fetch("c", "ssd", 1, 3))
    assert world.at(0) == ["a"]
    assert not world.at(1, live_bytes=1), "neither b nor, beside what the kernel holds, c"
    assert world.expected.has_moves_at(2), "no move is planned there, but two are late"
    assert not world.at(2, live_bytes=1)
    world.room = 4
    assert world.at(3) == ["b", "c"]
    assert not world.expected.late
    assert not world.expected.has_moves_at(2)
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
        world.records["a"].is_dead = lambda: True
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


# ---- writes whose room is free by the plan


def test_a_write_that_is_not_done_is_not_waited_for_and_gives_its_room_when_it_is() -> None:
    world = World(0, a=2, b=2)
    done = world.writing("a")
    world.follow(Evict("a", "ssd", 1, 0), Fetch("b", "ssd", 1, 3))
    assert not world.at(0)
    assert not world.at(1) and world.records["a"].state is State.LEAVING
    assert not world.at(2)
    done.is_so = True
    assert world.at(3) == ["b"], "late, as its room was"
    assert world.records["a"].state is State.AWAY
    assert not world.residency.pending_evictions.records


def test_who_needs_room_waits_for_as_many_as_it_takes_in_the_order_of_the_plan() -> None:
    world = World(0, a=2, b=2, c=2)
    for name in "abc":
        world.writing(name)
    world.follow(*(Evict(name, "ssd", tick, 0) for tick, name in enumerate("bca", 1)))
    for tick in range(4):
        world.at(tick)
    going = world.residency.pending_evictions
    assert going.size_bytes == 6
    assert going.end_evictions_until_enough(lambda: world.room >= 3, by_plan=True) is None
    assert [world.records[name].state for name in "abc"] == [State.LEAVING, State.AWAY, State.AWAY]
    assert going.size_bytes == 2 and world.room == 4


@pytest.mark.parametrize("why", ["a kernel uses it", "it came back", "it died"])
def test_what_is_needed_after_all_does_not_go(why: str) -> None:
    world = World(0, a=2)
    done = world.writing("a")
    world.follow(Evict("a", "ssd", 1, 0))
    world.at(0), world.at(1)
    if why == "it came back":
        world.records["a"].state = State.DEVICE
    elif why == "it died":  # its bytes with it, and they are counted
        world.records["a"].pending, world.records["a"].is_dead = None, lambda: True
    else:
        world.used.add("a")
    done.is_so = True
    going = world.residency.pending_evictions
    going.end_evictions_already_written()
    assert going.end_evictions_until_enough(lambda: False) is None
    assert going.size_bytes == 0 == world.room
    assert world.records["a"].state is not State.AWAY
    world.used.clear()
    going.end_evictions_already_written()
    assert (world.records["a"].state is State.AWAY) == (why == "a kernel uses it")


def test_what_is_to_come_back_before_it_has_gone_stays() -> None:
    """Neither read nor freed, and the plan was followed."""
    world = World(0, a=2)
    done = world.writing("a")
    world.follow(Evict("a", "ssd", 1, 0), Fetch("a", "ssd", 2, 3))
    for tick in range(3):
        assert not world.at(tick)
    done.is_so = True
    world.residency.pending_evictions.end_evictions_already_written()
    assert world.records["a"].state is State.LEAVING and world.room == 0
    counts = world.mover.counts
    assert (counts.planned_moves, counts.skipped_moves) == (3, 0)


def test_a_write_that_failed_is_told_to_who_waited() -> None:
    world = World(0, a=2, b=2)
    failures = [StoreError("no room"), None]
    going = PendingEvictions(lambda record: False, lambda record: failures.pop(0))
    for name in "ab":
        world.records[name].state = State.LEAVING
        going.add(world.records[name])
    assert going.end_evictions_until_enough(lambda: False, by_plan=True) is None and len(failures) == 2
    assert str(going.end_evictions_until_enough(lambda: False)) == "no room"
    assert not failures and not going.records


def test_a_kernel_that_needs_room_sends_no_other_tensor_away_for_it() -> None:
    """Nor does it wait where there is room: `idle` is the first that would leave, but what is under way is
    enough."""
    world = World(0, gone=2, idle=2)
    mover: Any = SimpleNamespace(resident_bytes=4)
    residency = Residency(mover, budget_bytes=4, reserve_bytes=0)
    for record in world.records.values():
        record.state, record.used_at, record.pins = State.DEVICE, 0, 0
        residency.records[record.key] = record
    ended: list[str] = []

    def end_evict(record: Any) -> None:
        record.state = State.AWAY
        mover.resident_bytes -= record.size_bytes
        ended.append(record.name)

    mover.begin_evict = lambda record, tier: setattr(record, "state", State.LEAVING)
    mover.end_evict = end_evict
    world.records["idle"].storage, world.records["idle"].used_at = lambda: None, -1
    world.records["gone"].state = State.LEAVING
    residency.pending_evictions.add(world.records["gone"])
    residency.forget_dead_records = lambda among=None: None  # type: ignore[method-assign]
    assert residency.evict_until_fits(0, None) == (0, None) and not ended
    assert residency.evict_until_fits(1, None) == (0, None) and ended == ["gone"]
    assert residency.evict_until_fits(4, None) == (0, None) and ended == ["gone", "idle"]


def test_what_is_next_to_nothing_leaves_last() -> None:
    """However late it is used: a transfer each would be all that small ones bring."""
    world = World(0, late=1000, soon=1000, **{f"tiny{number}": 1 for number in range(9)})
    mover: Any = SimpleNamespace(resident_bytes=2009)
    residency = Residency(mover, budget_bytes=2009, reserve_bytes=0)
    residency.step_ticks = 50
    for record in world.records.values():
        record.state, record.used_at, record.pins, record.kind = State.DEVICE, 0, 0, "weight"
        residency.records[record.key] = record
        residency.uses[record.name] = [{"late": 20.0, "soon": 10.0}.get(record.name, 40.0)]

    def leaving(short: int) -> list[str]:
        return [record.name for record in residency.victims(short, 5, None)]

    assert leaving(700) == ["late"]
    assert leaving(1500) == ["late", "soon"]
    assert leaving(2003)[:2] == ["late", "soon"] and len(leaving(2003)) == 5
    assert leaving(9) == [f"tiny{number}" for number in range(9)]  # of so little they are not nothing


@pytest.mark.parametrize("how", ["needed by a kernel", "to come back by its plan"])
def test_a_late_write_that_fails_is_no_error_of_who_needs_the_tensor(how: str) -> None:
    """Its bytes are in memory; it is dirty, and not tried again in this step."""

    def keep(storage: Any, pending: Any) -> None:
        raise StoreError("no room", tensor="a", path="")

    device: Any = SimpleNamespace(end_copy_without_freeing=lambda pending: keep(None, pending))
    mover = Mover(SimpleNamespace(), device)  # type: ignore[arg-type]
    residency = Residency(mover, budget_bytes=2**20, reserve_bytes=0)
    record: Any = SimpleNamespace(
        name="a", key=1, size_bytes=4, state=State.LEAVING, evictable=True, used_at=0, pins=0, clean=False
    )
    record.pending, record.is_dead = SimpleNamespace(ticket=None), lambda: False
    residency.pending_evictions.add(record, by_plan=True)
    if how == "to come back by its plan":
        assert residency.pending_evictions.cancel_eviction(record)
    residency.make_resident_within_budget([record], 0, "kernel", None)
    assert record.state is State.DEVICE and not record.clean
    assert residency.failed == {1: record} and mover.counts.failed_moves == 1
