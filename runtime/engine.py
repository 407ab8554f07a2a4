"""The engine: at each slot it makes sure that the next kernel finds its tensors, within the budget.

    slot i      1 take in what the kernel before made    3 the law: room for what the kernel needs and makes,
                2 the plan's moves for this tick           then everything it reads or writes is resident
    kernel i    runs; what it uses stays until slot i + 1

A plan is a hint; residency is the law. Without a plan, with a stale one or with a hostile one the same code
fetches on demand and evicts by furthest next use: it costs time and never correctness.

Between two programs user code runs. What it touches comes back (`guard.py`); what it holds stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch

from teraio.errors import StoreError, TornStepError
from teraio.plan import Plan
from teraio.schedule import READ, WRITE, Buffer, Schedule, Slot, Step

from . import guard as _guard
from .adopt import SMALLEST_BYTES, movable
from .device import Device
from .follow import Follower, table_of
from .moves import Mover
from .programs import Program
from .records import DEVICE, Record
from .residency import Need, Residency
from .step import Expectation, StepTracker, TensorFacts
from .store import Store
from .stuck import Stuck
from .user_code import UserCode

CALLS_MAX = 4096  # of a step: one that never ends is none, and what is kept per call must end


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
        self.new_weights: list[Record] = []  # that this program brought in
        self.described: dict[str, TensorFacts] = {}  # all tensors of this step that move, dead ones too
        self.stuck = Stuck(self.residency, self._kept)
        self.user = UserCode(self.residency, self.mover)
        self.guard = self.user.guard
        self.follower = Follower(self.residency, self.mover)

    # ---- slots

    def visit(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int | None) -> None:
        """Most slots have nothing to do, and must not take longer than it takes to see that."""
        stop = program.stops[index]
        if live_bytes is None:
            live_bytes = stop.live_bytes
        residency, mover, tracker, bound = self.residency, self.mover, self.tracker, program.bound
        mover.counts.slots += 1
        serial = residency.serial = residency.serial + 1
        if tracker.running is not None or not 0 < index < program.last:
            self._attend(program, index, tensors, live_bytes)
            return
        for position, buffer in stop.made:
            bound[buffer] = self._register(program, buffer, tensors[position])
        here = True
        for buffer in stop.needed:
            if (record := bound[buffer]) is not None:
                record.used_at = serial
                here = here and record.state is DEVICE
        table = tracker.expected.table
        tick = tracker.tick(index) if table or not here else None
        total_bytes = mover.resident_bytes + live_bytes
        fits = total_bytes + residency.reserve_bytes <= residency.budget_bytes
        if here and fits and (tick is None or tick not in table) and residency.torn is None:
            mover.counts.peak_bytes = max(mover.counts.peak_bytes, total_bytes)
            if stop.written:
                self._mark_written(bound, stop.written)
        else:
            self._attend(program, index, (), live_bytes)

    def _attend(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int) -> None:
        """A slot that has something to do, or is measured."""
        began_ns = time.perf_counter_ns()
        residency, tracker = self.residency, self.tracker
        stop = program.stops[index]
        if residency.torn is not None:
            self._refuse_torn(residency.torn)
        if index == 0 and program.schedule.kind != "optimizer":
            self._enter(program, tensors)
        bound = program.bound
        if tensors:
            for position, buffer in stop.made:
                bound[buffer] = self._register(program, buffer, tensors[position])
        if index == 0:
            self._meet(program)
        needed = [record for buffer in stop.needed if (record := bound[buffer]) is not None]
        exposed = self.user.exposed(tracker.number) if index == program.last else []
        tick = tracker.tick(index)
        if tick is not None and (operations := tracker.expected.table.get(tick)):
            for record in (*needed, *exposed):
                record.used_at = residency.serial
            self.follower.follow(operations, live_bytes)
        residency.ensure(needed, live_bytes, stop.kernel, tick)
        self._mark_written(bound, stop.written)
        for buffer in stop.returned:
            if (returned := bound[buffer]) is not None and returned.kind != "weight":
                residency.settle(returned)
        if exposed:
            self.user.bring(exposed, live_bytes, "what it holds of")
        if tracker.running is not None:
            unmovable = live_bytes + residency.fixed_bytes + residency.reserve_bytes
            tracker.visited(index, began_ns, time.perf_counter_ns(), unmovable)

    def _mark_written(self, bound: list[Record | None], written: tuple[int, ...]) -> None:
        for buffer in written:
            if (record := bound[buffer]) is not None:
                record.clean = False

    def _refuse_torn(self, lost: StoreError) -> NoReturn:
        raise TornStepError(
            f"a weight was lost ({lost}); it is filled with NaN so that it cannot be taken for good. Load "
            f"the last checkpoint, after teraio.reset()"
        ) from lost

    def _enter(self, program: Program, tensors: Sequence[Any]) -> None:
        mark = next((id(t) for t in tensors if isinstance(t, torch.nn.Parameter)), None)
        if self.tracker.is_over(program, mark):
            self.end_step()
        if len(self.tracker.programs) >= CALLS_MAX:
            self.tracker.drop()
            self._forget_names()
        self.stuck.look()
        self.tracker.enter(program, mark)  # before `bound` is cleared: the call before may be of this program
        self._expect(self.tracker.expected)
        program.bound = [None] * len(program.schedule.buffers)

    def _expect(self, expected: Expectation) -> None:
        self.residency.uses, self.residency.step_ticks = expected.uses, expected.length

    def _meet(self, program: Program) -> None:
        """Its arguments are known. Weights that were never seen may be held by eager autograd already: they
        have more holders than those beside them, which are all handed over in the same way."""
        if self.new_weights:
            weights = [r for r in program.bound if r is not None and r.kind == "weight"]
            least = min(record.holders() for record in weights)
            for record in self.new_weights:
                record.held = record.holders() > least
            self.new_weights.clear()
        if not program.checked:
            program.checked = True
            self._check_floor(program)

    def _check_floor(self, program: Program) -> None:
        """Before anything of the step is lost: whether its largest kernel fits when all else is away."""
        residency = self.residency
        if program.schedule.symbolic:
            return
        residency.bury()
        need = Need(residency.fixed_bytes, *program.floor())
        least_bytes = need.stays_bytes + need.kernel_bytes + residency.reserve_bytes
        if least_bytes > residency.budget_bytes:
            residency.refuse(need)
        residency.largest = max(residency.largest, need, key=lambda n: n.stays_bytes + n.kernel_bytes)

    # ---- records

    def _register(self, program: Program, buffer: int, tensor: Any) -> Record | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        about = program.schedule.buffers[buffer]
        weight = about.role == "argument" and program.is_weight(buffer, tensor)
        if record is None:
            if storage.nbytes() < SMALLEST_BYTES:
                return None
            record = self._add(program, about, storage, program.label(buffer) if weight else "")
        if weight and record.kind == "weight" and not self._kept(record.name):
            self.guard.watch(tensor, record)
        return record

    def _add(self, program: Program, about: Buffer, storage: torch.UntypedStorage, label: str) -> Record:
        kind = "weight" if label else {"argument": "input"}.get(about.role, "activation")
        if program.schedule.kind == "backward" and about.role == "result":
            kind = "grad"
        name = self._weight_name(label) if label else f"{self.tracker.label}.{about.name}"
        wanted = about.role == "saved" or (bool(label) and not about.held)
        wanted = wanted and not self._kept(name)
        evictable = wanted and movable(storage)
        record = self.residency.add(storage, name, kind, evictable)
        if evictable:
            self.described[name] = (name, kind, record.size_bytes, record.persistent)
        if label and evictable:
            self.residency.reachable[record.key] = record
            self.new_weights.append(record)
        elif label and wanted:
            self.stuck.records.append(record)
        return record

    def _kept(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.keep)

    def _weight_name(self, label: str) -> str:
        """One program may serve many layers: the second weight of the same name gets the call's number."""
        return label if label not in self.residency.by_name else f"{self.tracker.label}.{label}"

    def count(self, tensor: torch.Tensor, name: str, kind: str) -> None:
        """Registers a tensor that is never moved, so that the ledger knows its bytes."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.residency.records and storage.nbytes() >= SMALLEST_BYTES:
            self.residency.add(storage, name, kind, evictable=False)

    # ---- the step

    def at_optimizer(self, tensors: Sequence[torch.Tensor]) -> None:
        """User code is about to read and write these: one more call of the step, of one kernel."""
        self.stuck.look()
        self.user.forget_others()
        self.guard.take_off(tensors)
        records = self.residency.records
        known = [(r, t) for t in tensors if (r := records.get(t.untyped_storage()._cdata)) and r.evictable]
        buffers = tuple(Buffer(record.name, "argument", record.size_bytes) for record, _ in known)
        flags = (READ | WRITE,) * len(known)
        slot = Slot("optimizer.step", tuple(range(len(known))), flags, 0)
        program = Program(Schedule("optimizer", buffers, (slot,)))
        self.tracker.enter(program)
        self._expect(self.tracker.expected)
        try:
            self.visit(program, 0, [tensor for _, tensor in known], 0)
        except BaseException:
            self.abandon()
            raise

    def after_optimizer(self) -> None:
        """Its code saw plain weights: what it kept of them counts. The step is over, unless another optimizer
        steps now."""
        self.user.keeps_after_optimizer()
        for record in self.stuck.retry():  # now: no program holds them
            self.described[record.name] = (record.name, record.kind, record.size_bytes, record.persistent)
        self.tracker.stepped_at_ns = time.perf_counter_ns()
        self.user.hand_over()

    def end_step(self) -> None:
        """The step is over: what was measured becomes the next step's expectation."""
        self.residency.serial += 1
        self.residency.failed.clear()
        self.residency.bury()
        step = self.tracker.finish(self.described.get, self.user.end_step())
        self._forget_names()
        if step is not None:
            self._learn(step)
            if self.on_step is not None:
                self.on_step(step)
        self._expect(self.tracker.expected)

    def _forget_names(self) -> None:
        """Names of what does not outlive the step are given anew in the next."""
        self.residency.by_name = {
            name: record for name, record in self.residency.by_name.items() if record.persistent
        }
        self.described = {
            name: about for name, about in self.described.items() if name in self.residency.by_name
        }

    def install(self, plan: Plan) -> None:
        """For the step that was last."""
        self.tracker.expected.table = table_of(plan, max(self.tracker.length, 1))

    def settle(self, plan: Plan | None) -> None:
        """The step that was last is measured; this is the plan for it, if there is one."""
        self.tracker.expected.settled = True
        if plan is not None:
            self.install(plan)

    def abandon(self) -> None:
        """A program ended with an exception, anywhere in it: user code runs next, so what it could reach
        unseen comes back, budget or not. A weight that cannot come back is filled with NaN, and no further
        step is taken."""
        self.tracker.abandon()
        self.residency.bring_back(self.user.exposed(self.tracker.number))
        self.user.hand_over()

    def _learn(self, step: Step) -> None:
        uses: dict[str, list[int]] = {}
        tick = 0
        for call in step.calls:
            for index, slot in enumerate(call.schedule.slots):
                for buffer, flags in zip(slot.buffers, slot.flags):
                    if flags and call.tensors[buffer]:
                        uses.setdefault(call.tensors[buffer], []).append(tick + index)
            tick += len(call.schedule.slots)
        self.tracker.expected.uses = uses

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
        if self.tracker.stepped_at_ns:
            self.end_step()
        self.guard.end()
        self.residency.serial += 1
        self.residency.bury()
        self.residency.bring_back(self.residency.records.values())
        self.mover.store.close()
        if self.residency.torn is not None:
            raise self.residency.torn


ENGINE: Engine | None = None
PROGRAMS: list[Program] = []  # registered since the backend last looked


def use(engine: Engine | None) -> None:
    """The engine of this process from now on."""
    global ENGINE
    ENGINE = engine
    _guard.ACTIVE[:] = [engine.guard] if engine is not None else []


def weights_off_guard() -> None:
    """A program may run next: to it they are plain tensors."""
    if ENGINE is not None:
        ENGINE.user.forget_others()
        ENGINE.guard.take_off()


def weights_on_guard() -> None:
    """It does not: user code goes on."""
    if ENGINE is not None:
        ENGINE.guard.put_on()


def foreign_program() -> None:
    """Another backend compiled something that may read weights where no guard sees it."""
    if ENGINE is not None:
        ENGINE.user.expose_all("another compiler's program may read weights")


def program(text: str) -> Callable[..., None]:
    """Called by a compiled program when it is loaded; returns what its slots call."""
    loaded = Program(Schedule.parse(text))
    PROGRAMS.append(loaded)

    def slot(index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        if ENGINE is not None:
            ENGINE.visit(loaded, index, tensors, live_bytes)

    return slot


def guarded(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled program between two stretches of user code. It leaves everything in order when an exception
    ends it: ours, a kernel's, Ctrl-C."""

    def call(arguments: list[Any]) -> Any:
        engine = ENGINE
        if engine is None:
            return run(arguments)
        engine.guard.take_off(arguments)
        try:
            result = run(arguments)
        except BaseException:
            if ENGINE is not None:
                ENGINE.abandon()
            raise
        if ENGINE is not None:
            ENGINE.user.hand_over()
        return result

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
