"""What happened in a step, for a timeline: when each kernel ran, what every lane carried, what was waited
for, and whose bytes were on the device.

    slot_begins, kernel_begins                     the kernel before has ended       -> spans of compute
    move_begins                                    a transfer was given to its lane  -> spans of a lane
    move_ends                                      it was waited for, so long        -> a stall
    add_resident_bytes, subtract_resident_bytes    whose bytes are on the device     -> counters

Only an engine that was asked for a timeline has a recorder: all others take the path without it. A transfer
belongs to the step that began it and may end in the next, so a step is complete one step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from teraio.formats.timeline import ENTRIES_MAX, Counter, Span, Stall, Timeline

from .record import Record, State

DEVICE = "device"
NOT_WAITED_NS = 10_000  # what it takes to ask for a transfer that has long ended
QUEUED_PARTS = 4  # a transfer that stood in a queue for more than a quarter of its time was held up by others


class RecordedProgram(Protocol):
    """What a recorder asks of a program."""

    stops: Sequence[Any]  # by slot; `kernel`: the one after it

    def unmovable_bytes_at_slot(self, index: int, measured: int | None) -> int:
        """Return what the kernel after this slot takes."""
        ...


RunSlot = Callable[[Any, int, Sequence[Any], int | None], None]


@dataclass(slots=True)
class RecordedMove:
    """A transfer. Its lane says when it ran; one that cannot is taken to run from its begin to its end."""

    track: str
    tensor: str
    size_bytes: int
    demand: bool
    begun_ns: int
    start_ns: int = 0
    end_ns: int = 0

    def stall_cause(self) -> str:
        """Why compute waits for it."""
        if self.demand:
            return "miss"
        queued_ns = self.start_ns - self.begun_ns
        held_up = queued_ns * QUEUED_PARTS > max(self.end_ns - self.begun_ns, 1)
        return "link busy" if held_up or self.track.startswith("evict") else "late read"


@dataclass(slots=True)
class RecordedStep:
    """One step, in the order of events. Times are those of time.perf_counter_ns."""

    began_ns: int
    bytes: dict[str, int]  # by kind, when it began
    kernels: list[tuple[str, int, int]] = field(default_factory=list)  # name, begin, end
    moves: list[RecordedMove] = field(default_factory=list)
    stalls: list[tuple[int, Stall]] = field(default_factory=list)  # with when each ended
    changes: list[tuple[int, str, int]] = field(default_factory=list)  # at, kind, bytes from then on
    overrun_bytes: int = 0
    broken: bool = False  # a program ended with an exception: not a whole step
    end_ns: int = 0
    rank: tuple[bool, bool] = (False, False)  # a training step, a planned one

    @property
    def entry_count(self) -> int:
        return max(len(self.kernels) + len(self.moves), len(self.stalls), len(self.changes))


class Recorder:
    def __init__(self, budget_bytes: int, reserve_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.here: dict[int, tuple[str, int]] = {}  # storage -> kind and bytes, of all that is on the device
        self.bytes: dict[str, int] = {}  # the same by kind
        self.under_way: dict[int, RecordedMove] = {}  # by storage
        self.step = RecordedStep(0, {})
        self.last: RecordedStep | None = None  # ended; its transfers may not have
        self.complete: RecordedStep | None = None  # the last whole one; inference does not replace training
        self.on_complete: Callable[[], None] = lambda: None
        self.entered_ns = 0  # the last slot
        self.in_slot = False

    # ---- the engine tells

    def record_each_slot_of(self, run_slot: RunSlot) -> RunSlot:
        """Wrap the engine's `run_slot`: this recorder notes when each slot begins and ends."""

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
        """`workspace_bytes`: what the kernel after this slot takes."""
        self.entered_ns = began_ns = time.perf_counter_ns()
        step = self._current_step(began_ns)
        if step.kernels:
            name, start_ns, _ = step.kernels[-1]
            step.kernels[-1] = (name, start_ns, began_ns)
        if step.entry_count > ENTRIES_MAX:  # a step that never ends is none
            self.step = RecordedStep(began_ns, dict(self.bytes), broken=True)
        # What the kernel before no longer has is gone; the next one's comes when there is room for it.
        self._set_bytes_of_kind("workspace", min(workspace_bytes, self.bytes.get("workspace", 0)))
        self.in_slot = True

    def note_kernel_begin(self, kernel: str, workspace_bytes: int) -> None:
        now_ns = time.perf_counter_ns()
        self.step.kernels.append((kernel, now_ns, now_ns))  # of this step, which the slot may have begun
        self._set_bytes_of_kind("workspace", workspace_bytes)

    def _current_step(self, at_ns: int) -> RecordedStep:
        """The step that goes on; it begins with what comes first."""
        if not self.step.began_ns:
            self.step.began_ns = at_ns
            self.step.bytes = dict(self.bytes)
        return self.step

    def add_resident_bytes(self, record: Record) -> None:
        self.here[record.key] = (record.kind, record.size_bytes)
        if self.in_slot and record.state is State.DEVICE:  # a kernel made it: until now it was workspace
            self._set_bytes_of_kind("workspace", max(0, self.bytes.get("workspace", 0) - record.size_bytes))
        self._set_bytes_of_kind(record.kind, self.bytes.get(record.kind, 0) + record.size_bytes)

    def subtract_resident_bytes(self, record: Record) -> None:
        kind, size_bytes = self.here.pop(record.key, ("", 0))
        if kind:
            self._set_bytes_of_kind(kind, self.bytes[kind] - size_bytes)

    def note_kind_change(self, record: Record) -> None:
        """It has another kind now, wherever it is."""
        if record.key in self.here:
            kind, size_bytes = self.here[record.key]
            self.here[record.key] = (record.kind, size_bytes)
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
        self.under_way[record.key] = move
        self._current_step(move.begun_ns).moves.append(move)

    def note_move_end(self, record: Record, ticket: Any, waited_ns: int) -> None:
        """It was waited for, well or badly. Between two slots it is user code that waits, after the last of
        them."""
        move = self.under_way.pop(record.key, None)
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
        """A clean copy goes, which takes no time: the lane `drop:...` says when."""
        now_ns = time.perf_counter_ns()
        move = RecordedMove(f"drop:{record.copy_tier}", record.name, 0, False, now_ns, now_ns, now_ns)
        self._current_step(now_ns).moves.append(move)

    def note_overrun(self, size_bytes: int) -> None:
        """Note what user code, or a library's kernel, got beyond the budget."""
        step = self._current_step(time.perf_counter_ns())
        step.overrun_bytes = max(step.overrun_bytes, size_bytes)

    def mark_step_broken(self) -> None:
        self.step.broken = True
        self.in_slot = False

    def end_step(self, end_ns: int, training: bool, planned: bool) -> None:
        """What came after its end, in user code, is the next step's: that begins with the slot of now."""
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
        """What was done between two steps, as a plan was made, belongs to neither."""
        self.step.began_ns = time.perf_counter_ns()

    def _better_ranked_step(self, new: RecordedStep | None, old: RecordedStep | None) -> RecordedStep | None:
        return new if new is not None and (old is None or new.rank >= old.rank) else old

    # ---- the outcome

    def last_whole_step(self, all_has_ended: bool = False) -> RecordedStep | None:
        """The last whole step; `all_has_ended`: no transfer is under way any more."""
        return self._better_ranked_step(self.last, self.complete) if all_has_ended else self.complete

    def timeline(self, all_has_ended: bool = False) -> Timeline | None:
        """Of the last whole planned step; None while there is none, or if it is too long for a file."""
        step = self.last_whole_step(all_has_ended)
        if step is None or step.entry_count > ENTRIES_MAX - len(step.bytes) - 1:
            return None
        zero_ns = step.began_ns
        spans = [Span("compute", name, at - zero_ns, end - zero_ns) for name, at, end in step.kernels]
        for move in step.moves:
            # Begun in user code before the first slot, it may lie before the step, whole or in part.
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
