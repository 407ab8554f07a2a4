"""Events of a step, for a timeline: kernels, transfers, stalls, and resident bytes by kind.

    method                                         event                            -> part of the timeline
    note_slot_begin, note_kernel_begin             the previous kernel has ended    -> spans of compute
    note_move_begin                                a transfer entered its lane      -> spans of a lane
    note_move_end                                  the host waited for a transfer   -> a stall
    add_resident_bytes, subtract_resident_bytes    resident bytes changed           -> counters

An engine has a recorder only if the user requests a timeline. A transfer belongs to the step in which it
begins, but may end in the next step. So the events of a step are complete only at the end of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from teraio.formats.timeline import ENTRIES_MAX, Counter, Span, Stall, Timeline

from .record import Record, State

DEVICE = "device"
NOT_WAITED_NS = 10_000  # a shorter wait is no stall: the transfer had ended before
QUEUED_PARTS = 4  # if a transfer is queued for more than 1/4 of its time, other transfers delay it


class RecordedProgram(Protocol):
    """The methods and fields of a program that a recorder uses."""

    stops: Sequence[Any]  # one entry for each slot; `kernel` of an entry is the kernel after the slot

    def unmovable_bytes_at_slot(self, index: int, measured: int | None) -> int:
        """Return the bytes that the program and the kernel after this slot hold outside of records."""
        ...


RunSlot = Callable[[Any, int, Sequence[Any], int | None], None]


@dataclass(slots=True)
class RecordedMove:
    """A transfer. If its lane measures no times, the transfer counts as active from `begun_ns` on."""

    track: str
    tensor: str
    size_bytes: int
    demand: bool
    begun_ns: int
    start_ns: int = 0
    end_ns: int = 0

    def stall_cause(self) -> str:
        """Return the cause of a wait for this move: "miss", "link busy" or "late read"."""
        if self.demand:
            return "miss"
        queued_ns = self.start_ns - self.begun_ns
        held_up = queued_ns * QUEUED_PARTS > max(self.end_ns - self.begun_ns, 1)
        return "link busy" if held_up or self.track.startswith("evict") else "late read"


@dataclass(slots=True)
class RecordedStep:
    """The events of one step, in the order of their times. Times are from time.perf_counter_ns."""

    began_ns: int
    bytes: dict[str, int]  # resident bytes by kind, at the begin of the step
    kernels: list[tuple[str, int, int]] = field(default_factory=list)  # (name, begin, end)
    moves: list[RecordedMove] = field(default_factory=list)
    stalls: list[tuple[int, Stall]] = field(default_factory=list)  # (time at which the stall ends, stall)
    # Entries (time, kind, bytes): from this time on, this number of bytes of the kind is resident.
    changes: list[tuple[int, str, int]] = field(default_factory=list)
    overrun_bytes: int = 0
    broken: bool = False  # True: the step is incomplete, because an exception ended a program
    end_ns: int = 0
    rank: tuple[bool, bool] = (False, False)  # (True for a training step, True for a step with a plan)

    @property
    def entry_count(self) -> int:
        return max(len(self.kernels) + len(self.moves), len(self.stalls), len(self.changes))


class Recorder:
    """The object that records the events of the running step, and keeps the last whole step.

    A step is whole if no exception ended it, and all its transfers have ended.
    """

    def __init__(
        self, budget_bytes: int, reserve_bytes: int, on_complete: Callable[[], None] = lambda: None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.on_complete = on_complete  # called whenever `complete` changes
        self.resident: dict[int, tuple[str, int]] = {}  # storage key -> kind and bytes
        self.bytes: dict[str, int] = {}  # resident bytes by kind
        self.in_flight: dict[int, RecordedMove] = {}  # by storage key
        self.step = RecordedStep(0, {})
        self.last: RecordedStep | None = None  # the previous step; its transfers may still be in flight
        # The last whole step. A step of inference does not replace a training step.
        self.complete: RecordedStep | None = None
        self.entered_ns = 0  # time at which the last slot began
        self.in_slot = False

    # ---- events

    def record_each_slot_of(self, run_slot: RunSlot) -> RunSlot:
        """Wrap the engine's `run_slot`, so that this recorder records the begin and end of each slot."""

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
        """Record that a slot begins. The kernel after this slot takes `workspace_bytes` of workspace."""
        self.entered_ns = began_ns = time.perf_counter_ns()
        step = self._current_step(began_ns)
        if step.kernels:
            name, start_ns, _ = step.kernels[-1]
            step.kernels[-1] = (name, start_ns, began_ns)
        if step.entry_count > ENTRIES_MAX:  # too many events for a timeline: do not record this step
            self.step = RecordedStep(began_ns, dict(self.bytes), broken=True)
        # The previous kernel has freed its workspace. The next kernel's workspace counts from the end of this
        # slot, which makes room for it. Until then, count the smaller of the two.
        self._set_bytes_of_kind("workspace", min(workspace_bytes, self.bytes.get("workspace", 0)))
        self.in_slot = True

    def note_kernel_begin(self, kernel: str, workspace_bytes: int) -> None:
        now_ns = time.perf_counter_ns()
        self.step.kernels.append((kernel, now_ns, now_ns))  # `self.step` may be new since the slot's begin
        self._set_bytes_of_kind("workspace", workspace_bytes)

    def _current_step(self, at_ns: int) -> RecordedStep:
        """Return the current step. If the step has no begin yet, it begins with this event, at `at_ns`."""
        if not self.step.began_ns:
            self.step.began_ns = at_ns
            self.step.bytes = dict(self.bytes)
        return self.step

    def add_resident_bytes(self, record: Record) -> None:
        self.resident[record.key] = (record.kind, record.size_bytes)
        # In a slot, a new resident record is a tensor that the previous kernel has made. The tensor's bytes
        # counted as workspace until now.
        if self.in_slot and record.state is State.RESIDENT:
            self._set_bytes_of_kind("workspace", max(0, self.bytes.get("workspace", 0) - record.size_bytes))
        self._set_bytes_of_kind(record.kind, self.bytes.get(record.kind, 0) + record.size_bytes)

    def subtract_resident_bytes(self, record: Record) -> None:
        kind, size_bytes = self.resident.pop(record.key, ("", 0))
        if kind:
            self._set_bytes_of_kind(kind, self.bytes[kind] - size_bytes)

    def note_kind_change(self, record: Record) -> None:
        """Count the bytes of a resident record under the record's new kind."""
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
        """Record that a move has ended, after the host waited for `waited_ns`.

        A wait between two slots is a wait of user code. Its stall belongs to the earlier slot.
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
        """Record a drop, as a move without duration in the lane `drop:...`."""
        now_ns = time.perf_counter_ns()
        move = RecordedMove(f"drop:{record.copy_tier}", record.name, 0, False, now_ns, now_ns, now_ns)
        self._current_step(now_ns).moves.append(move)

    def note_overrun(self, size_bytes: int) -> None:
        """Record the number of bytes that user code, or a kernel of a library, has beyond the budget."""
        step = self._current_step(time.perf_counter_ns())
        step.overrun_bytes = max(step.overrun_bytes, size_bytes)

    def mark_step_broken(self) -> None:
        """Record that an exception has ended a program. The timeline then leaves out this step."""
        self.step.broken = True
        self.in_slot = False

    def end_slot(self, kernel: str, workspace_bytes: int) -> None:
        """Record that a slot ends, and that the kernel after the slot begins."""
        self.in_slot = False
        self.note_kernel_begin(kernel, workspace_bytes)

    def end_step(self, end_ns: int, training: bool, planned: bool) -> None:
        """End the step at the time `end_ns`.

        The next step begins with the current slot. User code runs between `end_ns` and this slot. Its events
        belong to the next step.
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
        """Let the step begin now. The time before was spent between two steps, for example for planning, and
        belongs to no step."""
        self.step.began_ns = time.perf_counter_ns()

    def _better_ranked_step(self, new: RecordedStep | None, old: RecordedStep | None) -> RecordedStep | None:
        return new if new is not None and (old is None or new.rank >= old.rank) else old

    # ---- the recorded steps

    def last_whole_step(self, all_has_ended: bool = False) -> RecordedStep | None:
        """Return the last whole step. If `all_has_ended` is True, no transfer is in flight. Then the step
        that ended last is whole too."""
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
            # User code may cause a move before the step's first slot. Such a move may begin, or even end,
            # before the step begins.
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
