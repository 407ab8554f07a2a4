"""The engine: at each slot it makes sure that the next kernel finds its tensors, within the budget.

    slot i      1 unpin what the kernel before used    4 the law: room for what the kernel needs and makes,
                2 take in what the kernel before made    then everything it reads or writes is resident
                3 the plan's moves for this tick       5 pin it until the next slot
    kernel i    runs

A plan is a hint; residency is the law. Without a plan, with a stale one or with a hostile one the same code
fetches on demand and evicts by furthest next use: it costs time and never correctness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch

from teraio.errors import StoreError, TornStepError
from teraio.plan import Evict, Fetch, Plan
from teraio.schedule import MADE, READ, WRITE, Buffer, Schedule, Slot, Step

from .adopt import SMALLEST_BYTES, movable
from .device import Device
from .moves import Mover
from .records import Record, State
from .residency import Residency
from .step import StepTracker
from .store import Store
from .stuck import Stuck

TensorFacts = tuple[str, str, int, bool]  # name, kind, size_bytes, persistent

CALLS_MAX = 4096  # of a step: inference never comes to an optimizer, and what is kept per call must end

EVICT, FREE, FETCH = 0, 1, 2  # operations of the table that a plan becomes


class Program:
    """A compiled program, as its slots see it. `bound` holds the records of the call that is running."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.identity = schedule.identity
        self.labels: tuple[str, ...] = ()  # the user's names of the arguments, where known
        self.bound: list[Record | None] = [None] * len(schedule.buffers)

    def label(self, buffer: int) -> str:
        return self.labels[buffer] if buffer < len(self.labels) else self.schedule.buffers[buffer].name


class Engine:
    def __init__(
        self,
        store: Store,
        device: Device,
        budget_bytes: int,
        reserve_bytes: int,
        on_step: Callable[[Step], None] | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        self.mover = Mover(store, device)
        self.residency = Residency(self.mover, budget_bytes, reserve_bytes)
        self.on_step = on_step
        self.keep = keep  # name globs of tensors that never move
        self.tracker = StepTracker()
        self.table: dict[int, list[tuple[int, str]]] = {}
        self.described: dict[str, TensorFacts] = {}  # all tensors of this step that move, dead ones too
        self.stuck = Stuck(self.residency, self._kept)

    # ---- slots

    def visit(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int | None) -> None:
        began_ns = time.perf_counter_ns()
        slot = program.schedule.slots[index]
        if live_bytes is None:
            live_bytes = slot.live_bytes
        last = index == len(program.schedule.slots) - 1
        if self.residency.torn is not None:
            self._refuse_torn(self.residency.torn)
        self.mover.counts.slots += 1
        self.residency.unpin()
        if index == 0 and program.schedule.kind != "optimizer":
            self._enter(program)
        tick = self.tracker.tick(index)
        needed = self._take_in(program, index, tensors)
        if last:
            self.residency.bury()
            needed += [r for r in self.residency.reachable.values() if r not in needed]
        if tick is not None:
            self._follow_plan(tick, live_bytes)
        self.residency.ensure(needed, live_bytes, slot.kernel, tick)
        self._mark_written(program, index)
        if last:
            self._hand_to_user()
        self.tracker.visited(
            index,
            began_ns,
            time.perf_counter_ns(),
            live_bytes + self.residency.fixed_bytes + self.residency.reserve_bytes,
        )

    def _refuse_torn(self, lost: StoreError) -> NoReturn:
        raise TornStepError(
            f"a weight was lost ({lost}); it is filled with NaN so that it cannot be taken for good. Load "
            f"the last checkpoint, after teraio.reset()"
        ) from lost

    def _enter(self, program: Program) -> None:
        if len(self.tracker.calls) >= CALLS_MAX:
            self.tracker.drop()
            self._forget_names()
        self.stuck.look()
        self.tracker.enter(program)  # before `bound` is cleared: the call before may be of this program
        program.bound = [None] * len(program.schedule.buffers)

    def _take_in(self, program: Program, index: int, tensors: Sequence[Any]) -> list[Record]:
        """Registers what is new, binds it to its buffer, and returns what the next kernel touches."""
        slot = program.schedule.slots[index]
        needed: list[Record] = []
        for buffer, flags, tensor in zip(slot.buffers, slot.flags, tensors):
            record = program.bound[buffer]
            if record is None or flags & MADE:
                record = program.bound[buffer] = self._register(program, buffer, tensor)
            if record is None:
                continue
            record.last_tick = self.mover.counts.slots
            if flags & (READ | WRITE):
                needed.append(record)
        return needed

    def _hand_to_user(self) -> None:
        """User code runs next and may write any weight, through `.data` without a trace: no copy of one is
        good."""
        for record in self.residency.reachable.values():
            record.clean = False

    def _mark_written(self, program: Program, index: int) -> None:
        slot = program.schedule.slots[index]
        for buffer, flags in zip(slot.buffers, slot.flags):
            if flags & WRITE:
                record = program.bound[buffer]
                if record is not None:
                    record.clean = False

    def _register(self, program: Program, buffer: int, tensor: Any) -> Record | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        if record is not None:
            return record
        if storage.nbytes() < SMALLEST_BYTES:
            return None
        about = program.schedule.buffers[buffer]
        weight = isinstance(tensor, torch.nn.Parameter)
        kind = {"saved": "activation", "result": "activation"}.get(
            about.role, "weight" if weight else "input"
        )
        if program.schedule.kind == "backward" and about.role == "result":
            kind = "grad"
        name = f"{self.tracker.number}.{about.name}"
        if weight:
            name = self._weight_name(program.label(buffer))
        wanted = about.role == "saved" or (weight and not about.held)
        wanted = wanted and not self._kept(name)
        evictable = wanted and movable(storage)
        record = self.residency.add(storage, name, kind, evictable)
        if evictable:
            self.described[name] = (name, kind, record.size_bytes, record.persistent)
        if weight and evictable:
            self.residency.reachable[record.key] = record
        elif weight and wanted:
            self.stuck.records.append(record)
        return record

    def _kept(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.keep)

    def _weight_name(self, label: str) -> str:
        """One program may serve many layers: the second weight of the same name gets the call's number."""
        return label if label not in self.residency.by_name else f"{self.tracker.number}.{label}"

    def count(self, tensor: torch.Tensor, name: str, kind: str) -> None:
        """Registers a tensor that is never moved, so that the ledger knows its bytes."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.residency.records and storage.nbytes() >= SMALLEST_BYTES:
            self.residency.add(storage, name, kind, evictable=False)

    # ---- the plan

    def install(self, plan: Plan) -> None:
        """The plan becomes a table: tick -> operations, releases before new transfers."""
        table: dict[int, list[tuple[int, str]]] = {}
        length = max(self.tracker.length, 1)
        for move in plan.moves:
            match move:
                case Evict(tensor, _, free, trigger):
                    if trigger is not None and trigger < free:
                        table.setdefault(trigger % length, []).append((EVICT, tensor))
                    table.setdefault(free % length, []).append((FREE, tensor))
                case Fetch(tensor, _, trigger, _):
                    table.setdefault(trigger % length, []).append((FETCH, tensor))
        for operations in table.values():
            operations.sort(key=lambda operation: (operation[0] != FREE, operation[0]))
        self.table = table

    def _follow_plan(self, tick: int, live_bytes: int) -> None:
        """A move that does not fit what is there is skipped and counted, never an error."""
        counts = self.mover.counts
        for operation, name in self.table.get(tick, ()):
            record = self.residency.by_name.get(name)
            if (
                record is None
                or record.dead()
                or record.pins
                or not self._move(operation, record, live_bytes)
            ):
                counts.skipped_moves += 1
            else:
                counts.planned_moves += 1

    def _move(self, operation: int, record: Record, live_bytes: int) -> bool:
        if operation == FETCH:
            if record.state is not State.AWAY or not self.residency.fits(record.size_bytes + live_bytes):
                return False
            self.mover.begin_fetch(record)
            return True
        if (
            not record.evictable
            or record.key in self.residency.failed
            or record.state not in {State.DEVICE, State.LEAVING}
        ):
            return False
        try:
            if record.state is State.DEVICE:
                self.mover.begin_evict(record)
            if operation == FREE and record.state is State.LEAVING:
                self.mover.end_evict(record)
        except StoreError as error:
            self.residency.keep_failed(record, error)
            return False
        return True

    # ---- the step

    def at_optimizer(self, tensors: Sequence[torch.Tensor]) -> None:
        """User code is about to read and write these: one more call of the step, of one kernel."""
        self.stuck.look()
        known = [
            r
            for t in tensors
            if (r := self.residency.records.get(t.untyped_storage()._cdata)) and r.evictable
        ]
        buffers = tuple(Buffer(record.name, "argument", record.size_bytes) for record in known)
        flags = (READ | WRITE,) * len(known)
        slot = Slot("optimizer.step", tuple(range(len(known))), flags, 0)
        program = Program(Schedule("optimizer", buffers, (slot,)))
        self.tracker.enter(program)
        program.bound = list(known)
        self.visit(program, 0, known, 0)

    def end_step(self) -> None:
        """The step is over: what was measured becomes the next step's expectation."""
        self.residency.unpin()
        self.residency.failed.clear()
        self.residency.bury()
        for record in self.stuck.retry():
            self.described[record.name] = (record.name, record.kind, record.size_bytes, record.persistent)
        movable = frozenset(record.name for record in self.residency.reachable.values())
        step = self.tracker.finish(self.described.get, movable)
        self._forget_names()
        if step is not None:
            self._learn(step)
            if self.on_step is not None:
                self.on_step(step)

    def _forget_names(self) -> None:
        """Names of what does not outlive the step are given anew in the next."""
        self.residency.by_name = {
            name: record for name, record in self.residency.by_name.items() if record.persistent
        }
        self.described = {
            name: about for name, about in self.described.items() if name in self.residency.by_name
        }

    def abandon(self) -> None:
        """A program ended with an exception, anywhere in it: user code runs next, so the weights come back,
        budget or not. One that cannot come back is filled with NaN, and no further step is taken."""
        self.residency.unpin()
        self.tracker.abandon()
        self.residency.bring_back(self.residency.reachable.values())
        self._hand_to_user()

    def _learn(self, step: Step) -> None:
        uses: dict[str, list[int]] = {}
        tick = 0
        for call in step.calls:
            for index, slot in enumerate(call.schedule.slots):
                for buffer, flags in zip(slot.buffers, slot.flags):
                    if flags and call.tensors[buffer]:
                        uses.setdefault(call.tensors[buffer], []).append(tick + index)
            tick += len(call.schedule.slots)
        self.residency.uses = uses
        self.residency.step_ticks = tick

    # ---- for the outside

    def stats(self) -> dict[str, int]:
        store = self.mover.store
        return {
            **asdict(self.mover.counts),
            "resident_bytes": self.mover.resident_bytes,
            "budget_bytes": self.residency.budget_bytes,
            "written_bytes": store.written_bytes,
            "read_bytes": store.read_bytes,
        }

    def shut_down(self) -> None:
        """Everything that is away comes back, budget or not, and the store is given up."""
        self.residency.unpin()
        self.residency.bury()
        self.residency.bring_back(self.residency.records.values())
        self.mover.store.close()
        if self.residency.torn is not None:
            raise self.residency.torn


ENGINE: Engine | None = None
PROGRAMS: list[Program] = []  # registered since the backend last looked


def program(text: str) -> Callable[..., None]:
    """Called by a compiled program when it is loaded; returns what its slots call."""
    loaded = Program(Schedule.parse(text))
    PROGRAMS.append(loaded)

    def slot(index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        if ENGINE is not None:
            ENGINE.visit(loaded, index, tensors, live_bytes)

    return slot


def guarded(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled program that leaves everything in order when an exception ends it: ours, a kernel's,
    Ctrl-C."""

    def call(arguments: list[Any]) -> Any:
        try:
            return run(arguments)
        except BaseException:
            if ENGINE is not None:
                ENGINE.abandon()
            raise

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
