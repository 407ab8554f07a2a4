"""A training of a small model within a budget that is smaller than the training's peak.

Evictions, fetches and drops are moves. A step takes its moves from one of three sources: (1) the plan's
table, (2) graphs that contain the plan's moves, or (3) such graphs with a planted bug. The steps alternate
between these sources.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import teraio
from teraio import backend
from teraio.errors import StoreReadError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.moves_by_kernel import Act, acts_by_tick
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.formats.profile import Profile
from teraio.passes.fx import materialize
from teraio.passes.fx import program as fx
from teraio.runtime.engine import engine, explicit_moves
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import State
from teraio.runtime.step.program import Program
from teraio.session import planning
from teraio.session.plan_choice import Work

ROWS, WIDTH, LAYERS, MEMORY = 512, 256, 5, "6700KiB"  # teraio reserves 4 MiB; a kernel needs 2.3 MiB
# Assumed duration of each kernel. It is fixed, so that the plan is always the same. Half of this duration is
# enough to evict a layer's activation.
KERNEL_NS = 300_000
GB = 10**9
MACHINE = Machine(
    "test",
    (Tier("device", 2**30), Tier("ssd", 2**40)),
    (Link("device", "ssd", 3 * GB), Link("ssd", "device", 3 * GB)),
)

Acts = dict[int, tuple[Act, ...]]
Event = tuple[int, str, str]  # (slot counted from the start of the step, event, tensor)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x - 1).square().mean()


# ---- bugs in a graph's moves


def without(verb: str) -> Callable[[Acts], Acts]:
    def planted(found: Acts) -> Acts:
        """Remove the first act with the verb `verb`."""
        tick, act = next((t, a) for t, acts in found.items() for a in acts if a.verb == verb)
        return {**found, tick: tuple(a for a in found[tick] if a != act)}

    return planted


def too_late(found: Acts) -> Acts:
    """Begin the first eviction one kernel late, at the tick at which it should have ended."""
    tick, act = next((t, a) for t, acts in found.items() for a in acts if a.verb == "evict")
    left = tuple(a for a in found[tick] if a != act)
    return {**found, tick: left, tick + 1: (*found.get(tick + 1, ()), act)}


def turned_round(found: Acts) -> Acts:
    """Exchange two evictions that begin before the same kernel."""
    for tick, acts in found.items():
        for at, (one, other) in enumerate(pairwise(acts)):
            if one.verb == other.verb == "evict":
                return {**found, tick: (*acts[:at], other, one, *acts[at + 2 :])}
    raise AssertionError("no kernel has two evictions before it, so the run proves nothing")


def anywhere(found: Acts) -> Acts:
    """Shuffle the acts: each tick gets the acts of a random tick. An act begins a move, or waits for one."""
    ticks, draw = list(found), random.Random(1)
    draw.shuffle(ticks)
    return dict(zip(ticks, found.values()))


def unlawful(found: Acts) -> Acts:
    """Add a drop of a tensor just before a kernel that needs the tensor. Only the engine's rules prevent the
    drop.
    """
    tick, act = next((t, a) for t, acts in found.items() for a in acts if a.of == "fetch")
    return {**found, tick: (*found[tick], Act("drop", act.tensor, "ssd"))}


PLANTED: dict[str, Callable[[Acts], Acts]] = {
    "without an eviction": without("evict"),
    "without a fetch": without("fetch"),
    "without a drop": without("drop"),
    "an eviction too late": too_late,
    "two evictions turned round": turned_round,
    "nothing": lambda found: {},
    "everything, anywhere": anywhere,
}
HOSTILE_TABLE, HOSTILE_GRAPH = "table of a hostile plan", "graph of a hostile plan"
UNLAWFUL, FAILING = "what is needed leaves", "a read fails"
WAYS = ["measure", "measure", "table", "table", "graph", "graph"]
WAYS += [way for other in (*PLANTED, UNLAWFUL, FAILING) for way in (other, "graph", "graph")]
WAYS += [HOSTILE_TABLE] * 3 + [HOSTILE_GRAPH] * 2


def hostile(plan: Plan, profile: Profile) -> Plan:
    """Return a plan of senseless moves. Its fetches still end at a use of their tensor.

    If a fetch ended at another tick, a graph would wait for the fetch and the table would not, so the two
    would differ.
    """
    draw, ticks = random.Random(2), len(profile.kernels)
    moves: list[Evict | Fetch] = []
    for _ in range(300):
        tensor = draw.choice(profile.tensors)
        first, second = sorted(draw.randrange(ticks) for _ in range(2))
        used = sorted({*tensor.reads, *tensor.writes})
        ready = next((tick for tick in used if tick >= first), used[0] + ticks)
        evict, fetch = Evict(tensor.name, "ssd", second, first), Fetch(tensor.name, "ssd", first, ready)
        moves.append(draw.choice((evict, fetch)))
    return replace(plan, moves=tuple(moves))


def lost(ticket: Any) -> None:
    """Wait for the ticket, then raise a read error. This function replaces the device's `wait_for_copy`."""
    ticket.wait()
    raise StoreReadError("lost")


class Losing(explicit_moves.ExplicitMoves):
    """The moves of a graph. The first fetch among them fails when the graph waits for it."""

    lost = False

    def wait(self, tensor: str, move: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if move == "fetch" and not self.lost:
                assert engine.ENGINE is not None
                patch.setattr(engine.ENGINE.mover.device, "wait_for_copy", lost)
                self.lost = True
            super().wait(tensor, move)


# ---- a training with exchangeable graphs


@dataclass
class Training:
    """The record of a training, with one entry per step."""

    losses: list[float] = field(default_factory=list)
    events: list[list[Event]] = field(default_factory=list)
    kernels: list[list[str]] = field(default_factory=list)  # names of kernels, as in a timeline
    skipped: list[int] = field(default_factory=list)
    digest: list[bytes] = field(default_factory=list)
    plan: Plan | None = None
    profile: Profile | None = None
    graphs: list[tuple[GraphModule, Program]] = field(default_factory=list)
    written: list[GraphModule] = field(default_factory=list)  # graphs of forward and backward, with moves

    def last(self, way: str) -> int:
        """Return the number of the last step that took its moves in this way. In the first step of a way,
        tensors may still be in the tiers to which another way evicted them.
        """
        return len(WAYS) - 1 - WAYS[::-1].index(way)

    def of(self, way: str) -> list[Event]:
        return self.events[self.last(way)]


class Bench:
    """A bench around teraio's backend. It keeps the graph of each program, and chooses for each step the
    graph that runs.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.training = Training()
        self.log: list[Event] = []
        self.run: dict[GraphModule, Callable[..., Any]] = {}
        self.start = 0
        self.boxed = fx.make_boxed_program
        patch.setattr(fx, "make_boxed_program", self.exchangeable)
        patch.setattr(backend, "_insert_eager_slots", self.slot)
        plan = planning.Planning.choose_plan
        patch.setattr(planning.Planning, "choose_plan", lambda *given: self.planned(plan, *given))
        for name in ("begin_evict", "end_evict", "undo_evict", "begin_fetch", "end_fetch"):
            patch.setattr(Mover, name, self.noting(name, getattr(Mover, name)))

    def exchangeable(self, gm: GraphModule) -> fx.BoxedProgram:
        own = self.boxed(gm).run

        def run(arguments: list[Any]) -> Any:
            return self.run.get(gm, own)(arguments)

        return fx.BoxedProgram(run)

    def slot(self, gm: GraphModule, kind: Any, labels: tuple[str, ...]) -> None:
        schedule, connect = fx.insert_slots(gm, kind)
        with backend._label_loaded_programs(labels) as loaded:
            connect(engine.program(schedule.as_json_text))
        self.training.graphs.append((gm, loaded[-1]))

    def planned(self, plan: Any, maker: Any, profile: Profile, step: Any) -> Work[Plan | None]:
        """Plan with teraio's own planner, but with kernel times that are the same on every machine."""
        assert self.training.plan is None
        kernels = tuple(replace(kernel, duration_ns=KERNEL_NS) for kernel in profile.kernels)
        maker.machine, self.training.profile = MACHINE, replace(profile, kernels=kernels)
        self.training.plan = yield from plan(maker, self.training.profile, step)
        return self.training.plan

    def noting(self, name: str, move: Callable[..., None]) -> Callable[..., None]:
        def noted(mover: Mover, record: Any, *tier: str | None, **rest: Any) -> None:
            assert engine.ENGINE is not None
            number = engine.ENGINE.residency.serial - self.start
            event = number, "miss" if rest.get("demand") else name, record.name
            self.log.append(event)
            before = record.state
            move(mover, record, *tier, **rest)
            # This call began no eviction, because one was already in flight.
            if name == "begin_evict" and before is State.EVICTING:
                self.log.remove(event)

        return noted

    def go(self, way: str) -> None:
        """Make the next step take its moves in this way."""
        self.run.clear()
        running, plan = engine.ENGINE, self.training.plan
        assert running is not None
        self.start = running.residency.serial
        if way in {"measure", "table"}:
            return
        assert plan is not None and self.training.profile is not None
        if way in {HOSTILE_TABLE, HOSTILE_GRAPH}:
            plan = hostile(plan, self.training.profile)
            running.follow_plan(plan)
        if way == HOSTILE_TABLE:
            return
        expected, losing = running.tracker.expected, iter((Losing,) if way == FAILING else ())
        written: list[GraphModule] = []
        with pytest.MonkeyPatch.context() as patch:
            bug = {**PLANTED, UNLAWFUL: unlawful}.get(way, dict)
            patch.setattr(materialize, "acts_by_tick", lambda *given: bug(acts_by_tick(*given)))
            for base, (gm, program) in reversed([*zip(expected.base, self.training.graphs)]):
                runs = next(losing, explicit_moves.ExplicitMoves)(program)
                made = materialize.copy_graph_with_moves(gm, plan, base, expected.length, runs)
                self.run[gm] = self.boxed(made).run
                written.insert(0, made)
        if way == "graph":
            self.training.written = written

    def train(self, compiled: Any, parameters: list[torch.Tensor]) -> Training:
        training, optimizer = self.training, torch.optim.AdamW(parameters, lr=1e-4)
        draw = torch.Generator().manual_seed(1)
        for way in WAYS:
            if engine.ENGINE is not None:
                self.go(way)
            loss = compiled(torch.randn(ROWS, WIDTH, generator=draw))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.losses.append(loss.item())
            training.events.append(self.log)
            training.skipped.append(int(teraio.stats().get("skipped_moves", 0)))
            if engine.ENGINE is not None and (recorder := engine.ENGINE.mover.recorder) is not None:
                training.kernels.append([name for name, _, _ in recorder.step.kernels])
            self.log = []
        states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        training.digest = [t.detach().numpy().tobytes() for t in (*parameters, *states)]
        return training


def train(**options: str) -> Training:
    """Train within the budget with these options. Without options, train plainly."""
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one thread, for a fixed order of sums
    torch.manual_seed(0)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERAIO_PLANNER", "greedy")
        if not options:
            patch.setenv("TERAIO_DISABLE", "1")
        request: dict[str, Any] = {
            "memory": MEMORY,
            "inner": "eager",
            "warmup": 1,
            "planning": "inline",
            **options,
        }
        compiled = torch.compile(model, backend="teraio", options=request)
        training = Bench(patch).train(compiled, list(model.parameters()))
        teraio.reset()
    torch._dynamo.reset()
    torch.set_num_threads(threads)
    return training
