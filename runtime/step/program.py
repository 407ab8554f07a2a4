"""A compiled program as its slots see it: its schedule, read once into tables that a slot can use fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from teraio.formats.schedule import MADE, READ, RETURNED, WRITE, Buffer, Schedule

from ..ledger.record import Record


@dataclass(frozen=True, slots=True)
class SlotNeeds:
    """One slot. `made` pairs a position among the tensors it is handed with their buffer."""

    kernel: str
    made: tuple[tuple[int, int], ...]
    needed: tuple[int, ...]  # buffers that the kernel reads or writes
    written: tuple[int, ...]
    returned: tuple[int, ...]  # arguments whose memory is the caller's from here on
    live_bytes: int


class Program:
    """`bound` holds the records of the call that is running."""

    made_count = 0  # of all programs

    def __init__(self, schedule: Schedule) -> None:
        Program.made_count += 1
        self.schedule = schedule
        self.identity = schedule.identity_hash
        self.labels: tuple[str, ...] = ()  # the user's names of the arguments, where known
        self.bound: list[Record | None] = [None] * len(schedule.buffers)
        self.stops = _needs_by_slot(schedule)
        self.last = len(self.stops) - 1
        self.unseen_bytes = [0] * len(self.stops)  # by slot: what its kernel was seen to take besides
        # By slot: what came and went in its kernel's first measured run; None before that.
        self.tried_bytes: list[int | None] = [None] * len(self.stops)
        self.growth_bytes = _peak_made_bytes(schedule, self.stops)
        self.checked = False  # its largest kernel was compared with the budget

    def unmovable_bytes_at_slot(self, index: int, told_bytes: int | None = None) -> int:
        """What no one can move at this slot: what the program tells of, by the schedule if it does not tell
        now, and what its kernel was seen to take besides."""
        told = self.stops[index].live_bytes if told_bytes is None else told_bytes
        return told + self.unseen_bytes[index]

    def label_of_buffer(self, buffer: int) -> str:
        label = self.labels[buffer] if buffer < len(self.labels) else ""
        return label or self.schedule.buffers[buffer].name

    def is_weight(self, buffer: int, tensor: torch.Tensor) -> bool:
        """A parameter, or what has the name of a module's buffer."""
        return isinstance(tensor, torch.nn.Parameter) or (
            buffer < len(self.labels) and bool(self.labels[buffer])
        )

    def name_arguments(self, labels: Sequence[str]) -> None:
        """The user's names of the arguments, "" for what is no weight. They are given up if the compiler left
        arguments out: then it is not known whose they are."""
        arguments = sum(buffer.role == "argument" for buffer in self.schedule.buffers)
        self.labels = tuple(labels) if len(labels) == arguments else ()

    def largest_kernel_need(
        self, fixed_bytes: int, leaves: Callable[[Buffer], bool] = lambda about: False
    ) -> tuple[int, int, str]:
        """The most bytes that must be there at once while it runs, with everything else away: those that
        cannot move, those of the kernel, and its name. What can move counts where a kernel touches it,
        results stay from where they are made, but for those that leave. Of `fixed_bytes`, which cannot move
        when it begins, a backward lets its arguments go after their last use. No one knows yet who else has
        them."""
        most = (fixed_bytes, 0, "")
        results = 0
        let_go = self._released_arguments()
        sizes = [self._movable_bytes(number, leaves) for number in range(len(self.bound))]
        for index, stop in enumerate(self.stops):
            for _, buffer in stop.made:
                about = self.schedule.buffers[buffer]
                results += about.size_bytes if about.role == "result" and not leaves(about) else 0
            movable = sum(sizes[buffer] for buffer in stop.needed)
            stays = fixed_bytes - sum(size for last, size in let_go if last < index)
            if stays + movable + results + stop.live_bytes > most[0] + most[1]:
                most = (stays, movable + results + stop.live_bytes, stop.kernel)
        return most

    def _released_arguments(self) -> list[tuple[int, int]]:
        """Arguments that cannot move and no one needs to keep: the last slot that needs each, and its bytes.
        Those of a forward are held by its caller."""
        if self.schedule.kind != "backward":
            return []
        last: dict[int, tuple[int, int]] = {}  # by record: arguments may share one
        for index, stop in enumerate(self.stops):
            for buffer in stop.needed:
                record = self.bound[buffer]
                if record is not None and not record.evictable and record.kind in {"activation", "input"}:
                    last[record.key] = (index, record.size_bytes)
        return list(last.values())

    def _movable_bytes(self, buffer: int, leaves: Callable[[Buffer], bool]) -> int:
        record, about = self.bound[buffer], self.schedule.buffers[buffer]
        if record is None:
            return about.size_bytes if about.role == "saved" or leaves(about) else 0
        return record.size_bytes if record.evictable else 0


def _peak_made_bytes(schedule: Schedule, stops: Sequence[SlotNeeds]) -> int:
    """The most that a call holds at once beside its arguments, if nothing leaves."""
    most = made = 0
    for stop in stops:
        about = [schedule.buffers[buffer] for _, buffer in stop.made]
        made += sum(buffer.size_bytes for buffer in about if buffer.role != "argument")
        most = max(most, made + stop.live_bytes)
    return most


def _needs_by_slot(schedule: Schedule) -> tuple[SlotNeeds, ...]:
    given: set[int] = set()
    stops: list[SlotNeeds] = []
    for slot in schedule.slots:
        made: list[tuple[int, int]] = []
        for position, (buffer, flags) in enumerate(zip(slot.buffers, slot.flags)):
            if flags & MADE or buffer not in given:
                made.append((position, buffer))
                given.add(buffer)
        touched = _buffers_having_flag(slot.buffers, slot.flags, READ | WRITE)
        written = _buffers_having_flag(slot.buffers, slot.flags, WRITE)
        returned = _buffers_having_flag(slot.buffers, slot.flags, RETURNED)
        stops.append(SlotNeeds(slot.kernel, tuple(made), touched, written, returned, slot.live_bytes))
    return tuple(stops)


def _buffers_having_flag(buffers: Sequence[int], flags: Sequence[int], wanted: int) -> tuple[int, ...]:
    return tuple(buffer for buffer, flag in zip(buffers, flags) if flag & wanted)
