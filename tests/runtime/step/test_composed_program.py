"""Tests of composed programs: a program with slots for late updates, and the map from its own slots."""

from __future__ import annotations

from teraio.formats.schedule import MADE, READ, WRITE, Buffer, Schedule, Slot
from teraio.runtime.step.composed_program import Composition, UpdateSlot, compose
from teraio.runtime.step.program import Program


def program() -> Program:
    """Return a program of two kernels. The first makes an activation of 50 bytes and a temporary tensor of 10
    bytes. The second reads both."""
    buffers = (
        Buffer("w0", "argument", 100),
        Buffer("w1", "argument", 200),
        Buffer("saved", "saved", 50, again=(1,)),
    )
    slots = (
        Slot("enter", (0, 1), (0, 0), 0),
        Slot("first", (0,), (READ,), 60),
        Slot("second", (2, 1), (MADE | READ, READ), 30, older_bytes=10),
        Slot("exit", (), (), 0),
    )
    return Program(Schedule("forward", buffers, slots))


def composed(*updates: UpdateSlot) -> tuple[Program, Composition]:
    own = program()
    return own, compose(own, updates)


def update(before: int, name: str, buffer: int, kernel: str = "update") -> UpdateSlot:
    tensors = ((name, 200, buffer, READ | WRITE), (f"{name}.grad", 200, -1, READ))
    return UpdateSlot(before, kernel, tensors, 7)


def test_an_update_gets_a_slot_before_the_kernel_that_needs_it() -> None:
    _, made = composed(update(2, "w1", 1))
    assert (made.places, made.update_places) == ((0, 1, 3, 4), (2,))
    kernels = [slot.kernel for slot in made.program.schedule.slots]
    assert kernels == ["enter", "first", "update", "second", "exit"]
    assert made.program.update_slots == {2}
    assert made.program.identity != program().identity


def test_tensors_of_the_previous_kernel_are_handed_over_at_the_first_update() -> None:
    _, made = composed(update(2, "w1", 1), update(2, "w0", 0, "other"))
    stops = made.program.stops
    assert stops[2].made == ((0, 2), (3, 3))  # `saved`, and the gradient of the update
    assert stops[3].made == ((1, 4),)  # the other gradient
    assert stops[4].made == ()
    assert stops[4].needed == (2, 1)


def test_an_update_counts_the_bytes_that_both_neighbours_hold_and_its_own() -> None:
    """The activation that the kernel before has made is a known tensor at the update's slot."""
    _, made = composed(update(2, "w1", 1), update(2, "w0", 0, "other"))
    assert [made.program.stops[at].live_bytes for at in (2, 3)] == [10 + 7, 10 + 7]


def test_the_needs_of_updates_are_not_needs_of_the_program() -> None:
    own, made = composed(UpdateSlot(2, "update", (("state", 10**6, -1, READ),), 10**6))
    assert made.program.largest_kernel_need(0) == own.largest_kernel_need(0)


def test_measured_workspaces_and_chains_of_kernels_keep_their_slots() -> None:
    own = program()
    own.note_unseen_bytes(2, 99)
    made = compose(own, [update(1, "w0", 0)])
    assert made.program.unseen_bytes == [0, 0, 0, 99, 0]
    assert made.program.schedule.buffers[2].again == (2,)
    assert made.program.own_buffers == 3
