"""The engine of this process, from the first compile to the plan that all further steps follow.

start       set the budget, open the store, measure links; `teraio.init` does this before a model exists
each step   advance each order of programs from MEASURING through TRIAL to PLANNED (course.py)
reset       fetch all evicted tensors, close the store
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from teraio import switches
from teraio.errors import OptionError, TeraioError, UnsupportedError
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.formats.schedule import Schedule, Step
from teraio.options import SMALLEST, Memory, Settings
from teraio.passes.capture import foreign_backends
from teraio.passes.slots import lifetimes
from teraio.ranks import failures
from teraio.runtime.device import choose, device
from teraio.runtime.eager.signals import SIGNALS
from teraio.runtime.engine import engine
from teraio.runtime.ledger.restore import make_everything_resident
from teraio.runtime.optimizer import hooks, host_step
from teraio.runtime.patches import cuda_graphs, pickling, wrapped_functions
from teraio.runtime.step.stats import ShownStats, Stats
from teraio.runtime.step.tracker import EXPECTATIONS_MAX
from teraio.session.course import TRIAL_STEPS, Course, Order, Phase
from teraio.session.host_shares import available_bytes
from teraio.session.late_choice import LateChoice
from teraio.session.log_lines import set_up_logging
from teraio.session.notices import (
    describe_step,
    oversized_budget_lines,
    tensor_names_in,
    unknown_variable_lines,
    unmatched_keep_lines,
)
from teraio.session.plan_reuse import EarlierPlans
from teraio.session.planning import Planning
from teraio.session.rank_checks import RankChecks
from teraio.session.recomputation import Recomputation
from teraio.session.tiers import Tiers, refuse_host_options_without_gpu
from teraio.session.timeline_recording import Recording
from teraio.units import fmt_bytes, fmt_count

log = logging.getLogger("teraio")

# Memory in reserve for bytes that the engine does not count: small storages, and workspaces of library
# kernels. Llamas of 9 to 40 million parameters used 0.3 to 0.8 MB of it.
RESERVE_BYTES = 2 * 2**20

NAMED = 5  # number of tensors that a message lists


class Session:
    """The run of one process: its engine, and one course for each order of programs.

    An order of programs is one kind of step. A course has its measurements and its plan.
    """

    def __init__(self, options: Settings, on: str | torch.device = "cpu") -> None:
        kind = torch.device(on).type
        _refuse_impossible_options(options, kind)
        self.options = options
        self.ranks = RankChecks(options)
        # Read the plan file first. If this raises an error, nothing has been opened yet.
        replay = _read_plan_file(options) if options.plan else None
        self.courses: dict[Order, Course] = {}
        self.begun = False
        self.names: set[str] | None = set()  # tensor names in measured steps; None after `keep` was checked
        self.device = choose.choose_device(on)
        self.available_bytes = available_bytes(self.device)
        budget = self.available_bytes
        if options.memory is not None:
            budget = options.memory.resolve(self.available_bytes, 0)
        tiers = Tiers(options, self.device, budget)
        store = tiers.store
        # On the CPU, the store's buffers (slabs) count in the budget. Bytes in flight are only in a slab, and
        # a slab is RAM, too.
        reserve = RESERVE_BYTES + (store.slab_bytes_total if kind == "cpu" else 0)
        reserve += self.device.library_workspace_bytes(budget)
        self.engine = engine.Engine(
            store,
            self.device,
            budget,
            reserve,
            self.end_step,
            keep=options.keep,
            host=tiers.host,
            at_rest=self._reset_code_of_due_graphs,
            unobserved=self.device.observer is None,
        )
        if options.optimizer_step != "device" and tiers.host is not None:
            host_step.set_host_buckets(self.engine, None if options.optimizer_step == "host" else ())
        if options.updates == "late":
            self.engine.late.choose(None)
        elif options.updates == "backward":
            self.engine.late.backward.choose(None)
        self.recording = Recording(self.engine, options.timeline) if options.timeline else None
        self.earlier = EarlierPlans(options, replay, self.engine, self.device.device)
        find, auto = self.earlier.cached_plan_of_graph, options.recompute == "auto"
        self.recomputation = Recomputation(replay, find, auto)
        self.planning = Planning(options, tiers.machine, self.engine, self.earlier, self.recomputation)
        self.late_choice = LateChoice(self.planning, self.earlier, self.engine)
        if options.memory == SMALLEST:
            self.engine.set_budget(None)
        if left_out := switches.disabled_features():
            log.warning(
                "teraio: features turned off by %s: %s", switches.VARIABLE, ", ".join(sorted(left_out))
            )
        for line in oversized_budget_lines(budget, self.device.capacity_bytes()):
            log.warning("teraio: %s", line)
        log.info(
            "teraio: memory %s, %s of it in reserve; %s%s",
            "min (as little as kernels need)" if options.memory == SMALLEST else fmt_bytes(budget),
            fmt_bytes(reserve),
            tiers.places_text,
            "" if replay else f"; measuring {fmt_count(options.warmup, 'step')} first",
        )

    def set_budget(self, memory: Memory) -> None:
        """Change the budget.

        A course that has kept the measurements for its last plan gets a new plan. The other courses measure
        again.
        """
        self.engine.set_budget(None if memory == SMALLEST else memory.resolve(self.available_bytes, 0))
        self.earlier.forget_all()
        self.cancel_planning()
        self.late_choice.restart()
        for order in self.engine.tracker.known:
            course = self._course_of(order)
            if course.source is not None:
                self.engine.settle_plan(self.planning.begin_choice(*course.source).finish(), order)
                course.settle()
            else:
                self.engine.tracker.request_measuring(order)
                if course.phase is not Phase.MEASURING:
                    course.measure_again(final=course.phase is Phase.TRIAL)

    def _course_of(self, order: Order) -> Course:
        """Return the course of this order of programs. If there is none, make a new course.

        Delete the oldest courses whose orders the engine has forgotten.
        """
        course = self.courses.pop(order, None) or Course(order)
        self.courses[order] = course
        forgotten = [each for each in self.courses if each not in self.engine.tracker.known]
        for each in forgotten[:-EXPECTATIONS_MAX]:
            self.courses.pop(each).cancel_planning()
        return course

    def sources(self) -> list[tuple[Profile, Step]]:
        """Return, for each course, the profile and step from which its plan was made. The most recently used
        course is last.
        """
        return [course.source for course in self.courses.values() if course.source is not None]

    def phase_of(self, course: Course) -> Phase:
        """Return the phase of a course. While programs are being recompiled, return RECOMPILING."""
        return Phase.RECOMPILING if self.recomputation.due else course.phase

    def is_steady(self) -> bool:
        """Return True if the next step of the last step's kind is neither measured, nor tried, nor compared,
        and no planner works beside it. The durations of such steps can be compared."""
        expected = self.engine.tracker.expected
        course = self.courses.get(expected.programs)
        return (
            course is not None
            and self.phase_of(course) is Phase.PLANNED
            and expected.settled
            and not self.planning.is_choosing
            and not self.late_choice.is_running
        )

    def end_step(self, step: Step | None) -> None:
        """Use the plans that the planner has made during the step, and advance the step's course.

        The engine calls this after each step. If the step was not measured, `step` is None.
        """
        if step is not None:
            self.add_measured_step(step)
        for course in [it for it in self.courses.values() if it.phase is Phase.PLANNING]:
            self._use_plan_if_chosen(course)
        self.late_choice.end_step(self.courses)

    def add_measured_step(self, step: Step) -> None:
        """Advance the course to which this measured step belongs."""
        course = self._course_of(tuple(call.schedule.identity_hash for call in step.calls))
        if not self.begun:
            self.begun = True
            self._warn_of_immovable_weights()
        if self.engine.tracker.expected.settled:  # `set_memory` made a plan for this order while the step ran
            return
        if course.phase is Phase.PLANNED:  # the engine has begun to measure this order again
            course.measure_again()
        if self.phase_of(course) is Phase.RECOMPILING or self.planning.recompute_by_plan_file(step):
            return
        # Beside a planner process, kernels take longer. So no such step is measured or tried.
        if course.phase is Phase.PLANNING or self.planning.is_choosing:
            return
        if course.phase is Phase.TRIAL and not self._end_trial_by_step(course, step):
            return
        if not course.was_tried and self._begin_earlier_plan(course, step):
            return
        if not self._is_warm_after(course, step):
            return
        profile = lifetimes.profile_of_steps(course.take_steps()[1:], "run")
        if self.options.profile:
            self._write_profile(profile, self.options.profile)
        course.begin_planning(self.planning.begin_choice(profile, step), profile, step)

    def _use_plan_if_chosen(self, course: Course) -> None:
        """Begin the trial of the chosen plan, or follow the plan, if its choice has ended."""
        assert course.choice is not None
        try:
            if not self.planning.advance_choice(course.choice):
                return
        except BaseException:
            course.cancel_planning()
            raise
        plan = course.end_planning()
        if self.phase_of(course) is Phase.RECOMPILING:
            return
        if plan is not None and not course.was_tried and self.earlier.needs_trial(course.order, plan):
            course.begin_trial(plan)
            self.engine.follow_plan(plan, course.order)
        else:
            course.settle()
            self.engine.settle_plan(plan, course.order)

    def _end_trial_by_step(self, course: Course, step: Step) -> bool:
        """Add a step to the trial of a plan.

        Return True if the trial failed, so that the step must be measured again.
        """
        self._warn_of_unmatched_keep(step, last=True)
        if course.add_step(step) < TRIAL_STEPS:
            return False
        if course.source is None:  # an earlier run has made the plan
            course.note_source(lifetimes.profile_of_steps([step], "run"), step)
        if not self.earlier.matches_prediction(course.end_trial(), step):
            return True
        course.settle()
        self.engine.settle_plan(None)
        return False

    def _begin_earlier_plan(self, course: Course, step: Step) -> bool:
        """Follow an earlier plan for this step, or the late updates of an earlier run, and return True.
        Return False if there is neither.

        A cached plan gets a trial. A plan from the plan file is followed without a trial.
        """
        profile = lifetimes.profile_of_steps([step], "run")
        fingerprint = fingerprint_of_profile(profile)
        if self.late_choice.follow_earlier_decision(profile, fingerprint):
            return True
        plan = self.earlier.find_plan(course.order, step, fingerprint)
        if plan is None:
            return False
        self._warn_of_unmatched_keep(step, last=True)
        if plan is self.earlier.replay:
            course.settle()
            self.engine.settle_plan(plan)
        else:
            course.begin_trial(plan)
            self.engine.follow_plan(plan)
        return True

    def _is_warm_after(self, course: Course, step: Step) -> bool:
        """Add a measured step to its course. Return True if the course has enough steps to make a plan.

        The first step does not count, because programs are compiled and optimizer states are created during
        it.
        """
        warmup = 1 if self.earlier.replay else self.options.warmup
        count = course.add_step(step)
        if count > 1:
            log.info("teraio: measured step %d/%d: %s", count - 1, warmup, describe_step(step))
        self._warn_of_unmatched_keep(step, last=count > warmup)
        return count > warmup

    def _reset_code_of_due_graphs(self) -> None:
        """Have Dynamo compile due graphs again (graphs with new nodes to recompute).

        The engine calls this when no compiled program is running.
        """
        self.recomputation.reset_code_of_due_graphs()

    def fetch_all_and_close(self) -> None:
        """Fetch all evicted tensors, close the engine, and write the timeline of the last step."""
        try:
            self.engine.fetch_all_and_close()
        finally:
            self.cancel_planning()
            if self.recording is not None:
                self.recording.write(ended=True)

    def cancel_planning(self) -> None:
        """End the choices of plans that are being made. Their kinds of steps are measured again."""
        for course in self.courses.values():
            course.cancel_planning()
        self.late_choice.cancel()

    def _warn_of_unmatched_keep(self, step: Step, last: bool) -> None:
        """Collect names of tensors. At the `last` step before a plan, warn of patterns in `keep` that match
        no tensor.
        """
        if self.names is None:
            return
        self.names |= tensor_names_in(step)
        if last:
            unseen = [glob for glob in self.options.keep if glob not in self.engine.residency.keep.found]
            for line in unmatched_keep_lines(unseen, self.names):
                log.warning("teraio: %s", line)
            self.names = None

    def _warn_of_immovable_weights(self) -> None:
        stuck = [*self.engine.unresizable.records.values()]
        if stuck:
            reasons = [f"{record.name} ({self.engine.unresizable.why(record)})" for record in stuck[:NAMED]]
            log.warning(
                "teraio: kept resident: %s (%s), because a file or another library owns the bytes: %s%s. "
                "Clone such weights before compiling to let them move",
                fmt_count(len(stuck), "weight"),
                fmt_bytes(sum(record.size_bytes for record in stuck)),
                "; ".join(reasons),
                "; ..." if len(stuck) > NAMED else "",
            )

    def _write_profile(self, profile: Profile, path: str) -> None:
        """Write the profile. If this fails, log a warning and continue the training."""
        try:
            profile.write(path)
        except TeraioError as error:
            log.warning("teraio: the profile was not written: %s", error)


def _read_plan_file(options: Settings) -> Plan:
    assert options.plan
    plan = Plan.read(options.plan)
    if plan.late and options.updates == "step":
        raise OptionError(
            f"{options.plan} is a plan with late updates ({fmt_count(len(plan.late), 'weight')}), and the "
            f"option 'updates' is 'step': set it to 'auto', or make the plan again with teraio plan ... "
            f"--updates step"
        )
    if plan.backward and options.updates != "backward":
        raise OptionError(
            f"{options.plan} is a plan with updates in the backward "
            f"({fmt_count(len(plan.backward), 'weight')}), which need the option updates='backward': they "
            f"assume that no code uses weights or gradients between the backward and step(). Set it, or make "
            f"the plan again with teraio plan ... --updates auto"
        )
    return plan


SESSION: Session | None = None
GIVEN: dict[str, Any] = {}  # options of `teraio.init`, the defaults of later compiles


def patch_torch() -> None:
    """Wrap functions of torch and register global hooks. Call this before Dynamo traces a frame.

    Only the first call in a process has an effect. Without an engine, the wrappers and hooks do nothing.

    Dynamo may trace a frame in two passes. If a torch function is wrapped between the passes, the second pass
    finds other code than the first pass, and Dynamo gives up.
    """
    global WATCH
    wrapped_functions.install()
    hooks.install()
    pickling.install()
    cuda_graphs.install()
    if WATCH is None:
        WATCH = foreign_backends.ForeignCompileWatch(_keep_weights_for_foreign_programs)


def start_with_options(options: Mapping[str, Any], on: torch.device) -> None:
    """Start the engine on this device. Later compiles use these options as defaults."""
    ensure_session(Settings.parse({**GIVEN, **options}), on)
    GIVEN.update(options)


def ensure_session(options: Settings, on: str | torch.device = "cpu") -> None:
    """Start the session if this process has none.

    A process can have only one session. Raise an error if a later compile is for another device or has other
    options.
    """
    global SESSION
    on = torch.device(on)
    if SESSION is None:
        set_up_logging()
        _warn_of_unknown_variables()
        SESSION = Session(options, "cpu" if on.type == "meta" else on)
        engine.set_current_engine(SESSION.engine)
        patch_torch()
        SIGNALS.install(apart=SESSION.device.kind == "cuda")
        observer = SESSION.device.observer
        if observer is not None and not observer.can_notice_taken_addresses:
            wrapped_functions.wrap_address_functions()
        if WATCH is not None:
            WATCH.register_compile_callbacks()
    elif on.type != "meta" and not device.is_same_memory(SESSION.device.device, on):
        raise UnsupportedError(
            f"this process keeps the memory of {SESSION.device.device} within a budget, and a program on "
            f"{on} was compiled. One process has one device: leave the other model to another backend, train "
            f"it in a process of its own, or call teraio.reset() in between"
        )
    elif _differing_options(SESSION.options, options):
        raise OptionError(
            "this process already runs with other options "
            f"({_differing_options(SESSION.options, options)}); one "
            f"process has one budget and one store. Compile both models with the same options, or call "
            f"teraio.reset() in between"
        )


def register_eager_weight(weight: torch.Tensor) -> None:
    """Register a weight that no program uses. As a result, the engine can evict all weights of the weight's
    optimizer.
    """
    assert SESSION is not None
    SESSION.engine.registry.register_eager_weight(weight, "eager")


@cache
def _warn_of_unknown_variables() -> None:
    for line in unknown_variable_lines(os.environ):
        log.warning("teraio: %s", line)


WATCH: foreign_backends.ForeignCompileWatch | None = None


def _keep_weights_for_foreign_programs() -> None:
    """Keep weights resident between programs if the engine cannot notice all reads of them.

    A program of another compiler reads a weight by its address. Some devices have an observer that notices
    when code takes an address. With such an observer, do nothing.
    """
    if SESSION is None or hooks.is_optimizer_update_running():
        return
    observer = SESSION.device.observer
    if observer is None or not observer.can_notice_taken_addresses:
        saved = _is_in_compiled_autograd()
        what = "weights and saved tensors" if saved else "weights"
        SESSION.engine.user.keep_weights(f"another compiler's program may read {what}", saved)


def _is_in_compiled_autograd() -> bool:
    """Return True if compiled autograd is active, which compiles a whole backward, eager nodes included."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def nodes_to_recompute(graph: str) -> tuple[Collection[str], int]:
    """Return a pair: the chosen nodes of this joint graph, and the most bytes that one kernel may need.

    The backward recomputes these nodes instead of saving their values.
    """
    if SESSION is None:
        return (), 0
    residency = SESSION.engine.residency
    room_bytes = residency.budget_bytes - residency.reserve_bytes - residency.budget_bytes // 20
    return SESSION.recomputation.nodes_to_recompute(graph), room_bytes


def recompute_cache_key() -> str:
    """Return a hash of all nodes chosen for recomputation, for the keys of compiler caches."""
    return "" if SESSION is None else SESSION.recomputation.cache_key


def note_loaded_program(schedule: Schedule) -> None:
    """Record that a program was loaded. The program may be new, or may come from a cache."""
    if SESSION is not None:
        SESSION.ranks.check_program(schedule, SESSION.recomputation)
        if schedule.kind != "backward" and schedule.graph:
            SESSION.recomputation.note_loaded_program(schedule.graph)


@contextlib.contextmanager
def uncount_graph_on_error() -> Iterator[None]:
    """Restore the count of teraio's own graphs if the block raises an error.

    After such an error, Dynamo splits the graph before the operator that failed, and traces the frame again.
    Without this function, the failed graph would be counted, too.
    """
    counted = 0 if WATCH is None else WATCH.ours
    try:
        yield
    except BaseException:
        if WATCH is not None:
            WATCH.restore_own_count(counted)
        raise


def count_graph_as_ours() -> None:
    """Count a graph as compiled by teraio's backend.

    The session takes a graph that is not counted for a graph of another compiler.
    """
    if WATCH is not None:
        WATCH.count_graph_as_own()


def reset() -> None:
    """Fetch all evicted tensors, then end the engine of this process."""
    pins = SESSION is not None and SESSION.device.kind != "cpu"
    _close_session()
    if pins:  # collecting the engine's reference cycles unpins host memory
        gc.collect()


def _close_session() -> None:
    global SESSION
    if SESSION is not None:
        running = SESSION.engine
        with running.lock:
            # Fetch before anything is closed, because fetching may raise an error.
            running.late.settle_all_or_lose("the end of the engine")
            make_everything_resident(running.residency, running.user.must_be_resident)
    session, SESSION = SESSION, None
    GIVEN.clear()
    engine.set_current_engine(None)
    SIGNALS.remove()
    if session is not None:
        session.fetch_all_and_close()


def set_memory(memory: str | int) -> None:
    """Change the memory budget of the running programs (`16GiB`, `80%`, `min`). Return after the engine has
    evicted the excess.

    The session makes new plans. No program is compiled again.
    """
    if SESSION is None:
        raise OptionError(
            "set_memory: nothing is compiled by teraio yet; give options={'memory': ...} to torch.compile"
        )
    parsed = Settings.parse({"memory": memory}, {}).memory
    assert parsed is not None
    failures.cancel()  # this rank goes on with another budget
    SESSION.set_budget(parsed)


def stats() -> Stats:
    """Return the engine's counts so far and in the last step, for loggers: numbers, and one word (`phase`).

    Before the first compile, the dict is empty. Any thread may call this function at any time.
    """
    running = SESSION  # another thread may reset the session during this call
    figures = {} if running is None else {**running.engine.stats(), "steady": running.is_steady()}
    return cast(Stats, ShownStats(figures))


def _refuse_impossible_options(options: Settings, kind: str) -> None:
    """Raise an error if an option cannot work in this process. The error names the option.

    Call this before the session opens anything.
    """
    refuse_host_options_without_gpu(options, kind)
    for name in ("profile", "timeline"):
        path = getattr(options, name)
        if path and not os.path.isdir(Path(path).absolute().parent):
            raise OptionError(f"option {name!r}: the folder of {path} does not exist; make it first")


def _differing_options(one: Settings, other: Settings) -> str:
    """Return the options that differ, except options of a single program, such as `mode`. Programs may differ
    in these.
    """
    names = [f.name for f in fields(Settings) if not f.metadata["program"]]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]
    return ", ".join(f"{name}: {getattr(one, name)} and {getattr(other, name)}" for name in differing)


@atexit.register
def _close_engine_at_exit() -> None:
    if SESSION is not None:
        with contextlib.suppress(Exception):
            SESSION.cancel_planning()
            engine.set_current_engine(None)
            SESSION.engine.close_without_fetching()
