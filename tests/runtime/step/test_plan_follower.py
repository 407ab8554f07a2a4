"""Planned moves that are late.

If a fetch finds no room, it begins at the first slot with room. Fetches that come later in the plan must wait
for it. If a write is in flight at its `free` tick, the engine waits for the write only when another tensor
needs the room.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teraio.errors import StoreError
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.runtime.ledger.mover import MoveCounts
from teraio.runtime.ledger.pending_evictions import PendingEvictions
from teraio.runtime.ledger.record import Record, State, use_records
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.step.plan_follower import PlanFollower, SlotPosition
from teraio.runtime.step.tracker import Expectation

TICKS = 4


class World:
    """A toy ledger with evicted tensors, free bytes, and a list of the fetches that have begun."""

    def __init__(self, room: int, **sizes: int) -> None:
        self.room = room
        self.begun: list[str] = []
        self.tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
        self.records = {
            name: Record(tensor.untyped_storage(), name, "weight", evictable=True)
            for name, tensor in self.tensors.items()
        }
        for record in self.records.values():
            record.evicted()
        self.mover: Any = SimpleNamespace(counts=MoveCounts())
        self.writes: dict[str, Any] = {}  # the copy in flight of each record, by the record's name
        self.residency: Any = SimpleNamespace(
            mover=self.mover,
            by_name=self.records,
            serial=1,
            failed={},
            in_use=lambda record: False,
            fetch_ahead_if_memory=self.fetch,
            try_evict=self.write,
            try_end_evict=self.end_evict,
            try_room_by_planned_evictions=lambda extra_bytes, tick: extra_bytes <= self.room,
        )
        self.residency.pending_evictions = PendingEvictions(
            lambda record: record.name in self.used, self.end_evict
        )
        self.used: set[str] = set()
        self.expected = Expectation(("p",), (TICKS,))

    def writing(self, name: str) -> Any:
        """Make a tensor resident. A later eviction of the tensor lasts until the test ends the write."""
        done = SimpleNamespace(is_so=False)
        self.writes[name] = SimpleNamespace(done=lambda: done.is_so)
        self.records[name].resident()
        return done

    def write(self, record: Record, tier: str | None) -> bool:
        """Begin to evict a record. Return whether the eviction is in flight."""
        if record.state is State.RESIDENT:
            record.evicting(self.writes.get(record.name))
        return record.state is State.EVICTING

    def fetch(self, record: Record) -> bool:
        """Fetch a record. The fetch ends immediately."""
        self.begun.append(record.name)
        self.room -= record.size_bytes
        record.resident()
        return True

    def end_evict(self, record: Record) -> None:
        """End the eviction of a record, and free its bytes."""
        assert record.state is State.EVICTING
        self.room += record.size_bytes
        record.resident()
        record.evicted()

    def lose_last_tensor(self, name: str) -> None:
        """Delete the last reference to the tensor."""
        del self.tensors[name]
        assert self.records[name].is_dead()

    def follow(self, *moves: Evict | Fetch) -> None:
        self.expected.set_plan(Plan("", "greedy", 8, (), moves))
        self.follower = PlanFollower(self.residency)

    def at(self, tick: int, live_bytes: int = 0) -> list[str]:
        """Carry out the plan's moves at this tick. Return the fetches that begin."""
        before = len(self.begun)
        if self.expected.has_moves_at(tick):
            position = SlotPosition(self.expected, tick, live_bytes)
            self.follower.carry_out(self.expected.operations_at(tick), position)
            self.follower.begin_late_fetches(position)
        return self.begun[before:]


def test_a_late_fetch_begins_at_the_first_slot_with_room_and_in_the_order_of_the_plan() -> None:
    world = World(3, a=2, b=2, c=1)
    world.follow(Fetch("a", "ssd", 0, 3), Fetch("b", "ssd", 0, 3), Fetch("c", "ssd", 1, 3))
    assert world.at(0) == ["a"]
    assert not world.at(1, live_bytes=1), "b does not fit, and c does not fit beside the kernel's bytes"
    assert world.expected.has_moves_at(2), "no move is planned there, but two are late"
    assert not world.at(2, live_bytes=1)
    world.room = 4
    assert world.at(3) == ["b", "c"]
    assert not world.expected.late
    assert not world.expected.has_moves_at(2)
    counts = world.mover.counts
    assert (counts.planned_moves, counts.skipped_moves) == (1, 2)


def test_late_fetch_is_forgotten_if_a_kernel_fetched_the_tensor() -> None:
    world = World(0, a=2)
    world.follow(Fetch("a", "ssd", 0, 3))
    assert not world.at(0)
    world.records["a"].resident()  # as if a kernel had needed the tensor
    world.room = 2
    assert not world.at(1)
    assert not world.expected.late


@pytest.mark.parametrize("ended", ["evicted by its plan", "its last tensor died"])
def test_late_fetch_is_forgotten_if_the_tensor_is_evicted_or_dead(ended: str) -> None:
    world = World(0, a=2)
    world.follow(Fetch("a", "ssd", 0, 3), Evict("a", "ssd", 1))
    assert not world.at(0)
    if ended == "its last tensor died":
        world.lose_last_tensor("a")
    world.room = 2
    assert not world.at(1)
    assert not world.at(2)


def test_new_plan_has_no_late_fetches() -> None:
    world = World(0, a=2)
    world.follow(Fetch("a", "ssd", 0, 3))
    assert not world.at(0)
    world.follow()
    world.room = 2
    assert not world.at(1)


# ---- writes in flight, whose bytes the plan counts as free


def test_compute_does_not_wait_for_a_late_write_and_gets_its_room_when_it_ends() -> None:
    world = World(0, a=2, b=2)
    done = world.writing("a")
    world.follow(Evict("a", "ssd", 1, 0), Fetch("b", "ssd", 1, 3))
    assert not world.at(0)
    assert not world.at(1) and world.records["a"].state is State.EVICTING
    assert not world.at(2)
    done.is_so = True
    assert world.at(3) == ["b"], "b is late, because its room became free late"
    assert world.records["a"].state is State.EVICTED
    assert not world.residency.pending_evictions.records


def test_need_for_room_ends_as_many_writes_as_necessary_in_the_order_of_the_plan() -> None:
    world = World(0, a=2, b=2, c=2)
    for name in "abc":
        world.writing(name)
    world.follow(*(Evict(name, "ssd", tick, 0) for tick, name in enumerate("bca", 1)))
    for tick in range(4):
        world.at(tick)
    pending = world.residency.pending_evictions
    assert pending.size_bytes == 6
    assert pending.end_evictions_until_enough(lambda: world.room >= 3, by_plan=True) is None
    assert [world.records[name].state for name in "abc"] == [State.EVICTING, State.EVICTED, State.EVICTED]
    assert pending.size_bytes == 2 and world.room == 4


@pytest.mark.parametrize("why", ["a kernel uses it", "it is resident again", "it died"])
def test_late_write_frees_no_bytes_if_the_tensor_is_used_resident_or_dead(why: str) -> None:
    world = World(0, a=2)
    done = world.writing("a")
    world.follow(Evict("a", "ssd", 1, 0))
    world.at(0), world.at(1)
    if why == "it is resident again":
        world.records["a"].resident()
    elif why == "it died":  # the bytes of the dead tensor are already free
        world.records["a"].resident()
        world.records["a"].evicting(None)
        world.lose_last_tensor("a")
    else:
        world.used.add("a")
    done.is_so = True
    pending = world.residency.pending_evictions
    pending.end_evictions_already_written()
    assert pending.end_evictions_until_enough(lambda: False) is None
    assert pending.size_bytes == 0 == world.room
    assert world.records["a"].state is not State.EVICTED
    world.used.clear()
    pending.end_evictions_already_written()
    assert (world.records["a"].state is State.EVICTED) == (why == "a kernel uses it")


def test_planned_fetch_during_the_write_keeps_the_tensor_resident() -> None:
    """The planned fetch cancels the eviction: the tensor is neither read nor freed.

    Three planned moves count: the start of the eviction, its end, and the fetch.
    """
    world = World(0, a=2)
    done = world.writing("a")
    world.follow(Evict("a", "ssd", 1, 0), Fetch("a", "ssd", 2, 3))
    for tick in range(3):
        assert not world.at(tick)
    done.is_so = True
    world.residency.pending_evictions.end_evictions_already_written()
    assert world.records["a"].state is State.EVICTING and world.room == 0
    counts = world.mover.counts
    assert (counts.planned_moves, counts.skipped_moves) == (3, 0)


def test_failed_write_is_returned_to_the_caller_that_waited() -> None:
    world = World(0, a=2, b=2)
    failures = [StoreError("no room"), None]
    pending = PendingEvictions(lambda record: False, lambda record: failures.pop(0))
    for name in "ab":
        world.records[name].resident()
        world.records[name].evicting(None)
        pending.add(world.records[name])
    assert pending.end_evictions_until_enough(lambda: False, by_plan=True) is None and len(failures) == 2
    assert str(pending.end_evictions_until_enough(lambda: False)) == "no room"
    assert not failures and not pending.records


class Ledger(Residency):
    """A ledger whose moves end immediately and touch no storage."""

    def __init__(self, budget_bytes: int, **sizes: int) -> None:
        super().__init__(SimpleNamespace(), NullDevice(), budget_bytes, reserve_bytes=0)  # type: ignore[arg-type]
        self.tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
        for name, tensor in self.tensors.items():
            self.add_record_of_storage(tensor.untyped_storage(), name, "weight", evictable=True)
        self.ended: list[str] = []
        self.mover.begin_evict = self._begin  # type: ignore[method-assign]
        self.mover.end_evict = self._end  # type: ignore[method-assign]

    def _begin(self, record: Record, tier: str | None = None) -> None:
        if record.state is State.RESIDENT:
            record.evicting(None)

    def _end(self, record: Record) -> None:
        if record.state is State.EVICTING:
            record.resident()
            record.evicted()
            self.mover.subtract_resident_bytes(record)
            self.ended.append(record.name)


class NullDevice:
    """A device that counts no bytes."""

    observer = None

    def is_uncounted_in_used_bytes(self, storage: Any) -> bool:
        return False


def test_kernel_that_needs_room_waits_for_evictions_in_flight_before_it_begins_another() -> None:
    """Check that the engine waits for an eviction in flight instead of starting another one.

    The tensor `idle` would be the next to evict. But when the eviction of `pending` ends, it gives enough
    room.
    """
    ledger = Ledger(4, pending=2, idle=2)
    pending, idle = ledger.by_name["pending"], ledger.by_name["idle"]
    pending.evicting(None)
    use_records([pending], 0)
    use_records([idle], -1)
    ledger.pending_evictions.add(pending)
    assert ledger.evict_until_fits(0, None) == (0, None) and not ledger.ended
    assert ledger.evict_until_fits(1, None) == (0, None) and ledger.ended == ["pending"]
    assert ledger.evict_until_fits(4, None) == (0, None) and ledger.ended == ["pending", "idle"]


def test_tensors_that_are_small_beside_the_missing_bytes_are_evicted_last() -> None:
    """Evict tensors of one byte last, although their next use is the latest. Each eviction costs a transfer
    and frees only one byte."""
    ledger = Ledger(2009, late=1000, soon=1000, **{f"tiny{number}": 1 for number in range(9)})
    uses = {name: [{"late": 20.0, "soon": 10.0}.get(name, 40.0)] for name in ledger.by_name}
    ledger.expected_uses.expect(uses, 50)

    def victims(short: int) -> list[str]:
        return [record.name for record in ledger.victims(short, 5, None)]

    assert victims(700) == ["late"]
    assert victims(1500) == ["late", "soon"]
    assert victims(2003)[:2] == ["late", "soon"] and len(victims(2003)) == 5
    # If only 9 bytes are missing, tensors of one byte do not count as small.
    assert victims(9) == [f"tiny{number}" for number in range(9)]


class FailingWrites(NullDevice):
    """A device on which each copy out raises an error at its end."""

    def end_copy_without_freeing(self, pending: Any) -> None:
        raise StoreError("no room", tensor="a", path="")


@pytest.mark.parametrize("how", ["needed by a kernel", "to be fetched by its plan"])
def test_late_write_that_fails_is_no_error_of_the_kernel_that_needs_the_tensor(how: str) -> None:
    """Check that the tensor is resident and dirty. The engine does not evict this tensor again in this
    step."""
    residency = Residency(SimpleNamespace(), FailingWrites(), budget_bytes=2**20, reserve_bytes=0)  # type: ignore[arg-type]
    tensor = torch.zeros(4, dtype=torch.uint8)
    record = residency.add_record_of_storage(tensor.untyped_storage(), "a", "weight", evictable=True)
    pending: Any = SimpleNamespace(ticket=None)
    record.evicting(pending)
    residency.pending_evictions.add(record, by_plan=True)
    if how == "to be fetched by its plan":
        assert residency.pending_evictions.cancel_eviction(record)
    residency.make_resident_within_budget([record], 0, "kernel", None)
    assert record.state is State.RESIDENT and not record.clean
    assert residency.failed == {record.key: record} and residency.mover.counts.failed_moves == 1
