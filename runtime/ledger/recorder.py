"""Events of a step, for a timeline: kernels, transfers, stalls, and resident bytes by kind.

    method                                         event                            -> part of the timeline
    note_slot_begin, note_kernel_begin             the previous kernel has ended    -> spans of compute
    note_move_begin                                a transfer entered its lane      -> spans of a lane
    note_move_end                                  the host waited for a transfer   -> a stall
    add_resident_bytes, subtract_resident_bytes    resident bytes changed           -> counters

Only an engine whose user asks for a timeline has a recorder. A transfer belongs to the step that began it and
may end in the next step. So the events of a step are complete only at the end of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from teraio.formats.timeline import ENTRIES_MAX, Counter, Span, Stall, Timeline

from .record import Record, State

DEVICE = "device"
NOT_WAITED_NS = 10_000  # the time of a wait for a transfer that has ended; a longer wait is a stall
QUEUED_PARTS = 4  # other transfers held up a transfer that was queued for 1/4 of its time


class RecordedProgram(Protocol):
    """The methods and fields of a program that a recorder needs."""

    stops: Sequence[Any]  # one per slot; its `kernel` is the kernel after the slot

    def unmovable_bytes_at_slot(self, index: int, measured: int | None) -> int:
        """Return the number of bytes that cannot move while the kernel after this slot runs."""
        ...


RunSlot = Callable[[Any, int, Sequence[Any], int | None], None]


@dataclass(slots=True)
class RecordedMove:
    """A transfer. If its lane measures no times, the transfer counts as active from its begin to its end."""

    track: str
    tensor: str
    size_bytes: int
    demand: bool
    begun_ns: int
    start_ns: int = 0
    end_ns: int = 0

    def stall_cause(self) -> str:
        """Return why compute waits for this move."""
        if self.demand:
            return "miss"
        queued_ns = self.start_ns - self.begun_ns
        held_up = queued_ns * QUEUED_PARTS > max(self.end_ns - self.begun_ns, 1)
        return "link busy" if held_up or self.track.startswith("evict") else "late read"


@dataclass(slots=True)
class RecordedStep:
    """The events of one step, in their order. Times are from time.perf_counter_ns."""

    began_ns: int
    bytes: dict[str, int]  # resident bytes by kind, when the step began
    kernels: list[tuple[str, int, int]] = field(default_factory=list)  # name, begin and end of each
    moves: list[RecordedMove] = field(default_factory=list)
    stalls: list[tuple[int, Stall]] = field(default_factory=list)  # the end of each stall, and the stall
    # Entries (time, kind, bytes): from this time on, this number of bytes of the kind is resident.
    changes: list[tuple[int, str, int]] = field(default_factory=list)
    overrun_bytes: int = 0
    broken: bool = False  # True: an exception ended a program, so the step is not whole
    end_ns: int = 0
    rank: tuple[bool, bool] = (False, False)  # (is it a training step, is it planned)

    @property
    def entry_count(self) -> int:
        return max(len(self.kernels) + len(self.moves), len(self.stalls), len(self.changes))


class Recorder:
    """The events of the running step, and the last whole step."""

    def __init__(
        self, budget_bytes: int, reserve_bytes: int, on_complete: Callable[[], None] = lambda: None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.on_complete = on_complete  # called when `complete` is set to another step
        self.resident: dict[int, tuple[str, int]] = {}  # storage key -> kind and bytes
        self.bytes: dict[str, int] = {}  # resident bytes by kind
        self.in_flight: dict[int, RecordedMove] = {}  # by storage key
        self.step = RecordedStep(0, {})
        self.last: RecordedStep | None = None  # the previous step, whose transfers may still be in flight
        # The last whole step. A step of inference does not replace a training step here.
        self.complete: RecordedStep | None = None
        self.entered_ns = 0  # the time when the last slot began
        self.in_slot = False

    # ---- events

    def record_each_slot_of(self, run_slot: RunSlot) -> RunSlot:
        """Wrap the engine's `run_slot`, so that this recorder notes when each slot begins and ends."""

        def run_and_record_slot(
            program: RecordedProgram, index: int, tensors: Sequence[Any], live_bytes: int | None
        ) -> None:
            workspace_bytes = program.unmovable_bytes_at_slot(index, live_bytes)
            self.note_slot_begin(workspace_bytes)
            try:
                run_slot(program, index, tensors, live_bytes)
            finally:
                self.in_slot = False
            self.note_kernel_begin(program.stops[index].kernel, workspace_bytes)

        return run_and_record_slot

    def note_slot_begin(self, workspace_bytes: int) -> None:
        """Record that a slot begins. The kernel after the slot takes `workspace_bytes` of workspace."""
        self.entered_ns = began_ns = time.perf_counter_ns()
        step = self._current_step(began_ns)
        if step.kernels:
            name, start_ns, _ = step.kernels[-1]
            step.kernels[-1] = (name, start_ns, began_ns)
        if step.entry_count > ENTRIES_MAX:  # a step with too many events is not recorded
            self.step = RecordedStep(began_ns, dict(self.bytes), broken=True)
        # The previous kernel has freed its workspace. The next kernel's workspace counts only after the slot
        # has made room for it.
        self._set_bytes_of_kind("workspace", min(workspace_bytes, self.bytes.get("workspace", 0)))
        self.in_slot = True

    def note_kernel_begin(self, kernel: str, workspace_bytes: int) -> None:
        now_ns = time.perf_counter_ns()
        self.step.kernels.append((kernel, now_ns, now_ns))  # the slot may have begun a new step
        self._set_bytes_of_kind("workspace", workspace_bytes)

    def _current_step(self, at_ns: int) -> RecordedStep:
        """Return the current step. The time of a step's first event is the begin of the step."""
        if not self.step.began_ns:
            self.step.began_ns = at_ns
            self.step.bytes = dict(self.bytes)
        return self.step

    def add_resident_bytes(self, record: Record) -> None:
        self.resident[record.key] = (record.kind, record.size_bytes)
        # A kernel made the tensor. Until now, the tensor's bytes counted as workspace.
        if self.in_slot and record.state is State.RESIDENT:
            self._set_bytes_of_kind("workspace", max(0, self.bytes.get("workspace", 0) - record.size_bytes))
        self._set_bytes_of_kind(record.kind, self.bytes.get(record.kind, 0) + record.size_bytes)

    def subtract_resident_bytes(self, record: Record) -> None:
        kind, size_bytes = self.resident.pop(record.key, ("", 0))
        if kind:
            self._set_bytes_of_kind(kind, self.bytes[kind] - size_bytes)

    def note_kind_change(self, record: Record) -> None:
        """Count the record's bytes under its new kind, if the record is resident."""
        if record.key in self.resident:
            kind, size_bytes = self.resident[record.key]
            self.resident[record.key] = (record.kind, size_bytes)
            self._set_bytes_of_kind(kind, self.bytes[kind] - size_bytes)
            self._set_bytes_of_kind(record.kind, self.bytes.get(record.kind, 0) + size_bytes)

    def _set_bytes_of_kind(self, kind: str, size_bytes: int) -> None:
        if self.bytes.get(kind, 0) != size_bytes:
            self.bytes[kind] = size_bytes
            now_ns = time.perf_counter_ns()
            self._current_step(now_ns).changes.append((now_ns, kind, size_bytes))

    def note_move_begin(self, record: Record, evict: bool, demand: bool = False) -> None:
        track = f"{'evict' if evict else 'fetch'}:{record.copy_tier}"
        move = RecordedMove(track, record.name, record.size_bytes, demand, time.perf_counter_ns())
        self.in_flight[record.key] = move
        self._current_step(move.begun_ns).moves.append(move)

    def note_move_end(self, record: Record, ticket: Any, waited_ns: int) -> None:
        """Record that a move ended, and how long the host waited for the move.

        If the host waits between two slots, user code waits. The stall then belongs to the earlier slot.
        """
        move = self.in_flight.pop(record.key, None)
        if move is None:
            return
        now_ns = time.perf_counter_ns()
        _, start_ns, end_ns = getattr(ticket, "times", None) or (0, 0, 0)
        move.start_ns, move.end_ns = start_ns or move.begun_ns, end_ns or now_ns
        if waited_ns >= NOT_WAITED_NS:
            step = self._current_step(now_ns - waited_ns)
            tick = len(step.kernels) - (not self.in_slot)
            step.stalls.append((now_ns, Stall(max(tick, 0), record.name, waited_ns, move.stall_cause())))

    def note_drop(self, record: Record) -> None:
        """Record a drop, in the lane `drop:...`. A drop takes no time."""
        now_ns = time.perf_counter_ns()
        move = RecordedMove(f"drop:{record.copy_tier}", record.name, 0, False, now_ns, now_ns, now_ns)
        self._current_step(now_ns).moves.append(move)

    def note_overrun(self, size_bytes: int) -> None:
        """Record the number of bytes that user code or a library's kernel allocated beyond the budget."""
        step = self._current_step(time.perf_counter_ns())
        step.overrun_bytes = max(step.overrun_bytes, size_bytes)

    def mark_step_broken(self) -> None:
        """Record that an exception ended a program, so that the step is not whole."""
        self.step.broken = True
        self.in_slot = False

    def end_slot(self, kernel: str, workspace_bytes: int) -> None:
        """Record that a slot ends and the kernel after it begins."""
        self.in_slot = False
        self.note_kernel_begin(kernel, workspace_bytes)

    def end_step(self, end_ns: int, training: bool, planned: bool) -> None:
        """End the step.

        The next step begins with the current slot. Events between `end_ns` and this slot are events of user
        code. They belong to the next step.
        """
        step, self.step = self.step, RecordedStep(self.entered_ns, dict(self.bytes))
        self.step.moves = [move for move in step.moves if move.begun_ns > end_ns]
        self.step.stalls = [(at, replace(stall, tick=0)) for at, stall in step.stalls if at > end_ns]
        better = self._better_ranked_step(self.last, self.complete)
        changed, self.complete, self.last = better is not self.complete, better, None
        if step.kernels and not step.broken:
            name, start_ns, _ = step.kernels[-1]
            step.end_ns, step.rank = max(start_ns, end_ns), (training, planned)
            step.kernels[-1] = (name, start_ns, step.end_ns)
            step.moves = [move for move in step.moves if move.begun_ns <= end_ns]
            step.stalls = [(at, stall) for at, stall in step.stalls if at <= end_ns]
            step.changes = [change for change in step.changes if change[0] <= end_ns]
            self.last = step
        if changed:
            self.on_complete()

    def restart_step_clock(self) -> None:
        """Restart the step's clock, because work between two steps, such as planning, belongs to neither of
        them."""
        self.step.began_ns = time.perf_counter_ns()

    def _better_ranked_step(self, new: RecordedStep | None, old: RecordedStep | None) -> RecordedStep | None:
        return new if new is not None and (old is None or new.rank >= old.rank) else old

    # ---- the recorded steps

    def last_whole_step(self, all_has_ended: bool = False) -> RecordedStep | None:
        """Return the last whole step. `all_has_ended` means that no transfer is in flight, so that the latest
        step is whole too."""
        return self._better_ranked_step(self.last, self.complete) if all_has_ended else self.complete

    def timeline(self, all_has_ended: bool = False) -> Timeline | None:
        """Return the timeline of the last whole step.

        Return None if no step is whole, or if the step has too many entries for a file.
        """
        step = self.last_whole_step(all_has_ended)
        if step is None or step.entry_count > ENTRIES_MAX - len(step.bytes) - 1:
            return None
        zero_ns = step.began_ns
        spans = [Span("compute", name, at - zero_ns, end - zero_ns) for name, at, end in step.kernels]
        for move in step.moves:
            # A move that user code began before the first slot may lie wholly or partly before the step's
            # begin.
            start_ns = max(0, (move.start_ns or move.begun_ns) - zero_ns)
            end_ns = max(start_ns, (move.end_ns or step.end_ns) - zero_ns)
            spans.append(Span(move.track, move.tensor, start_ns, end_ns, move.size_bytes, move.tensor))
        counters = [Counter(DEVICE, kind, 0, size) for kind, size in sorted(step.bytes.items())]
        counters.append(Counter(DEVICE, "reserve", 0, self.reserve_bytes))
        counters += [Counter(DEVICE, kind, max(0, at - zero_ns), size) for at, kind, size in step.changes]
        step_ns = step.end_ns - zero_ns
        return Timeline(
            "measured",
            tuple(spans),
            tuple(counters),
            tuple(stall for _, stall in step.stalls),
            self.budget_bytes,
            step_ns,
            step.overrun_bytes,
        )
