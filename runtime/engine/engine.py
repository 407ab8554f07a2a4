"""The engine: at each slot it makes sure that the next kernel finds its tensors, within the budget.

    slot i      1 take in what the kernel before made    3 the law: room for what the kernel needs and makes,
                2 the plan's moves for this tick           then everything it reads or writes is resident
    kernel i    runs; what it uses stays until slot i + 1

A plan is a hint; residency is the law. Without a plan, with a stale or a hostile one the same code fetches on
demand and evicts by furthest next use: it costs time and never correctness.

Between two programs, and beside them, user code runs. What it reads is fetched (`user_code.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from teraio.errors import TeraioError
from teraio.formats.plan import Plan
from teraio.formats.schedule import Schedule, Step

from ..device.device import Device, Host
from ..eager import gradients as _gradients
from ..eager.signals import SIGNALS
from ..eager.user_code import UserCode
from ..ledger.engine_lock import EngineLock
from ..ledger.mover import Mover
from ..ledger.record import DEVICE, Record
from ..ledger.recorder import Recorder
from ..ledger.residency import Need, Residency
from ..ledger.restore import make_everything_resident
from ..step.kernel_workspace import KernelWorkspace
from ..step.plan_follower import PlanFollower, SlotPosition
from ..step.program import Program
from ..step.quiet_call import QuietCall
from ..step.stats import Stats, StepMeter
from ..step.tracker import StepTracker
from ..store.store import Store
from .registry import Registry

CALLS_MAX = 4096  # of a step: one that never ends is none, and what is kept per call must end


class OpenSlot(NamedTuple):
    """A slot between its two halves, where moves come: records that may not leave in them, and the tick."""

    program: Program
    at: int  # its number in the program
    live_bytes: int
    needed: list[Record]  # by the next kernel
    results: list[Record]  # of the program, if it ends here: user code gets them
    tick: int | None
    began: Any  # a moment of the device's clock, if the slot is measured

    @property
    def required_records(self) -> list[Record]:
        return self.needed + self.results


class Engine:
    def __init__(
        self,
        store: Store,
        device: Device,
        budget_bytes: int,
        reserve_bytes: int,
        on_step: Callable[[Step], None] | None = None,
        keep: Sequence[str] = (),
        host: Host | None = None,
    ) -> None:
        self.mover = Mover(store, device, host)
        self.meter = StepMeter(self.mover)
        self.residency = Residency(self.mover, budget_bytes, reserve_bytes)
        self.on_step = on_step
        self.at_rest: Callable[[], None] = lambda: None  # called where no compiled program runs
        self.tracker = StepTracker(self.meter.begin_step, device)
        self.lock = EngineLock()
        self.user = UserCode(self.residency, self.mover, device, self.tracker, self.lock)
        self.known_tensors = self.user.known_tensors
        self.pid = os.getpid()
        self.registry = Registry(self.residency, self.tracker, self.user, self.lock, keep)
        self.gradients = self.registry.gradients
        self.unresizable = self.registry.unresizable
        self.kernel_workspace = KernelWorkspace(self.residency, device, self.user.report_overrun)
        self.follower = PlanFollower(self.residency, self.mover)
        self.optimizers: set[int] = set()  # numbers of those that have stepped in this step
        self.quiet_call = QuietCall(self.residency, self.tracker, self.registry.register_program_tensor)
        self.user.before_fetch = self.quiet_call.register_collected_tensors
        if device.observer is not None:
            device.observer.owner = self.user

    # ---- slots

    def run_slot(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int | None) -> None:
        """Most slots have nothing to do, and must not take longer than it takes to see that."""
        if self.quiet_call.program is not None:
            if self.quiet_call.program is program and 0 < index < program.last:
                self.quiet_call.collect_made_tensors(index, tensors)
                return
            self.quiet_call.register_collected_tensors()
        stop = program.stops[index]
        live_bytes = program.unmovable_bytes_at_slot(index, live_bytes)
        residency, mover, tracker, bound = self.residency, self.mover, self.tracker, program.bound
        mover.counts.slots += 1
        serial = residency.serial = residency.serial + 1
        if tracker.running is not None or not 0 < index < program.last:
            self._run_full_slot(program, index, tensors, live_bytes)
            if index == 0 and program.schedule.kind != "optimizer":
                self.quiet_call.begin_if_quiet(program)
            return
        for position, buffer in stop.made:
            bound[buffer] = self.registry.register_program_tensor(program, buffer, tensors[position])
        here = True
        for buffer in stop.needed:
            if (record := bound[buffer]) is not None:
                record.used_at = serial
                here = here and record.state is DEVICE
        tick = tracker.tick_of_slot(index) if tracker.expected.table or not here else None
        total_bytes = mover.resident_bytes + live_bytes
        fits = total_bytes + residency.reserve_bytes <= residency.budget_bytes
        if here and fits and residency.torn is None and not tracker.expected.has_moves_at(tick):
            mover.counts.peak_bytes = max(mover.counts.peak_bytes, total_bytes)
            if stop.written:
                residency.mark_written(bound, stop.written)
        else:
            self._run_full_slot(program, index, (), live_bytes)

    def _run_full_slot(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int) -> None:
        """Run a slot that has something to do, or is measured."""
        slot = self.open_slot(program, index, tensors, live_bytes)
        if (expected := self.tracker.expected).has_moves_at(slot.tick):
            self.follower.follow_plan_at_slot(
                SlotPosition(expected, slot.tick, live_bytes), slot.required_records
            )
        self.ensure_resident(slot)

    def open_slot(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int) -> OpenSlot:
        """Begin a slot: register what the kernel before it made, and find what the next kernel needs."""
        residency, tracker = self.residency, self.tracker
        began = (
            self.mover.device.moment_after_kernels() if index == 0 or tracker.running is not None else None
        )
        stop = program.stops[index]
        if residency.torn is not None:
            residency.raise_torn_step_error()
        own = program.schedule.kind != "optimizer"  # whose records are bound when its call begins
        if index and own:
            tracker.add_measured_bytes(
                index - 1, self.kernel_workspace.end_kernel_measure(program, index - 1)
            )
        if index == 0 and own:
            self._begin_call(program, tensors)
        bound = program.bound
        if tensors:
            for position, buffer in stop.made:
                bound[buffer] = self.registry.register_program_tensor(program, buffer, tensors[position])
        if index == 0 and own:
            # What eager code made and hands over is in the ledger by now.
            self.user.eager_memory.reserve_kept_bytes()
            self._refuse_program_over_budget(program)
        needed = [record for buffer in stop.needed if (record := bound[buffer]) is not None]
        results = self.user.records_required_after_call(tracker.number) if index == program.last else []
        return OpenSlot(program, index, live_bytes, needed, results, tracker.tick_of_slot(index), began)

    def ensure_resident(self, slot: OpenSlot) -> None:
        """End a slot: what the next kernel reads or writes is resident, and it fits."""
        residency, tracker = self.residency, self.tracker
        program, index, live_bytes, tick = slot.program, slot.at, slot.live_bytes, slot.tick
        stop, bound, last = program.stops[index], program.bound, index == program.last
        told_bytes = live_bytes - program.unseen_bytes[index]
        residency.make_resident_within_budget(slot.needed, told_bytes, stop.kernel, tick)
        live_bytes -= self.kernel_workspace.make_room_for_kernel(
            program, index, live_bytes, tick, tracker.running is not None
        )
        residency.mark_written(bound, stop.written)
        for buffer in stop.returned:
            if (returned := bound[buffer]) is not None and returned.kind != "weight":
                residency.forbid_eviction(returned)
        if last:
            self.user.prepare_for_user_code(slot.results, live_bytes, tick)
            if program.schedule.kind == "forward":
                self.gradients.add_open_forward(program)
        if tracker.running is not None:
            unmovable = live_bytes + residency.fixed_bytes + residency.reserve_bytes
            if program.schedule.kind != "optimizer" and not last:
                self.kernel_workspace.begin_kernel_measure(program, index, told_bytes)
            tracker.note_slot_measure(index, slot.began, self.mover.device.moment_after_kernels(), unmovable)

    def _begin_call(self, program: Program, tensors: Sequence[Any]) -> None:
        self.user.eager_memory.end_user_code_measure()
        mark = next((id(t) for t in tensors if isinstance(t, torch.nn.Parameter)), None)
        if self.tracker.is_step_over_before(program, mark):
            self.end_step()
        if len(self.tracker.programs) >= CALLS_MAX:
            self.tracker.forget_step()
            self.registry.forget_names_of_step()
            self.user.end_step()
        self.unresizable.detect_and_adopt_newly_unresizable()
        self.tracker.begin_call(
            program, mark
        )  # before `bound` is cleared: the call before may be of this program
        self.update_expected_uses()
        program.bound = [None] * len(program.schedule.buffers)
        self.gradients.begin_call(program)

    def update_expected_uses(self) -> None:
        """Of the tensors' next uses, and their ways, what the tracker knows now."""
        expected = self.tracker.expected
        self.mover.to_host = expected.to_host
        self.residency.uses, self.residency.step_ticks = expected.uses, expected.length

    def _refuse_program_over_budget(self, program: Program) -> None:
        """Its arguments are known."""
        if self.tracker.running is not None:
            self.kernel_workspace.measure_and_reserve_lasting_bytes(step=self.tracker.number == 0)
        if not program.checked:
            program.checked = True
            self._refuse_or_grow_budget(program)

    def _refuse_or_grow_budget(self, program: Program) -> None:
        """Before anything of the step is lost: whether its largest kernel fits when all else is away."""
        residency = self.residency
        if program.schedule.symbolic:
            return
        residency.forget_dead_records()
        need = Need(*program.largest_kernel_need(residency.fixed_bytes, self.gradients.is_evictable_early))
        if residency.is_over_budget(need):
            residency.refuse_or_grow_budget(need)
        residency.largest = max(residency.largest, need, key=lambda n: n.size_bytes)

    # ---- the step

    def finish_optimizer_step(self) -> None:
        """The step is over, unless another optimizer steps now."""
        for record in self.unresizable.retry_making_evictable():  # now: no program holds them
            self.registry.note_tensor_facts(record)
        self.tracker.stepped = self.meter.end_step(self.residency.reserve_bytes)
        self.user.resume_user_code()
        self.at_rest()

    def end_step_if_optimizer_repeats(self, optimizer: int) -> None:
        """End the step before this optimizer's next one, in a loop whose model is in no program."""
        programs = self.tracker.programs
        eager = bool(programs) and all(program.schedule.kind == "optimizer" for program in programs)
        if eager and self.tracker.stepped is not None and optimizer in self.optimizers:
            self.end_step()
        self.optimizers.add(optimizer)

    def end_step(self) -> None:
        """The step is over: what was measured becomes the next step's expectation."""
        self.optimizers.clear()
        self.residency.serial += 1
        self.residency.pending_evictions.end_evictions_already_written()
        self.residency.failed.clear()
        self.residency.forget_dead_records()
        self.registry.mark_surviving_gradients_persistent()
        if self.tracker.programs and self.tracker.stepped is None:  # inference
            self.tracker.stepped = self.meter.end_step(self.residency.reserve_bytes)
        if (recorder := self.mover.recorder) is not None:
            expected = self.tracker.expected
            recorder.end_step(
                self.meter.ended_ns or time.perf_counter_ns(),
                self.tracker.training,
                expected.settled or bool(expected.table),
            )
        self.residency.limit_allocator_cache()
        step = self.tracker.finish(self.registry.described.get, self.user.end_step())
        self.registry.forget_names_of_step()
        if step is not None:
            self.tracker.expected.learn_uses_from_step(step)
            if self.on_step is not None:
                self.on_step(step)
        self.update_expected_uses()
        if recorder is not None:
            recorder.restart_step_clock()

    def follow_plan(self, plan: Plan, order: tuple[str, ...] = ()) -> None:
        """For the step that was last, or that has these programs."""
        self.tracker.expectation_of(order).set_plan(plan)

    def settle_plan(self, plan: Plan | None, order: tuple[str, ...] = ()) -> None:
        """The step that was last, or that has these programs, is measured; this is the plan for it, if there
        is one."""
        self.tracker.expectation_of(order).settled = True
        if plan is not None:
            self.follow_plan(plan, order)

    def end_call(self, outputs: Any) -> None:
        """A program has ended: autograd and user code go on."""
        backward = bool(self.gradients.leaves)
        if backward:
            self.gradients.release_gradients_to_autograd(outputs)
        self.user.resume_user_code()
        if not backward:  # its gradients have no place yet
            SIGNALS.call_due_after_program()

    def abandon_call(self) -> None:
        """A program ended with an exception, anywhere in it: user code runs next."""
        self.tracker.abandon_call()
        self.quiet_call.abandon()
        self.kernel_workspace.abandon_kernel_measure()
        if self.mover.recorder is not None:
            self.mover.recorder.mark_step_broken()
        self.user.end_optimizer_update()
        self.user.resume_after_exception(self.tracker.number)

    # ---- for the outside

    def set_budget(self, budget_bytes: int | None) -> None:
        """Another budget, None for the smallest that the kernels let it be; what is too much leaves now.
        BudgetError if what is known to be needed at once does not fit. Plans for another budget are hints."""
        residency = self.residency
        with self.lock:
            before, elastic = residency.budget_bytes, residency.elastic
            residency.elastic = budget_bytes is None
            residency.budget_bytes = residency.reserve_bytes if budget_bytes is None else budget_bytes
            if residency.is_over_budget(residency.largest):
                try:
                    residency.refuse_or_grow_budget(residency.largest)
                except TeraioError:
                    residency.budget_bytes, residency.elastic = before, elastic
                    raise
            residency.serial += 1
            residency.evict_until_fits(0, None, self.user.must_be_resident)
            residency.limit_allocator_cache()

    def attach_recorder(self, recorder: Recorder) -> None:
        """From now on it is told what happens. Engines without one have no trace of it in their slots."""
        self.mover.recorder = recorder
        self.mover.store.enable_transfer_times()
        self.run_slot = recorder.record_each_slot_of(self.run_slot)  # type: ignore[assignment, method-assign]

    def stats(self) -> Stats:
        found = self.meter.stats(
            self.tracker.expected, self.residency.budget_bytes, self.residency.reserve_bytes
        )
        found["resident_bytes"] -= self.residency.dead_resident_bytes()
        return found

    def close_without_fetching(self) -> None:
        """The process ends: what is away is not brought back for no one. Touching it is an error."""
        self.mover.device.limit_tensors_and_spare_memory(0)
        self.mover.store.close()

    def fetch_all_and_close(self) -> None:
        """Everything that is away comes back, budget or not, and the store is given up."""
        with self.lock:
            if self.tracker.stepped is not None:
                self.end_step()
            make_everything_resident(self.residency, self.user.must_be_resident)
            self.mover.device.limit_tensors_and_spare_memory(0)
            self.mover.store.close()
            if self.residency.torn is not None and not self.residency.torn_is_known:
                raise self.residency.torn


ENGINE: Engine | None = None
_LOADING = threading.local()  # `meets`: whom this thread tells of each program that it loads


def set_current_engine(engine: Engine | None) -> None:
    """The engine of this process from now on."""
    global ENGINE
    if engine is None and ENGINE is not None and ENGINE.user.observer is not None:
        ENGINE.user.observer.owner = None
    ENGINE = engine
    _gradients.ACTIVE[:] = [engine.gradients] if engine is not None else []


def current_engine() -> Engine | None:
    """The engine, unless this is a fork of its process."""
    return ENGINE if ENGINE is not None and ENGINE.pid == os.getpid() else None


@contextmanager
def collect_loaded_programs(meets: Callable[[Program], None]) -> Iterator[list[Program]]:
    """Yield a list that gets each program that this thread loads in the block, after `meets` was called with
    it. In a block within this one, programs go to that block alone."""
    found: list[Program] = []

    def collect_program(program: Program) -> None:
        meets(program)
        found.append(program)

    before = getattr(_LOADING, "meets", None)
    _LOADING.meets = collect_program
    try:
        yield found
    finally:
        _LOADING.meets = before


def program(text: str) -> Callable[..., None]:
    """Make the program of a schedule. Generated code calls this when it is loaded; its slots call what this
    returns."""
    loaded = Program(Schedule.parse(text))
    meets = getattr(_LOADING, "meets", None)
    if meets is not None:
        meets(loaded)

    def run_slot_of_program(index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        if ENGINE is not None:
            if SIGNALS.struck:
                SIGNALS.raise_in_backward()
            with ENGINE.lock:
                ENGINE.run_slot(loaded, index, tensors, live_bytes)

    return run_slot_of_program


def guarded(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled program between two stretches of user code. It leaves everything in order when an exception
    ends it: ours, a kernel's, Ctrl-C."""

    def run_and_end_call(arguments: list[Any]) -> Any:
        engine = ENGINE
        if engine is None:
            return run(arguments)
        engine.user.suspend_touches()
        try:
            result = run(arguments)
        except BaseException:
            if ENGINE is not None:
                with ENGINE.lock:
                    ENGINE.abandon_call()
            raise
        finally:
            engine.user.resume_touches()
        if ENGINE is not None:
            with ENGINE.lock:
                ENGINE.end_call(result)
        return result

    run_and_end_call._boxed_call = True  # type: ignore[attr-defined]
    return run_and_end_call
