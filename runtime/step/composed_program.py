"""Composed programs. A composed program is a compiled program with further slots, at which late updates run.

    slots of the program            0   1   2   3   4
    an update before slot 2         0   1   u   2   3   4
    slots of the composed program   0   1   2   3   4   5

The compiled code does not change. The engine maps each of its slots to a slot of the composed program, and
runs the updates in between. A step with a composed program is another kind of step than a step without, with
measurements and a plan of its own.

The kernel before slot 2 has made tensors. They are handed over at the first update's slot, and no longer at
slot 2, because the update's slot already counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from teraio.formats.schedule import MADE, READ, RETURNED, WRITE, Buffer, Slot

from .program import Program


@dataclass(frozen=True, slots=True)
class UpdateSlot:
    """A slot for a late update.

    before      the slot of the program before which the update runs
    tensors     (name, size_bytes, buffer, flags) for each tensor; `buffer` is its number in the program's
                schedule, or -1
    """

    before: int
    kernel: str
    tensors: tuple[tuple[str, int, int, int], ...]
    own_bytes: int


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed program. Slot `i` of the compiled code is slot `places[i]` of the program, and update `j` is
    slot `update_places[j]`."""

    program: Program
    places: tuple[int, ...]
    update_places: tuple[int, ...]


def compose(program: Program, updates: Sequence[UpdateSlot]) -> Composition:
    """Return the program with these updates. They are in the order in which they run."""
    schedule = program.schedule
    buffers = list(schedule.buffers)
    added: dict[str, int] = {}  # name of a tensor of an update -> number of its new buffer
    slots: list[Slot] = []
    places: list[int] = []
    update_places: list[int] = []
    for index, slot in enumerate(schedule.slots):
        here = [update for update in updates if update.before == index]
        for number, update in enumerate(here):
            numbers, flags = [], []
            for name, size_bytes, buffer, use in update.tensors:
                if buffer < 0 and name not in added:
                    added[name] = len(buffers)
                    buffers.append(Buffer(name, "argument", size_bytes))
                numbers.append(buffer if buffer >= 0 else added[name])
                flags.append(use)
            given = slot if number == 0 else Slot("", (), (), 0)
            update_places.append(len(slots))
            slots.append(
                Slot(
                    update.kernel,
                    (*given.buffers, *numbers),
                    (*(flag & MADE for flag in given.flags), *flags),
                    slot.older_bytes + update.own_bytes,
                    slot.older_bytes,
                )
            )
        places.append(len(slots))
        slots.append(_without_made(slot) if here else slot)
    moved = [replace(buffer, again=tuple(places[at] for at in buffer.again)) for buffer in buffers]
    made = Program(replace(schedule, buffers=tuple(moved), slots=tuple(slots)))
    made.become_composed(program, places, update_places)
    return Composition(made, tuple(places), tuple(update_places))


def _without_made(slot: Slot) -> Slot:
    """Return the slot without the tensors that the previous kernel made, except those that the next kernel
    uses."""
    kept = [
        (buffer, use)
        for buffer, flags in zip(slot.buffers, slot.flags)
        if (use := flags & (READ | WRITE | RETURNED))
    ]
    buffers, flags = zip(*kept) if kept else ((), ())
    return replace(slot, buffers=tuple(buffers), flags=tuple(flags))
