"""A compiled program. Its schedule (the list of its slots) is kept as tables that a slot can read fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from teraio.formats.schedule import IN_FLIGHT, MADE, READ, RETURNED, WRITE, Buffer, Schedule, Slot

from ..ledger.record import Record


@dataclass(frozen=True, slots=True)
class SlotNeeds:
    """The needs of one slot. A tensor is given by the number of its buffer in the program's schedule. Each
    entry of `made` is a pair: a position in the slot's list of tensors, and the number of the buffer
    there."""

    kernel: str
    made: tuple[tuple[int, int], ...]
    needed: tuple[int, ...]  # buffers that the kernel reads or writes
    written: tuple[int, ...]
    returned: tuple[int, ...]  # arguments that the program returns to its caller from this slot on
    live_bytes: int
    older_bytes: int


class Program:
    """A compiled program: its schedule as tables by slot. `bound` has the records of the running call's
    tensors, in the order of the schedule's buffers."""

    made_count = 0  # number of programs made so far

    def __init__(self, schedule: Schedule) -> None:
        Program.made_count += 1
        self.schedule = schedule
        self.identity = schedule.identity_hash
        self.own_identity = self.identity  # for a composed program: the identity without late updates
        self.labels: tuple[str, ...] = ()  # names of the arguments in the user's model, if known
        self.bound: list[Record | None] = [None] * len(schedule.buffers)
        self.stops = _needs_by_slot(schedule)
        self.last = len(self.stops) - 1
        self.unseen_bytes = [0] * len(self.stops)  # by slot: measured workspace of the slot's kernel
        # By slot: the workspace that the slot's kernel took and freed again in its first measured run. None
        # before that run.
        self.tried_bytes: list[int | None] = [None] * len(self.stops)
        self.growth_bytes = _peak_made_bytes(schedule, self.stops)
        # Numbers of the slots at which late updates run. Only a composed program has such slots.
        self.update_slots: frozenset[int] = frozenset()
        # Number of the program's own buffers. A composed program also has buffers of late updates.
        self.own_buffers = len(schedule.buffers)
        # Buffers that collectives use. A collective uses them until the program waits for it.
        self.in_flight = frozenset(b for slot in schedule.slots for b in _buffers_in_flight(slot))
        self.has_collectives = bool(schedule.collectives)
        self.checked = False  # True: the largest kernel was compared with the budget

    def begin_call(self, bound: list[Record | None] | None = None) -> None:
        """Begin a call of the program. `bound` has the record of each buffer. If `bound` is None, no record
        is known yet."""
        self.bound = [None] * len(self.schedule.buffers) if bound is None else bound

    def begin_check(self) -> bool:
        """Return True only at the first call of this method. The caller must then compare the program's
        largest kernel with the budget."""
        checked, self.checked = self.checked, True
        return not checked

    def note_unseen_bytes(self, index: int, size_bytes: int) -> None:
        """Record the measured workspace (bytes beside known tensors) of this slot's kernel."""
        self.unseen_bytes[index] = size_bytes

    def note_tried_bytes(self, index: int, size_bytes: int) -> None:
        """Record the workspace that this slot's kernel took and freed again in its first measured run."""
        self.tried_bytes[index] = size_bytes

    def unmovable_bytes_at_slot(self, index: int, told_bytes: int | None = None) -> int:
        """Return the number of bytes that cannot be evicted at this slot: (1) the program's own bytes and (2)
        the kernel's measured workspace.

        If sizes depend on the batch, the program passes the number of its own bytes as `told_bytes`.
        Otherwise the number is in the schedule.
        """
        told = self.stops[index].live_bytes if told_bytes is None else told_bytes
        return told + self.unseen_bytes[index]

    def older_bytes_at_slot(self, index: int, live_bytes: int) -> int:
        """Return the part of `live_bytes` that was allocated before this slot. If sizes depend on the batch,
        the part is not known, so return `live_bytes`. `live_bytes` is a result of
        `unmovable_bytes_at_slot`."""
        if self.schedule.symbolic:
            return live_bytes - self.unseen_bytes[index]
        return self.stops[index].older_bytes

    def become_composed(self, own: Program, places: Sequence[int], update_slots: Iterable[int]) -> None:
        """Record that this program is `own` with further slots for late updates. Slot `i` of `own` is slot
        `places[i]` of this program."""
        self.update_slots, self.own_buffers = frozenset(update_slots), own.own_buffers
        self.own_identity = own.own_identity
        self.labels = (*own.labels, *[""] * (len(self.bound) - own.own_buffers)) if own.labels else ()
        for index, place in enumerate(places):
            self.unseen_bytes[place] = own.unseen_bytes[index]
            self.tried_bytes[place] = own.tried_bytes[index]

    def label_of_buffer(self, buffer: int) -> str:
        """Return the name of a buffer in the user's model. If there is none, return the buffer's name in the
        schedule."""
        label = self.labels[buffer] if buffer < len(self.labels) else ""
        return label or self.schedule.buffers[buffer].name

    def is_weight(self, buffer: int, tensor: torch.Tensor) -> bool:
        """Return whether the argument `buffer` of the program is a weight. A weight is a torch Parameter, or
        a tensor with a name in the user's model."""
        return isinstance(tensor, torch.nn.Parameter) or (
            buffer < len(self.labels) and bool(self.labels[buffer])
        )

    def name_arguments(self, labels: Sequence[str]) -> None:
        """Give the program's arguments their names in the user's model. An empty name means that the argument
        is no weight.

        If the compiler has left out arguments, the names cannot be matched to arguments. In this case, forget
        all names.
        """
        arguments = sum(buffer.role == "argument" for buffer in self.schedule.buffers)
        self.labels = tuple(labels) if len(labels) == arguments else ()

    def largest_kernel_need(
        self, fixed_bytes: int, leaves: Callable[[Buffer], bool] = lambda about: False
    ) -> tuple[int, int, str]:
        """Return the largest need of the program's kernels. A need has three parts: (1) the bytes that cannot
        be evicted, (2) the bytes of the kernel, (3) the kernel's name.

        An evictable tensor counts at the kernels that touch it. A result counts from the kernel that makes
        it, unless `leaves` returns True for its buffer.

        The bytes in `fixed_bytes` count at all kernels, with one exception. A backward frees some of its
        unevictable arguments after their last use. So they do not count after it, although other code, which
        is not known yet, may still hold them.
        """
        most = (fixed_bytes, 0, "")
        results = 0
        let_go = self._released_arguments()
        sizes = [self._movable_bytes(number, leaves) for number in range(len(self.bound))]
        for index, stop in enumerate(self.stops):
            if index in self.update_slots:  # late_updates.py checks the needs of late updates
                continue
            for _, buffer in stop.made:
                about = self.schedule.buffers[buffer]
                results += about.size_bytes if about.role == "result" and not leaves(about) else 0
            movable = sum(sizes[buffer] for buffer in stop.needed)
            unmovable = fixed_bytes - sum(size for last, size in let_go if last < index)
            if unmovable + movable + results + stop.live_bytes > most[0] + most[1]:
                most = (unmovable, movable + results + stop.live_bytes, stop.kernel)
        return most

    def _released_arguments(self) -> list[tuple[int, int]]:
        """Return a pair for each unevictable argument that a backward can free: the last slot that uses it,
        and its number of bytes.

        A forward has no such argument, because the caller of a forward holds the arguments.
        """
        if self.schedule.kind != "backward":
            return []
        last: dict[int, tuple[int, int]] = {}  # by record key, because arguments may share a record
        for index, stop in enumerate(self.stops):
            for buffer in stop.needed:
                record = self.bound[buffer]
                if record is not None and not record.evictable and record.kind in {"activation", "input"}:
                    last[record.key] = (index, record.size_bytes)
        return list(last.values())

    def _movable_bytes(self, buffer: int, leaves: Callable[[Buffer], bool]) -> int:
        """Return the number of the buffer's bytes that can be evicted: all or none."""
        record, about = self.bound[buffer], self.schedule.buffers[buffer]
        if record is None:
            return about.size_bytes if about.role == "saved" or leaves(about) else 0
        return record.size_bytes if record.evictable else 0


def _peak_made_bytes(schedule: Schedule, stops: Sequence[SlotNeeds]) -> int:
    """Return the peak of the bytes that a call of the program makes, beside its arguments, if nothing is
    evicted."""
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
        sizes = slot.live_bytes, slot.older_bytes
        stops.append(SlotNeeds(slot.kernel, tuple(made), touched, written, returned, *sizes))
    return tuple(stops)


def _buffers_in_flight(slot: Slot) -> tuple[int, ...]:
    return _buffers_having_flag(slot.buffers, slot.flags, IN_FLIGHT)


def _buffers_having_flag(buffers: Sequence[int], flags: Sequence[int], wanted: int) -> tuple[int, ...]:
    return tuple(buffer for buffer, flag in zip(buffers, flags) if flag & wanted)
