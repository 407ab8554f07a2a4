"""A compiled program as its slots see it: its schedule, read once into tables that a slot can use fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from teraio.schedule import MADE, READ, RETURNED, WRITE, Schedule

from .records import Record


@dataclass(frozen=True, slots=True)
class Stop:
    """One slot. `made` pairs a position among the tensors it is handed with their buffer."""

    kernel: str
    made: tuple[tuple[int, int], ...]
    needed: tuple[int, ...]  # buffers that the kernel reads or writes
    written: tuple[int, ...]
    returned: tuple[int, ...]  # arguments whose memory is the caller's from here on
    live_bytes: int


class Program:
    """`bound` holds the records of the call that is running."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.identity = schedule.identity
        self.labels: tuple[str, ...] = ()  # the user's names of the arguments, where known
        self.bound: list[Record | None] = [None] * len(schedule.buffers)
        self.stops = _stops(schedule)
        self.last = len(self.stops) - 1
        self.checked = False  # its largest kernel was compared with the budget

    def label(self, buffer: int) -> str:
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

    def floor(self) -> tuple[int, str]:
        """The most bytes that must be there at once while it runs, with everything else away, and the kernel:
        what can move counts where a kernel touches it, results stay from where they are made."""
        largest, kernel = 0, ""
        results = 0
        for stop in self.stops:
            for _, buffer in stop.made:
                about = self.schedule.buffers[buffer]
                results += about.size_bytes if about.role == "result" else 0
            movable = sum(size for buffer in stop.needed if (size := self._movable_bytes(buffer)))
            if movable + results + stop.live_bytes > largest:
                largest, kernel = movable + results + stop.live_bytes, stop.kernel
        return largest, kernel

    def _movable_bytes(self, buffer: int) -> int:
        record, about = self.bound[buffer], self.schedule.buffers[buffer]
        if record is None:
            return about.size_bytes if about.role == "saved" else 0
        return record.size_bytes if record.evictable else 0


def _stops(schedule: Schedule) -> tuple[Stop, ...]:
    given: set[int] = set()
    stops: list[Stop] = []
    for slot in schedule.slots:
        made: list[tuple[int, int]] = []
        for position, (buffer, flags) in enumerate(zip(slot.buffers, slot.flags)):
            if flags & MADE or buffer not in given:
                made.append((position, buffer))
                given.add(buffer)
        touched = _with_flags(slot.buffers, slot.flags, READ | WRITE)
        written = _with_flags(slot.buffers, slot.flags, WRITE)
        returned = _with_flags(slot.buffers, slot.flags, RETURNED)
        stops.append(Stop(slot.kernel, tuple(made), touched, written, returned, slot.live_bytes))
    return tuple(stops)


def _with_flags(buffers: Sequence[int], flags: Sequence[int], wanted: int) -> tuple[int, ...]:
    return tuple(buffer for buffer, flag in zip(buffers, flags) if flag & wanted)
