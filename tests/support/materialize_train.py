"""A small model is trained in a budget in which it does not fit. Its steps go by the plan's table, by graphs
with the plan's moves written in, and by such graphs with a bug in them, in turn.
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
from teraio.runtime.step.program import Program
from teraio.session import planning

ROWS, WIDTH, LAYERS, MEMORY = 512, 256, 5, "6700KiB"  # of it 4 MiB in reserve; a kernel needs 2.3
KERNEL_NS = 300_000  # the same in every run, so that the plan is; a layer's activation leaves in half of it
GB = 10**9
MACHINE = Machine(
    "test",
    (Tier("device", 2**30), Tier("ssd", 2**40)),
    (Link("device", "ssd", 3 * GB), Link("ssd", "device", 3 * GB)),
)

Acts = dict[int, tuple[Act, ...]]
Event = tuple[int, str, str]  # the slot, counted from the start of the step; what happened; to whom


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x - 1).square().mean()


# ---- what may be wrong in a graph


def without(verb: str) -> Callable[[Acts], Acts]:
    def planted(found: Acts) -> Acts:
        """The first of its kind is not there."""
        tick, act = next((t, a) for t, there in found.items() for a in there if a.verb == verb)
        return {**found, tick: tuple(a for a in found[tick] if a != act)}

    return planted


def too_late(found: Acts) -> Acts:
    """An eviction begins a kernel later, when it should have ended."""
    tick, act = next((t, a) for t, there in found.items() for a in there if a.verb == "evict")
    left = tuple(a for a in found[tick] if a != act)
    return {**found, tick: left, tick + 1: (*found.get(tick + 1, ()), act)}


def turned_round(found: Acts) -> Acts:
    """Two evictions before one kernel, the second first."""
    for tick, there in found.items():
        for at, (one, other) in enumerate(pairwise(there)):
            if one.verb == other.verb == "evict":
                return {**found, tick: (*there[:at], other, one, *there[at + 2 :])}
    raise AssertionError("no two evictions before one kernel: this shows nothing")


def anywhere(found: Acts) -> Acts:
    """Everything happens, and nothing of it where it should."""
    ticks, draw = list(found), random.Random(1)
    draw.shuffle(ticks)
    return dict(zip(ticks, found.values()))


def unlawful(found: Acts) -> Acts:
    """What a kernel needs leaves just before it; only the law is against it."""
    tick, act = next((t, a) for t, there in found.items() for a in there if a.of == "fetch")
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
    """Moves without any sense, but that a tensor is ready when it is used next: where it is not used, only a
    graph would wait for it."""
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
    """In place of `Device.join`: the read came to nothing."""
    ticket.wait()
    raise StoreReadError("lost")


class Losing(explicit_moves.ExplicitMoves):
    """The first read that this graph waits for fails."""

    lost = False

    def wait(self, tensor: str, move: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if move == "fetch" and not self.lost:
                assert engine.ENGINE is not None
                patch.setattr(engine.ENGINE.mover.device, "wait_for_copy", lost)
                self.lost = True
            super().wait(tensor, move)


# ---- a training whose graphs can be exchanged


@dataclass
class Training:
    """What happened, step by step."""

    losses: list[float] = field(default_factory=list)
    events: list[list[Event]] = field(default_factory=list)
    kernels: list[list[str]] = field(default_factory=list)  # as a timeline has them
    skipped: list[int] = field(default_factory=list)
    digest: list[bytes] = field(default_factory=list)
    plan: Plan | None = None
    profile: Profile | None = None
    graphs: list[tuple[GraphModule, Program]] = field(default_factory=list)
    written: list[GraphModule] = field(default_factory=list)  # forward and backward, moves in them

    def last(self, way: str) -> int:
        """The last step that went this way: the first may find tensors where another way left them."""
        return len(WAYS) - 1 - WAYS[::-1].index(way)

    def of(self, way: str) -> list[Event]:
        return self.events[self.last(way)]


class Bench:
    """The backend, with every program's graph at hand and a say in which graph runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told = Training()
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
        self.told.graphs.append((gm, loaded[-1]))

    def planned(self, plan: Any, maker: Any, profile: Profile, step: Any) -> Plan | None:
        """By the product, but for times that are the same on every machine."""
        assert self.told.plan is None
        kernels = tuple(replace(kernel, duration_ns=KERNEL_NS) for kernel in profile.kernels)
        maker.machine, self.told.profile = MACHINE, replace(profile, kernels=kernels)
        self.told.plan = plan(maker, self.told.profile, step)
        return self.told.plan

    def noting(self, name: str, move: Callable[..., None]) -> Callable[..., None]:
        def noted(mover: Mover, record: Any, *tier: str | None, demand: bool = False) -> None:
            assert engine.ENGINE is not None
            number = engine.ENGINE.residency.serial - self.start
            self.log.append((number, "miss" if demand else name, record.name))
            move(mover, record, *tier, **({"demand": True} if demand else {}))

        return noted

    def go(self, way: str) -> None:
        """The next step goes this way."""
        self.run.clear()
        running, plan = engine.ENGINE, self.told.plan
        assert running is not None
        self.start = running.residency.serial
        if way in {"measure", "table"}:
            return
        assert plan is not None and self.told.profile is not None
        if way in {HOSTILE_TABLE, HOSTILE_GRAPH}:
            plan = hostile(plan, self.told.profile)
            running.follow_plan(plan)
        if way == HOSTILE_TABLE:
            return
        expected, losing = running.tracker.expected, iter((Losing,) if way == FAILING else ())
        written: list[GraphModule] = []
        with pytest.MonkeyPatch.context() as patch:
            bug = {**PLANTED, UNLAWFUL: unlawful}.get(way, dict)
            patch.setattr(materialize, "acts_by_tick", lambda *given: bug(acts_by_tick(*given)))
            for base, (gm, program) in reversed([*zip(expected.base, self.told.graphs)]):
                runs = next(losing, explicit_moves.ExplicitMoves)(program)
                made = materialize.copy_graph_with_moves(gm, plan, base, expected.length, runs)
                self.run[gm] = self.boxed(made).run
                written.insert(0, made)
        if way == "graph":
            self.told.written = written

    def train(self, compiled: Any, parameters: list[torch.Tensor]) -> Training:
        told, optimizer = self.told, torch.optim.AdamW(parameters, lr=1e-4)
        draw = torch.Generator().manual_seed(1)
        for way in WAYS:
            if engine.ENGINE is not None:
                self.go(way)
            loss = compiled(torch.randn(ROWS, WIDTH, generator=draw))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.losses.append(loss.item())
            told.events.append(self.log)
            told.skipped.append(int(teraio.stats().get("skipped_moves", 0)))
            if engine.ENGINE is not None and (recorder := engine.ENGINE.mover.recorder) is not None:
                told.kernels.append([name for name, _, _ in recorder.step.kernels])
            self.log = []
        states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        told.digest = [t.detach().numpy().tobytes() for t in (*parameters, *states)]
        return told


def train(**options: str) -> Training:
    """In the budget with these options; plainly without any."""
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums come out the same, bit for bit
    torch.manual_seed(0)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERAIO_PLANNER", "greedy")
        if not options:
            patch.setenv("TERAIO_DISABLE", "1")
        asked: dict[str, Any] = {"memory": MEMORY, "inner": "eager", "warmup": 1, **options}
        compiled = torch.compile(model, backend="teraio", options=asked)
        told = Bench(patch).train(compiled, list(model.parameters()))
        teraio.reset()
    torch._dynamo.reset()
    torch.set_num_threads(threads)
    return told
