"""The engine of this process, from the first compile to the installed plan.

start       budget, store, links measured
on_step     a plan that is there and is for this step (earlier.py) -> engine, at once
            warm-up steps -> profile -> plan -> engine, and kept for later runs
reset       everything comes back, the store is given up
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Collection
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import torch

from teraio.cache import fingerprint_of
from teraio.doctor import machine_of
from teraio.earlier import Earlier
from teraio.errors import OptionError, TeraioError, UnsupportedError
from teraio.machine import Machine
from teraio.notices import described, more_than_there_is, names_of, unknown_environment, without_match
from teraio.options import Memory, Options
from teraio.passes import dynamo_guards, lifetimes, planner
from teraio.plan import Plan
from teraio.profile import Profile
from teraio.remade import Remaking
from teraio.runtime import device, engine, measure, optimizer, saves, unasked
from teraio.runtime.step import EXPECTATIONS_MAX
from teraio.runtime.store import Store
from teraio.schedule import Step
from teraio.units import fmt_bytes, fmt_count, fmt_ns

log = logging.getLogger("teraio")

# What the ledger does not see: storages too small for a record, workspaces of library kernels. The spike of
# the design met 0.3 to 0.8 MB in Llama shapes of 9 to 40 million parameters.
RESERVE_BYTES = 2 * 2**20

NAMED = 5  # tensors that a message lists

# Accepted by the readers, because the names are settled; refused here until they do something.
NOT_BUILT = ("host_memory", "timeline", "optimizer_step", "max_write_per_day")


class Session:
    def __init__(self, options: Options) -> None:
        _refuse(options)
        self.options = options
        replay = Plan.read(options.plan) if options.plan else None  # before anything is opened
        # Measured, by the order of their programs; the most recent is the last.
        self.steps: dict[tuple[str, ...], list[Step]] = {}
        self.begun = False
        self.names: set[str] | None = set()  # of tensors that were seen; None: no longer of interest
        device.return_freed_memory()
        self.device = device.current("cpu")
        self.budget_bytes = _budget(options, self.device)
        size = options.store_size
        store = Store.open(
            options.store or None,
            None if size is None else lambda free_bytes: size.resolve(free_bytes, 0),
            checksums=options.checksum,
            memory_bytes=self.budget_bytes,
            on_fallback=options.on_fallback,
        )
        self.machine = _machine(store.directories[0], self.budget_bytes, store.capacity_bytes)
        # The slabs are memory too: the only copies of bytes on their way.
        reserve = RESERVE_BYTES + store.slab_bytes_total
        self.engine = engine.Engine(
            store, self.device, self.budget_bytes, reserve, self.on_step, keep=options.keep
        )
        self.earlier = Earlier(options, replay, self.engine, self.budget_bytes, self.device.kind)
        self.remaking = Remaking(replay, self.earlier.for_graph, options.recompute == "auto")
        self.engine.at_rest = self.remaking.at_rest
        for line in more_than_there_is(self.budget_bytes, self.device.capacity_bytes()):
            log.warning("teraio: %s", line)
        log.info(
            "teraio: memory %s, %s of it in reserve; store in %s",
            fmt_bytes(self.budget_bytes),
            fmt_bytes(reserve),
            ", ".join(map(str, store.directories)),
        )

    def on_step(self, step: Step) -> None:
        """One more measured step. The first of its kind is not like the others: optimizer states are made in
        it, programs are compiled."""
        order = tuple(call.schedule.identity for call in step.calls)
        if not self.begun:
            self.begun = True
            self._report_stuck()
        if self.remaking.due or self._file_says_again(step):
            return  # measured when it is compiled anew
        if self.earlier.follow(order, step):
            self._look_at_keep(step, last=True)
            return
        measured = self.steps.pop(order, [])
        self.steps[order] = measured
        while len(self.steps) > EXPECTATIONS_MAX:  # the engine has forgotten it, too
            del self.steps[next(iter(self.steps))]
        measured.append(step)
        warmup = 1 if self.earlier.replay else self.options.warmup
        if len(measured) > 1:
            log.info("teraio: measured step %d/%d: %s", len(measured) - 1, warmup, described(step))
        self._look_at_keep(step, last=len(measured) > warmup)
        if len(measured) <= warmup:
            return
        profile = lifetimes.profile_of(measured[1:], "run")
        del self.steps[order]
        if self.options.profile:
            self._write(profile, self.options.profile)
        plan = self._plan(profile, step)
        if self.remaking.due:
            return
        if plan is not None and self.earlier.watch(order, plan):
            self.engine.install(plan)
        else:
            self.engine.settle(plan)

    def _look_at_keep(self, step: Step, last: bool) -> None:
        """When the first plan is made: what should be kept and was never seen."""
        if self.names is None:
            return
        self.names |= names_of(step)
        if last:
            for line in without_match(self.options.keep, self.names):
                log.warning("teraio: %s", line)
            self.names = None

    def _report_stuck(self) -> None:
        stuck = self.engine.stuck.records
        if stuck:
            reasons = [f"{r.name} ({self.engine.stuck.refused[r.name].reason})" for r in stuck[:NAMED]]
            log.warning(
                "teraio: staying in memory: %s (%s) whose bytes belong to a file or another library and "
                "cannot be copied out unnoticed: %s%s. Clone what is to move before compiling",
                fmt_count(len(stuck), "weight"),
                fmt_bytes(sum(record.size_bytes for record in stuck)),
                "; ".join(reasons),
                "; ..." if len(stuck) > NAMED else "",
            )

    def _write(self, profile: Profile, path: str) -> None:
        """A profile that cannot be written is no reason to end a training."""
        try:
            profile.write(path)
        except TeraioError as error:
            log.warning("teraio: the profile was not written: %s", error)

    def _file_says_again(self, step: Step) -> bool:
        """A plan file that names tensors to be made again was made for a step that does not: of this file
        only the names count, and the step that then runs gets a plan of its own."""
        replay = self.earlier.replay
        if replay is None or not replay.recompute:
            return False
        if replay.fingerprint != fingerprint_of(lifetimes.profile_of([step], "run")):
            return False
        self.earlier.replay = None
        return self.remaking.decide(step, replay.recompute)

    def _plan(self, profile: Profile, step: Step) -> Plan | None:
        """The plan file if it is for this step, else a new plan; None: on demand, said why, or because the
        step is compiled anew first."""
        fingerprint, replay = fingerprint_of(profile), self.earlier.replay
        if replay is not None:
            if replay.fingerprint == fingerprint:
                log.info("teraio: replaying %s: %s", self.options.plan, fmt_count(len(replay.moves), "move"))
                return replay
            log.warning(
                "teraio: %s is a plan for another step (fingerprint %s, this one has %s): not used, tensors "
                "are moved on demand",
                self.options.plan,
                replay.fingerprint,
                fingerprint,
            )
            return None
        try:
            if self.remaking.open(step) and self.options.planner != "none":
                limit_s = self.options.plan_time / 1e9
                names = planner.to_make_again(profile, self.machine, self.budget_bytes, time_limit_s=limit_s)
                if self.remaking.decide(step, names):
                    return None
            plan = planner.plan(
                profile,
                self.machine,
                self.budget_bytes,
                planner=self.options.planner,
                fingerprint=fingerprint,
                time_limit_s=self.options.plan_time / 1e9,
            )
            plan = replace(plan, remade=self.remaking.of(step))
        except TeraioError as error:
            log.warning("teraio: no plan, tensors are moved on demand: %s", error)
            return None
        if not plan.moves and plan.planner != "none":
            log.info("teraio: the step fits into %s whole: nothing moves", fmt_bytes(self.budget_bytes))
            self.earlier.keep(plan)
            return plan
        log.info(
            "teraio: planned by %s: %s, a step of %s predicted, compute alone %s",
            plan.planner,
            fmt_count(len(plan.moves), "move"),
            fmt_ns(plan.predicted.step_ns),
            fmt_ns(profile.step_ns),
        )
        self.earlier.keep(plan)
        return plan


SESSION: Session | None = None


def start(options: Options) -> None:
    """One engine for all programs of the process; a second compile may not ask for another budget."""
    global SESSION
    if SESSION is None:
        _speak()
        _look_at_environment()
        SESSION = Session(options)
        engine.use(SESSION.engine)
        optimizer.start()
        unasked.install()
        saves.install()
        _watch_guards(SESSION.engine)
    elif _difference(SESSION.options, options):
        raise OptionError(
            f"this process already runs with other options ({_difference(SESSION.options, options)}); one "
            f"process has one budget and one store. Compile both models with the same options, or call "
            f"teraio.reset() in between"
        )


@cache
def _look_at_environment() -> None:
    for line in unknown_environment(os.environ):
        log.warning("teraio: %s", line)


WATCH: dynamo_guards.Watch | None = None


def _watch_guards(running: engine.Engine) -> None:
    """Weights wear a guard class while user code runs; Dynamo's guards must not see it."""
    global WATCH
    if not dynamo_guards.SUPPORTED:
        log.warning(
            "teraio: torch %s does not say when it evaluates guards: between compiled programs all weights "
            "are in memory",
            torch.__version__,
        )
        running.guard.end()
    elif WATCH is None:
        WATCH = dynamo_guards.Watch(engine.weights_off_guard, engine.weights_on_guard, _foreign_program)
        WATCH.install()


def _foreign_program() -> None:
    if not optimizer.updating():
        engine.foreign_program()


def made_again(graph: str) -> tuple[Collection[str], int]:
    """Which saved nodes of a joint graph are made again instead, and what a kernel may need for that."""
    if SESSION is None:
        return (), 0
    residency = SESSION.engine.residency
    room_bytes = residency.budget_bytes - residency.reserve_bytes - residency.budget_bytes // 20
    return SESSION.remaking.asked(graph), room_bytes


def all_made_again() -> str:
    """Everything that is known to be made again, for the keys of caches."""
    return "" if SESSION is None else SESSION.remaking.key


def loaded_graph(graph: str) -> None:
    """A program that was cut from this joint graph is there, compiled or from a cache."""
    if SESSION is not None and graph:
        SESSION.remaking.loaded(graph)


def guard_this_graph() -> None:
    """The backend compiles a graph: its guards find plain weights."""
    if WATCH is not None:
        WATCH.guard_this_graph()


def reset() -> None:
    """Ends the engine of this process: everything that is away comes back first."""
    global SESSION
    session, SESSION = SESSION, None
    engine.use(None)
    optimizer.stop()
    if session is not None:
        session.engine.shut_down()


def stats() -> dict[str, int]:
    """What the engine has done so far, for loggers."""
    return {} if SESSION is None else SESSION.engine.stats()


def _refuse(options: Options) -> None:
    """Before anything is opened: what cannot be done, by name."""
    defaults = Options()
    for name in NOT_BUILT:
        if getattr(options, name) not in {getattr(defaults, name), "off", "device"}:
            raise UnsupportedError(f"option {name!r} is not built yet; leave it out")
    if options.memory == Memory():
        raise UnsupportedError(
            "memory='min' is not built yet; give a size such as '20GiB', or '80%'. A budget that is too "
            "small is answered with what the kernel takes that does not fit"
        )
    if options.profile and not Path(options.profile).absolute().parent.is_dir():
        raise OptionError(f"option 'profile': the folder of {options.profile} does not exist; make it first")


def _budget(options: Options, on: device.Device) -> int:
    available = on.default_budget_bytes()
    return available if options.memory is None else options.memory.resolve(available, 0)


def _machine(directory: Path, device_bytes: int, ssd_bytes: int) -> Machine:
    return machine_of("here", [_link(directory)], device_bytes, ssd_bytes)


@cache
def _link(directory: Path) -> measure.Link:
    """How fast the store is, in about half a second; once per process and directory."""
    return measure.store_link(directory, seconds=0.1, limit_bytes=64 * 2**20).link


def _difference(one: Options, other: Options) -> str:
    """In what belongs to the process; each compiled program may have its own inner program and mode."""
    names = [f.name for f in fields(Options) if not f.metadata["program"]]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]
    return ", ".join(f"{name}: {getattr(one, name)} and {getattr(other, name)}" for name in differing)


def _speak() -> None:
    """Shows our lines on stderr, unless the program has said where log lines go."""
    if not log.handlers and not logging.getLogger().handlers and log.level == logging.NOTSET:
        lines = logging.StreamHandler()
        lines.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(lines)
        log.setLevel(logging.INFO)


@atexit.register
def _at_exit() -> None:
    with contextlib.suppress(Exception):
        reset()
