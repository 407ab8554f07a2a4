"""The engine of this process, from the first compile to the installed plan.

start       budget, store, links measured; `teraio.init` does it before there is a model
on_step     a plan that is there and is for this step (plan_reuse.py) -> engine, at once
            warm-up steps -> profile -> plan -> engine, and kept for later runs
reset       everything comes back, the store is given up
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
from typing import Any

import torch

from teraio import switches
from teraio.errors import OptionError, TeraioError, UnsupportedError
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.options import SMALLEST, Memory, Settings
from teraio.passes.capture import foreign_backends
from teraio.passes.slots import lifetimes
from teraio.runtime.device import choose, device
from teraio.runtime.eager.signals import SIGNALS
from teraio.runtime.engine import engine
from teraio.runtime.ledger.restore import make_everything_resident
from teraio.runtime.optimizer import hooks, host_step
from teraio.runtime.patches import cuda_graphs, pickling, wrapped_functions
from teraio.runtime.step.stats import Stats
from teraio.runtime.step.tracker import EXPECTATIONS_MAX
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
from teraio.session.recomputation import Recomputation
from teraio.session.tiers import Tiers, refuse_host_options_without_gpu
from teraio.session.timeline_recording import Recording
from teraio.units import fmt_bytes, fmt_count

log = logging.getLogger("teraio")

# What the ledger does not see: storages too small for a record, workspaces of library kernels. The spike of
# the design met 0.3 to 0.8 MB in Llama shapes of 9 to 40 million parameters.
RESERVE_BYTES = 2 * 2**20

NAMED = 5  # tensors that a message lists


class Session:
    def __init__(self, options: Settings, on: str | torch.device = "cpu") -> None:
        kind = torch.device(on).type
        _refuse_impossible_options(options, kind)
        self.options = options
        replay = Plan.read(options.plan) if options.plan else None  # before anything is opened
        # Measured, by the order of their programs; the most recent is the last.
        self.steps: dict[tuple[str, ...], list[Step]] = {}
        self.begun = False
        self.names: set[str] | None = set()  # of tensors that were seen; None: no longer of interest
        self.device = choose.choose_device(on)
        self.available_bytes = self.device.default_budget_bytes()
        budget = self.available_bytes
        if options.memory is not None:
            budget = options.memory.resolve(self.available_bytes, 0)
        tiers = Tiers(options, self.device, budget)
        store = tiers.store
        # What plans were made from, by order.
        self.measured: dict[tuple[str, ...], tuple[Profile, Step]] = {}
        # In RAM the slabs are memory too: the only copies of bytes on their way.
        reserve = RESERVE_BYTES + (store.slab_bytes_total if kind == "cpu" else 0)
        reserve += self.device.library_workspace_bytes(budget)
        self.engine = engine.Engine(
            store, self.device, budget, reserve, self.add_measured_step, keep=options.keep, host=tiers.host
        )
        if options.optimizer_step != "device" and tiers.host is not None:
            host_step.set_host_buckets(self.engine, None if options.optimizer_step == "host" else ())
        self.recording = Recording(self.engine, options.timeline) if options.timeline else None
        self.earlier = EarlierPlans(options, replay, self.engine, self.device.device)
        self.remaking = Recomputation(replay, self.earlier.cached_plan_of_graph, options.recompute == "auto")
        self.engine.at_rest = self.remaking.reset_code_of_due_graphs
        self.planning = Planning(options, tiers.machine, self.engine, self.earlier, self.remaking)
        if options.memory == SMALLEST:
            self.engine.set_budget(None)
        if left_out := switches.disabled_features():
            log.warning("teraio: without %s (%s)", ", ".join(sorted(left_out)), switches.VARIABLE)
        for line in oversized_budget_lines(budget, self.device.capacity_bytes()):
            log.warning("teraio: %s", line)
        log.info(
            "teraio: memory %s, %s of it in reserve; %s%s",
            "as little as the kernels let it be" if options.memory == SMALLEST else fmt_bytes(budget),
            fmt_bytes(reserve),
            tiers.places_text,
            "" if replay else f"; measuring {fmt_count(options.warmup, 'step')} first",
        )

    def set_budget(self, memory: Memory) -> None:
        """Another budget from now on: measured steps are planned again, others are measured again."""
        self.engine.set_budget(None if memory == SMALLEST else memory.resolve(self.available_bytes, 0))
        self.earlier.forget_all()
        for order in self.engine.tracker.known:
            if order in self.measured:
                self.engine.settle_plan(self.planning.choose_plan(*self.measured[order]), order)
            else:
                self.engine.tracker.request_measuring(order)

    def add_measured_step(self, step: Step) -> None:
        """One more measured step. The first of its kind is not like the others: optimizer states are made in
        it, programs are compiled."""
        order = tuple(call.schedule.identity_hash for call in step.calls)
        if not self.begun:
            self.begun = True
            self._warn_of_immovable_weights()
        if self.engine.tracker.expected.settled:  # in the middle of it, as memory became another
            return
        if self.remaking.due or self.planning.recompute_by_plan_file(step):
            return  # measured when it is compiled anew
        if self.earlier.follow_if_known(order, step):
            self._warn_of_unmatched_keep(step, last=True)
            return
        measured = self.steps.pop(order, [])
        self.steps[order] = measured
        while len(self.steps) > EXPECTATIONS_MAX:  # the engine has forgotten it, too
            del self.steps[next(iter(self.steps))]
        measured.append(step)
        warmup = 1 if self.earlier.replay else self.options.warmup
        if len(measured) > 1:
            log.info("teraio: measured step %d/%d: %s", len(measured) - 1, warmup, describe_step(step))
        self._warn_of_unmatched_keep(step, last=len(measured) > warmup)
        if len(measured) <= warmup:
            return
        profile = lifetimes.profile_of_steps(measured[1:], "run")
        del self.steps[order]
        if self.options.profile:
            self._write_profile(profile, self.options.profile)
        self.measured = {o: m for o, m in self.measured.items() if o in self.engine.tracker.known}
        self.measured[order] = profile, step
        plan = self.planning.choose_plan(profile, step)
        if self.remaking.due:
            return
        if plan is not None and self.earlier.put_on_trial(order, plan):
            self.engine.follow_plan(plan)
        else:
            self.engine.settle_plan(plan)

    def fetch_all_and_close(self) -> None:
        """Everything comes back, and the timeline of the last step is written."""
        try:
            self.engine.fetch_all_and_close()
        finally:
            if self.recording is not None:
                self.recording.write(ended=True)

    def _warn_of_unmatched_keep(self, step: Step, last: bool) -> None:
        """When the first plan is made: what should be kept and was never seen."""
        if self.names is None:
            return
        self.names |= tensor_names_in(step)
        if last:
            unseen = [glob for glob in self.options.keep if glob not in self.engine.registry.found]
            for line in unmatched_keep_lines(unseen, self.names):
                log.warning("teraio: %s", line)
            self.names = None

    def _warn_of_immovable_weights(self) -> None:
        stuck = [*self.engine.unresizable.records.values()]
        if stuck:
            reasons = [f"{record.name} ({self.engine.unresizable.why(record)})" for record in stuck[:NAMED]]
            log.warning(
                "teraio: staying in memory: %s (%s) whose bytes belong to a file or another library and "
                "cannot be copied out unnoticed: %s%s. Clone what is to move before compiling",
                fmt_count(len(stuck), "weight"),
                fmt_bytes(sum(record.size_bytes for record in stuck)),
                "; ".join(reasons),
                "; ..." if len(stuck) > NAMED else "",
            )

    def _write_profile(self, profile: Profile, path: str) -> None:
        """A profile that cannot be written is no reason to end a training."""
        try:
            profile.write(path)
        except TeraioError as error:
            log.warning("teraio: the profile was not written: %s", error)


SESSION: Session | None = None
GIVEN: dict[str, Any] = {}  # to `start_with_options`: what a compile need not say again


def patch_torch() -> None:
    """Wraps functions of torch and registers global hooks, once per process, before Dynamo traces anything.

    Dynamo may restart the analysis of a frame. If a function of torch was wrapped in between, the second pass
    meets other code than the first, and Dynamo gives up. Without an engine all of it passes through."""
    global WATCH
    wrapped_functions.install()
    hooks.install()
    pickling.install()
    cuda_graphs.install()
    if WATCH is None:
        WATCH = foreign_backends.ForeignCompileWatch(_keep_weights_for_foreign_programs)


def start_with_options(options: Mapping[str, Any]) -> None:
    """The engine is there when this returns, with these options, or with those that it has; for the device
    that a model is made on now."""
    ensure_session(Settings.parse({**GIVEN, **options}), torch.get_default_device())
    GIVEN.update(options)


def ensure_session(options: Settings, on: str | torch.device = "cpu") -> None:
    """One engine for all programs of the process; a second compile may not ask for another budget, nor be on
    another device."""
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
        SESSION.engine.registry.blind = observer is None
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
    """Let the engine evict this weight, which no program has, and others of its optimizer."""
    assert SESSION is not None
    SESSION.engine.registry.register_eager_weight(weight, "eager")


@cache
def _warn_of_unknown_variables() -> None:
    for line in unknown_variable_lines(os.environ):
        log.warning("teraio: %s", line)


WATCH: foreign_backends.ForeignCompileWatch | None = None


def _keep_weights_for_foreign_programs() -> None:
    """Keep resident what a program of another compiler may read, if nobody sees it take addresses."""
    if SESSION is None or hooks.is_optimizer_update_running():
        return
    observer = SESSION.device.observer
    if observer is None or not observer.can_notice_taken_addresses:
        saved = _is_in_compiled_autograd()
        what = "weights, and what forwards saved," if saved else "weights"
        SESSION.engine.user.keep_weights(f"another compiler's program may read {what}", saved)


def _is_in_compiled_autograd() -> bool:
    """Whether a backward runs that is compiled as a whole, nodes of eager code and all."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def nodes_to_recompute(graph: str) -> tuple[Collection[str], int]:
    """Which saved nodes of a joint graph are made again instead, and what a kernel may need for that."""
    if SESSION is None:
        return (), 0
    residency = SESSION.engine.residency
    room_bytes = residency.budget_bytes - residency.reserve_bytes - residency.budget_bytes // 20
    return SESSION.remaking.nodes_to_recompute(graph), room_bytes


def recompute_cache_key() -> str:
    """Everything that is known to be made again, for the keys of caches."""
    return "" if SESSION is None else SESSION.remaking.cache_key


def note_loaded_program(graph: str) -> None:
    """A program that was cut from this joint graph is there, compiled or from a cache."""
    if SESSION is not None and graph:
        SESSION.remaking.note_loaded_program(graph)


@contextlib.contextmanager
def uncount_graph_on_error() -> Iterator[None]:
    """Takes the graph back that the block counts as ours, if the block raises.

    Dynamo then breaks the graph before the operator that failed and traces the frame again."""
    counted = 0 if WATCH is None else WATCH.ours
    try:
        yield
    except BaseException:
        if WATCH is not None:
            WATCH.ours = counted
        raise


def count_graph_as_ours() -> None:
    """The backend compiles a graph: it is no other compiler's."""
    if WATCH is not None:
        WATCH.count_graph_as_own()


def reset() -> None:
    """Ends the engine of this process: everything that is away comes back first."""
    pins = SESSION is not None and SESSION.device.kind != "cpu"
    _close_session()
    if pins:  # the engine is in cycles: its memory is unpinned when they are found
        gc.collect()


def _close_session() -> None:
    global SESSION
    if SESSION is not None:
        running = SESSION.engine
        with running.lock:
            make_everything_resident(
                running.residency, running.user.must_be_resident
            )  # or an error, before anything has ended
    session, SESSION = SESSION, None
    GIVEN.clear()
    engine.set_current_engine(None)
    SIGNALS.remove()
    if session is not None:
        session.fetch_all_and_close()


def set_memory(memory: str | int) -> None:
    """Gives the running programs more or less memory (`16GiB`, `80%`, `min`): they are planned again, and
    nothing is compiled again. What is too much leaves before this returns."""
    if SESSION is None:
        raise OptionError(
            "set_memory: nothing is compiled by teraio yet; give options={'memory': ...} to torch.compile"
        )
    asked = Settings.parse({"memory": memory}, {}).memory
    assert asked is not None
    SESSION.set_budget(asked)


def stats() -> Stats:
    """What the engine has done so far, and in the last step, for loggers: a plain dict of numbers, and one
    word (`phase`). Empty while no program was compiled."""
    return {} if SESSION is None else SESSION.engine.stats()


def _refuse_impossible_options(options: Settings, kind: str) -> None:
    """Before anything is opened: what cannot be done, by name."""
    refuse_host_options_without_gpu(options, kind)
    for name in ("profile", "timeline"):
        path = getattr(options, name)
        if path and not os.path.isdir(Path(path).absolute().parent):
            raise OptionError(f"option {name!r}: the folder of {path} does not exist; make it first")


def _differing_options(one: Settings, other: Settings) -> str:
    """In what belongs to the process; each compiled program may have its own inner program and mode."""
    names = [f.name for f in fields(Settings) if not f.metadata["program"]]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]
    return ", ".join(f"{name}: {getattr(one, name)} and {getattr(other, name)}" for name in differing)


@atexit.register
def _close_engine_at_exit() -> None:
    if SESSION is not None:
        with contextlib.suppress(Exception):
            engine.set_current_engine(None)
            SESSION.engine.close_without_fetching()
