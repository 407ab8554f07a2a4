"""The engine. At each slot it makes the next kernel's tensors resident, within the budget.

    slot i      1 register the tensors that the previous kernel made
                2 carry out the plan's moves for this tick
                3 make every tensor resident that the next kernel reads or writes, and make room for
                  the tensors that this kernel makes
    kernel i    runs; its tensors are resident until slot i + 1

The plan is only a hint, but part 3 is always carried out. Without a plan, or with a stale or hostile plan,
part 3 fetches tensors on demand, and evicts the tensors whose next use is furthest. The step takes more time,
but its results are the same.

User code runs between programs, or at the same time on other threads. The engine also fetches the tensors
that user code reads (`user_code.py`).
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
from teraio.ranks import failures

from ..device.device import Device, Host
from ..eager import gradients as _gradients
from ..eager.signals import SIGNALS
from ..eager.user_code import UserCode
from ..ledger.engine_lock import EngineLock
from ..ledger.keep_option import KeepOption
from ..ledger.record import Record, use_bound, use_records, wrote_bound
from ..ledger.recorder import Recorder
from ..ledger.residency import Need, Residency
from ..ledger.restore import make_everything_resident
from ..step.kernel_workspace import KernelWorkspace
from ..step.late_frees import LateFrees
from ..step.plan_follower import PlanFollower, SlotPosition
from ..step.program import Program
from ..step.quiet_call import QuietCall
from ..step.stats import Stats, StepMeter
from ..step.tracker import StepTracker
from ..store.store import Store
from .late_updates import LateUpdates
from .registry import Registry

CALLS_MAX = 4096  # limit of a step's calls; at the limit, the engine forgets the calls, to save memory


class OpenSlot(NamedTuple):
    """A slot between its two halves: `open_slot` has run, and `ensure_resident` has not run yet.

    The plan's moves run in between. They may not evict the slot's records.
    """

    program: Program
    at: int  # the number of the slot in the program
    live_bytes: int
    needed: list[Record]  # records that the next kernel needs
    results: list[Record]  # at the program's last slot: records that must be resident for user code
    tick: int | None
    began: Any  # in a measured step: the moment at which the slot began, by the device's clock

    @property
    def required_records(self) -> list[Record]:
        """Return the records that the plan's moves at this slot may not evict."""
        return self.needed + self.results


class Engine:
    """The engine of one process: the ledger of tensors, the tracker of steps, and the work at each slot.

    `on_step` gets each measured step, and None after any other step. `at_rest` is called after an optimizer's
    step, when no compiled program runs. If `unobserved` is True, no observer detects reads by user code. In
    this case every tensor that user code can read is kept resident.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        budget_bytes: int,
        reserve_bytes: int,
        on_step: Callable[[Step | None], None] | None = None,
        keep: Sequence[str] = (),
        host: Host | None = None,
        at_rest: Callable[[], None] = lambda: None,
        unobserved: bool = False,
    ) -> None:
        self.pid = os.getpid()
        self.lock = EngineLock()
        self.on_step, self.at_rest = on_step, at_rest
        self.residency = Residency(
            store, device, budget_bytes, reserve_bytes, host, KeepOption(keep, unobserved)
        )
        self.mover = self.residency.mover
        self.unresizable = self.residency.unresizable
        self.meter = StepMeter(self.mover)
        self.tracker = StepTracker(self.meter.begin_step, device)
        self.user = UserCode(self.residency, device, self.tracker, self.lock, self._count_quiet_call)
        self.known_tensors = self.user.known_tensors
        self.registry = Registry(self.residency, self.tracker, self.user, self.lock)
        self.gradients = self.registry.gradients
        self.kernel_workspace = KernelWorkspace(self.residency, device)
        self.late_frees = LateFrees(self.residency, device)
        self.follower = PlanFollower(self.residency)
        self.optimizers: set[int] = set()  # numbers of the optimizers that have stepped in this step
        self.quiet_call = QuietCall(self.residency, self.tracker, self.registry.register_program_tensor)
        self.late = LateUpdates(self.user, self.registry, self._run_one_slot)
        self.dead_bytes = 0  # bytes of freed tensors in `resident_bytes`, when `stats` last counted them
        self.spared_before = (0, 0)  # counts of the observer that belong to engines before this one
        if device.observer is not None:
            device.observer.report_to(self.user)
            self.spared_before = device.observer.spared_fetches()

    # ---- slots

    def run_slot(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int | None) -> None:
        """Run a slot. At most slots nothing has to be done, and this method returns after a few
        comparisons."""
        if self.quiet_call.program is not None:
            if self.quiet_call.program is program and 0 < index < program.last:
                self.quiet_call.collect_made_tensors(index, tensors)
                return
            self.quiet_call.register_collected_tensors()
        stop = program.stops[index]
        live_bytes = program.unmovable_bytes_at_slot(index, live_bytes)
        residency, mover, tracker, bound = self.residency, self.mover, self.tracker, program.bound
        mover.counts.count_slots()
        serial = residency.advance_slot()
        if tracker.running is None and 0 < index < program.last:
            for position, buffer in stop.made:
                bound[buffer] = self.registry.register_program_tensor(program, buffer, tensors[position])
            late = program.has_collectives and self.late_frees.are_late(program, index, live_bytes)
            resident = use_bound(bound, stop.needed, serial)
            tick = tracker.tick_of_slot(index) if tracker.expected.table or not resident else None
            total_bytes = mover.resident_bytes + live_bytes
            fits = total_bytes + residency.reserve_bytes <= residency.budget_bytes
            has_work = late or not (resident and fits) or residency.torn is not None
            if not has_work and not tracker.expected.has_moves_at(tick):
                mover.counts.note_peak(total_bytes)
                if stop.written:
                    wrote_bound(bound, stop.written)
                return
            tensors = ()  # all tensors of this slot are registered now
        slot = self.open_slot(program, index, tensors, live_bytes)
        if (expected := self.tracker.expected).has_moves_at(slot.tick):
            here = SlotPosition(expected, slot.tick, live_bytes)
            use_records(slot.required_records, residency.serial)  # a new step may have changed the number
            self.follower.carry_out(expected.operations_at(slot.tick), here)
            self.follower.begin_late_fetches(here)
        self.ensure_resident(slot)
        if index == 0 and program.schedule.kind != "optimizer":
            self.quiet_call.begin_if_quiet(program)

    def _run_one_slot(
        self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int | None
    ) -> None:
        """Run a slot by `run_slot`, which a recorder may have replaced."""
        self.run_slot(program, index, tensors, live_bytes)

    def open_slot(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int) -> OpenSlot:
        """Run the first half of a slot: register the tensors that the previous kernel made, and find the
        records that the next kernel needs."""
        residency, tracker = self.residency, self.tracker
        began = (
            self.mover.device.moment_after_kernels() if index == 0 or tracker.running is not None else None
        )
        stop = program.stops[index]
        if residency.torn is not None:
            residency.raise_torn_step_error()
        own = program.schedule.kind != "optimizer"  # an optimizer's records are bound before its first slot
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
            # All arguments are registered now, including arguments that eager code made. So user code's other
            # bytes can be counted.
            self.user.eager_memory.reserve_kept_bytes()
            self._refuse_program_over_budget(program)
        if program.has_collectives:
            self.late_frees.run_slot(program, index, live_bytes)
        needed = [record for buffer in stop.needed if (record := bound[buffer]) is not None]
        results = self.user.records_required_after_call(tracker.number) if index == program.last else []
        return OpenSlot(program, index, live_bytes, needed, results, tracker.tick_of_slot(index), began)

    def ensure_resident(self, slot: OpenSlot) -> None:
        """Run the second half of a slot: make the records resident that the next kernel reads or writes, and
        make room for the kernel's workspace."""
        residency, tracker = self.residency, self.tracker
        program, index, live_bytes, tick = slot.program, slot.at, slot.live_bytes, slot.tick
        stop, bound, last = program.stops[index], program.bound, index == program.last
        told_bytes = live_bytes - program.unseen_bytes[index]
        late = index in program.update_slots
        residency.make_resident_within_budget(slot.needed, told_bytes, stop.kernel, tick, late)
        live_bytes -= self.kernel_workspace.make_room_for_kernel(
            program, index, live_bytes, tick, tracker.running is not None
        )
        wrote_bound(bound, stop.written)
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
        )  # before `program.begin_call` clears `bound`: the previous call may be a call of the same program
        self.update_expected_uses()
        program.begin_call()
        self.gradients.begin_call(program)

    def update_expected_uses(self) -> None:
        """Pass two facts about the expected step to the ledger. (1) The ticks at which kernels and user code
        use each tensor. (2) The tensors that the plan evicts to the host."""
        expected = self.tracker.expected
        self.mover.expect_host_copies(expected.to_host)
        self.residency.expected_uses.expect(expected.uses, expected.length, expected.around)

    def _refuse_program_over_budget(self, program: Program) -> None:
        """Refuse a program if its largest kernel cannot fit in the budget. Check each program only once,
        after its arguments are registered."""
        if self.tracker.running is not None:
            self.kernel_workspace.measure_and_reserve_lasting_bytes(step=self.tracker.number == 0)
        if program.begin_check():
            self._refuse_or_grow_budget(program)

    def _refuse_or_grow_budget(self, program: Program) -> None:
        """Compare the bytes that the largest kernel needs with the budget. Raise BudgetError or grow the
        budget if they do not fit.

        The program has not run any kernel yet, so an error at this point loses no tensor of the step.
        """
        residency = self.residency
        if program.schedule.symbolic:
            return
        residency.forget_dead_records()
        need = Need(*program.largest_kernel_need(residency.fixed_bytes, self.gradients.is_evictable_early))
        if residency.is_over_budget(need):
            residency.refuse_or_grow_budget(need)
        residency.note_largest_need(need)

    def _count_quiet_call(self) -> None:
        """Register the tensors that the running quiet call has made so far.

        A quiet call is a call in which no tensor moves, so tensors are registered only at its end. If user
        code reads an evicted tensor before, the ledger must be complete.
        """
        self.quiet_call.register_collected_tensors()

    # ---- the step

    def finish_optimizer_step(self) -> None:
        """End an optimizer's step. Unless another optimizer steps next, the training step ends as well."""
        for record in self.unresizable.retry_making_evictable():  # now no program uses the tensors
            self.registry.note_tensor_facts(record)
        self.tracker.note_optimizer_step(self.meter.end_step(self.residency.reserve_bytes, trained=True))
        self.user.resume_user_code()
        self.at_rest()

    def end_step_if_optimizer_repeats(self, optimizer: int) -> None:
        """End the training step before this optimizer steps a second time in it. Do this only if no compiled
        program has run in the step.

        Without compiled programs, no call of a program shows where a training step ends.
        """
        programs = self.tracker.programs
        eager = bool(programs) and all(program.schedule.kind == "optimizer" for program in programs)
        if eager and self.tracker.stepped is not None and optimizer in self.optimizers:
            self.end_step()
        self.optimizers.add(optimizer)

    def end_step(self) -> None:
        """End the training step. The engine expects that the next step is like the measured step."""
        self.optimizers.clear()
        self.residency.begin_step()
        self.registry.mark_surviving_gradients_persistent()
        if self.tracker.programs and self.tracker.stepped is None:  # inference, or an update by user code
            ended = self.meter.end_step(self.residency.reserve_bytes, trained=self.tracker.training)
            self.tracker.note_end_without_optimizer(ended)
        if (recorder := self.mover.recorder) is not None:
            expected = self.tracker.expected
            recorder.end_step(
                self.meter.ended_ns or time.perf_counter_ns(),
                self.tracker.training,
                expected.settled or bool(expected.table),
            )
        self.residency.limit_allocator_cache()
        around = self.late.end_step()
        step = self.tracker.finish(self.registry.described.get, self.user.end_step(), around)
        self.registry.forget_names_of_step()
        if step is not None:
            self.tracker.expected.learn_uses_from_step(step)
        if self.on_step is not None:
            self.on_step(step)
        self.update_expected_uses()
        if recorder is not None:
            recorder.restart_step_clock()

    def follow_plan(self, plan: Plan, order: tuple[str, ...] = ()) -> None:
        """Follow this plan in every step that runs the programs in `order`. If `order` is empty, follow the
        plan in every step that runs the same programs as the last step."""
        self.tracker.expectation_of(order).set_plan(plan)

    def settle_plan(self, plan: Plan | None, order: tuple[str, ...] = ()) -> None:
        """Stop measuring steps that run the programs in `order`. If `order` is empty, stop measuring steps
        that run the same programs as the last step. If `plan` is not None, follow the plan in such steps."""
        self.tracker.expectation_of(order).set_plan(plan, settle=True)

    def end_call(self, outputs: Any) -> None:
        """End a call of a program. Autograd and user code run next."""
        backward = bool(self.gradients.leaves)
        if backward:
            order = tuple(program.own_identity for program in self.tracker.programs)
            self.gradients.release_gradients_to_autograd(outputs, order)
        self.user.resume_user_code()
        if not backward:  # after a backward, handlers must wait: autograd has not added up the gradients yet
            SIGNALS.call_due_after_program()

    def abandon_call(self) -> None:
        """Clean up after an exception has ended a call of a program. User code runs next."""
        self._keep_tensors_in_flight()
        self.tracker.abandon_call()
        self.quiet_call.abandon()
        self.late.abandon_call()
        self.kernel_workspace.abandon_kernel_measure()
        if self.mover.recorder is not None:
            self.mover.recorder.mark_step_broken()
        self.user.end_optimizer_update()
        self.user.resume_after_exception(self.tracker.number)

    def _keep_tensors_in_flight(self) -> None:
        """Keep the tensors resident that a collective may still use, although an exception has ended its
        program. Nothing will wait for the collective, and it may go on for long."""
        program = self.tracker.programs[-1] if self.tracker.programs else None
        if program is None or not program.in_flight:
            return
        quiet = self.quiet_call.program is program
        for buffer in program.in_flight:
            record = program.bound[buffer]
            if record is not None and (quiet or record.used_at == self.residency.serial):
                self.mover.end_move(record)
                because = "a collective used it when an exception ended the program"
                self.residency.forbid_eviction_for_good(record, because)

    # ---- change the budget, return counts, close the engine

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the budget, and evict records until the resident bytes fit in the new budget. None means the
        smallest budget that the kernels of known programs need.

        Raise BudgetError if one of these kernels needs more than the budget. The engine still follows plans
        that were made for another budget, as hints.
        """
        residency = self.residency
        with self.lock:
            residency.set_budget(budget_bytes)
            residency.advance_slot()
            residency.evict_until_fits(0, None, self.user.must_be_resident)
            residency.limit_allocator_cache()

    def attach_recorder(self, recorder: Recorder) -> None:
        """Report moves and slots to this recorder from now on. The recorder wraps `run_slot`, so slots
        without a recorder need not check whether there is one."""
        self.mover.record_to(recorder)
        self.run_slot = recorder.record_each_slot_of(self.run_slot)  # type: ignore[assignment, method-assign]

    def stats(self) -> Stats:
        """Return the counts of moves and the numbers of bytes that `teraio.stats()` shows.

        Any thread may call this method. It does not wait for the engine's lock. Only with the lock may it
        look which tensors are freed, so a call during a slot uses the count of an earlier call.
        """
        found = self.meter.stats(
            self.tracker.expected, self.residency.budget_bytes, self.residency.reserve_bytes
        )
        if self.lock.acquire(blocking=False):
            try:
                self.dead_bytes = self.residency.dead_resident_bytes()
            finally:
                self.lock.release()
        found["resident_bytes"] = max(found["resident_bytes"] - self.dead_bytes, 0)
        if self.user.observer is not None:
            owed, answered = self.user.observer.spared_fetches()
            found["owed_scalings"] = owed - self.spared_before[0]
            found["remembered_norms"] = answered - self.spared_before[1]
        return found

    def close_without_fetching(self) -> None:
        """Close the engine when the process exits. Evicted tensors are not fetched, and a later read of such
        a tensor raises EvictedError."""
        self.mover.device.limit_tensors_and_spare_memory(0)
        self.mover.store.close()

    def fetch_all_and_close(self) -> None:
        """Fetch every evicted tensor, even if the tensors do not fit in the budget. Then close the store."""
        with self.lock:
            self.late.settle_all_or_lose("the end of the engine")
            if self.late.backward.forget_all():
                self.residency.declare_loss(
                    TeraioError("a backward has updated weights, and step() was not called after it")
                )
            if self.tracker.stepped is not None:
                self.end_step()
            make_everything_resident(self.residency, self.user.must_be_resident)
            self.mover.device.limit_tensors_and_spare_memory(0)
            self.mover.store.close()
            if self.residency.torn is not None and not self.residency.torn_is_known:
                raise self.residency.torn


ENGINE: Engine | None = None


class _Loading(threading.local):
    """The function that this thread calls with each program that it loads, or None."""

    meets: Callable[[Program], None] | None = None

    def replace(self, meets: Callable[[Program], None] | None) -> Callable[[Program], None] | None:
        """Set the function, and return the previous function."""
        before, self.meets = self.meets, meets
        return before


_LOADING = _Loading()


def set_current_engine(engine: Engine | None) -> None:
    """Set the engine of this process. None means that the process has no engine any more."""
    global ENGINE
    if engine is None:
        failures.end()
    if engine is None and ENGINE is not None and ENGINE.user.observer is not None:
        ENGINE.user.observer.report_to(None)
    ENGINE = engine
    _gradients.set_active(engine.gradients if engine is not None else None)


def current_engine() -> Engine | None:
    """Return the engine of this process, or None. A forked child has no engine."""
    return ENGINE if ENGINE is not None and ENGINE.pid == os.getpid() else None


@contextmanager
def collect_loaded_programs(meets: Callable[[Program], None]) -> Iterator[list[Program]]:
    """Yield a list that collects the programs that this thread loads in the `with` block. Call `meets` with
    each program before the list gets the program.

    If such blocks are nested, a program goes only to the list of the innermost block.
    """
    found: list[Program] = []

    def collect_program(program: Program) -> None:
        meets(program)
        found.append(program)

    before = _LOADING.replace(collect_program)
    try:
        yield found
    finally:
        _LOADING.replace(before)


def program(text: str) -> Callable[..., None]:
    """Make a Program from the schedule in `text`. Return the function that the slots of the generated code
    call.

    Generated code calls `program` only once, when the code is loaded.
    """
    loaded = Program(Schedule.parse(text))
    if _LOADING.meets is not None:
        _LOADING.meets(loaded)

    def run_slot_of_program(index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        if ENGINE is not None:
            if SIGNALS.struck:
                SIGNALS.raise_in_backward()
            with ENGINE.lock:
                run_slot = ENGINE.late.run_slot if ENGINE.late.is_open else ENGINE.run_slot
                run_slot(loaded, index, tensors, live_bytes)

    return run_slot_of_program


def guarded(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wrap a compiled program, so that the engine notices the end of each call, even by an exception. Other
    ranks get notice of such an exception, too."""

    def run_and_end_call(arguments: list[Any]) -> Any:
        engine = ENGINE
        if engine is None:
            return run(arguments)
        failures.raise_if_rank_failed()
        with failures.reporting():
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
        failures.cancel()
        return result

    run_and_end_call._boxed_call = True  # type: ignore[attr-defined]
    return run_and_end_call
