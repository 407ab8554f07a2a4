"""Random training steps under the real engine on the fake asynchronous device.

    random blocks -> the real slot layout -> executed event by event

Every kernel runs on the fake device's compute stream. Each kernel must read the content that it would read in
a run without delays, in program order. A step consists of some micro-batches of forwards and backwards over
the blocks, then an optimizer step. Some blocks share one program, as if each block were compiled by itself.

Between steps, the run may install a random plan. The plan is one of three kinds: (1) valid moves while
tensors are idle, (2) senseless moves, or (3) a plan of the real planner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from engine_device import CELL, DiskWorld, EngineDevice, FakeHost, StreamStore, native_store

from teraio.errors import BudgetError, PlanError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Evict, Fetch, Move, Plan
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.passes.planner import planners
from teraio.passes.slots import lifetimes
from teraio.passes.slots.events import Event, Forget, Launch, Make, Signature
from teraio.passes.slots.layout import SlotPlace, lay_slots
from teraio.runtime.engine.engine import Engine, Program
from teraio.runtime.optimizer.step_call import OptimizerCall
from teraio.runtime.optimizer.strategy import Strategy

STEPS = 3
LINKS = tuple(Link(*ends, 10**9) for tier in ("ssd", "host") for ends in (("device", tier), (tier, "device")))


@dataclass
class Value:
    """A tensor, and the content that it must have if all kernels run in program order."""

    tensor: torch.Tensor
    holds: list[int]

    @property
    def cells(self) -> int:
        return len(self.holds)


class Compiled:
    """A random program with slots in the places where a compiler would put them."""

    def __init__(self, signature: Signature, events: Sequence[Event], sizes: dict[str, int]) -> None:
        self.signature = signature
        self.events = events
        self.sizes = sizes
        schedule, places = lay_slots(signature, events, len(events))
        self.program = Program(schedule)
        self.program.labels = tuple(name for name, _ in signature.arguments)
        self.slots: dict[int, list[tuple[int, SlotPlace]]] = {}
        for index, place in enumerate(places):
            self.slots.setdefault(place.at, []).append((index, place))


def with_collectives(random: Random, events: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Turn about half of the kernels that write new tensors into collectives. Wait for each of them at a
    random position before the first use of its result, and before the first write to an argument.
    """
    found = list(events)
    for at in reversed(range(1, len(events))):
        (before, made), (kind, event) = events[at - 1], events[at]
        if before != "make" or kind != "launch" or event[2] != [made[0]] or random.random() < 0.5:
            continue
        result, later = made[0], [(n, e) for n, (k, e) in enumerate(found) if n > at and k != "make"]
        ends = (n for n, e in later if result in (*e[1], *e[2]) or {*e[2]} & {*event[1]})
        place = random.randint(at + 1, next(ends, len(found)))
        place -= found[place - 1][0] == "make"
        found[at] = ("begin", event)
        wait = (f"wait {event[0]}", [made[0]], [made[0]], event[1])
        found.insert(place, ("wait", wait))
    return found


def with_forgets(events: Sequence[tuple[str, Any]], outputs: Sequence[str], given: set[str]) -> list[Event]:
    """Number the events. After the last use of each name, add the event Forget, which ends the tensor's life.
    Names in `outputs`, and the names in `given` that the caller holds, get no Forget.
    """
    last: dict[str, int] = {}
    for position, (kind, event) in enumerate(events):
        names = (
            {event[0]} if kind == "make" else {*event[1], *event[2], *(event[3] if kind == "wait" else ())}
        )
        last.update(dict.fromkeys(names, position))
    numbered: list[Event] = []
    for position, (kind, event) in enumerate(events):
        at = len(numbered)
        if kind == "make":
            numbered.append(Make(at, event[0], event[1] * CELL))
        else:
            begins = frozenset(event[2] if kind == "begin" else ())
            awaits = frozenset(event[2] if kind == "wait" else ())
            reads, writes = frozenset(event[1]), frozenset(event[2])
            numbered.append(Launch(at, event[0], reads, writes, begins, awaits=awaits))
        for name in sorted(name for name, end in last.items() if end == position):
            if name not in outputs and name not in given:
                numbered.append(Forget(len(numbered), name))
    return numbered


class Block:
    """The sizes of a block's weights, and a forward and a backward program that use them. With `collectives`,
    some kernels of the programs are collectives."""

    def __init__(self, random: Random, collectives: bool = False) -> None:
        self.collectives = collectives
        self.weights = [random.randint(1, 3) for _ in range(random.randint(1, 3))]
        self.saved: list[str] = []
        self.forward = self._forward(random)
        self.backward = self._backward(random)

    def _forward(self, random: Random) -> Compiled:
        sizes = {"x": 1, **{f"w{n}": size for n, size in enumerate(self.weights)}}
        arguments = list(sizes)
        events: list[tuple[str, Any]] = []
        made: list[str] = []
        for number in range(random.randint(3, 7)):
            reads = random.sample(list(sizes), min(len(sizes), random.randint(1, 3)))
            if made and random.random() < 0.2:
                events.append(("launch", (f"f{number}", reads, [random.choice(made)])))
                continue
            name = f"a{number}"
            size = 1 if number == 0 else random.randint(1, 3)
            events += [("make", (name, size)), ("launch", (f"f{number}", reads, [name]))]
            sizes[name] = size
            made.append(name)
        result = next(name for name in reversed(made) if sizes[name] == 1)
        self.saved = [name for name in made if name != result and random.random() < 0.6]
        outputs = [result, *self.saved]
        self.sizes = sizes
        signature = Signature(
            "forward",
            tuple((name, sizes[name] * CELL) for name in arguments),
            tuple(outputs),
            frozenset(range(1, len(outputs))),
        )
        events = with_collectives(random, events) if self.collectives else events
        return Compiled(signature, with_forgets(events, outputs, set(arguments)), sizes)

    def _backward(self, random: Random) -> Compiled:
        arguments = {name: self.sizes[name] for name in self.saved}
        arguments |= {f"w{n}": size for n, size in enumerate(self.weights)} | {"g": 1}
        given = {f"w{n}" for n in range(len(self.weights))} | {"g"}
        sizes = dict(arguments)
        events: list[tuple[str, Any]] = []
        saved = list(reversed(self.saved))
        grads = []
        for number, size in enumerate([1, *self.weights]):
            reads = random.sample(list(sizes), min(len(sizes), 2)) + saved[:2]
            saved = saved[2:]
            if random.random() < 0.5:
                events += [
                    ("make", (f"t{number}", 1)),
                    ("launch", (f"i{number}", reads[:1], [f"t{number}"])),
                ]
                sizes[f"t{number}"] = 1
                reads.append(f"t{number}")
            grads.append(f"d{number}")
            events += [
                ("make", (grads[-1], size)),
                ("launch", (f"b{number}", sorted(set(reads)), [grads[-1]])),
            ]
            sizes[grads[-1]] = size
        signature = Signature(
            "backward",
            tuple((name, size * CELL) for name, size in arguments.items()),
            tuple(grads),
            frozenset(),
        )
        events = with_collectives(random, events) if self.collectives else events
        return Compiled(signature, with_forgets(events, grads, given), sizes)


class Broken(Exception):
    """An error in a kernel."""


class Run:
    """The run of one seed: a model, a budget, a store, a schedule of delays, and some steps."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        kind: type[EngineDevice] = EngineDevice,
        more: int = 0,
        collectives: bool = False,
    ) -> None:
        self.random = random = Random(seed)
        self.world = DiskWorld(seed)
        shapes = [Block(random, collectives) for _ in range(random.randint(1, 2))]
        self.blocks = [random.choice(shapes) for _ in range(random.randint(1, 4))]
        self.batches = random.choice((1, 1, 2))
        everything = sum(
            sum(b.weights) * 3 + self.batches * sum(b.sizes[s] for s in b.saved) + 4 for b in self.blocks
        )
        self.budget = int(everything * random.uniform(0.25, 0.9)) + more
        self.device = kind(self.world, 3 * everything + 64)
        self.native = random.random() < 0.5
        store: Any = native_store(self.device, seed, folder) if self.native else StreamStore(self.device)
        self.host_cells = random.choice((0, int(everything * random.uniform(0.05, 0.5))))
        host = FakeHost(self.device, self.host_cells) if self.host_cells else None
        self.engine = Engine(store, self.device, self.budget * CELL, 0, self._on_step, host=host)  # type: ignore[arg-type]
        self.number = 0
        self.steps = 0
        self.over: list[str] = []
        self.place = ""  # name of the running slot, or ""
        self.flying: dict[str, Any] = {}  # name of a collective's result -> event of the collective's end
        self.held: list[tuple[Any, list[torch.Tensor]]] = []  # collectives hold their tensors until their end
        self.abandoned: list[tuple[Any, list[torch.Tensor]]] = []  # collectives for which nothing waits
        self.device.fetch_begun = self._fetch_begun
        self.about = Strategy(0)
        self.states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.moments: dict[int, Value] = {}  # the optimizer states by the weight's id
        self.plans = random.choice(("none", "gaps", "gaps", "hostile", "greedy"))
        self.part = random.choice((0.3, 0.6, 1.0))
        self.weights = [
            [self._made(f"b{b}w{n}", size, parameter=True) for n, size in enumerate(block.weights)]
            for b, block in enumerate(self.blocks)
        ]

    # ---- kernels

    def _made(self, name: str, cells: int, parameter: bool = False) -> Value:
        """Make a tensor in user code and fill it."""
        value = Value(self.device.empty(name, cells, parameter), [0] * cells)
        self._launch([], value)
        return value

    def _launch(self, reads: Sequence[Value], target: Value, collective: bool = False) -> Any:
        self.number += 1
        result = [1000 * self.number + cell for cell in range(target.cells)]
        place = self.device.place
        given = [(place(v.tensor.untyped_storage()), v.holds) for v in reads]
        launch = self.device.begin_collective if collective else self.device.launch
        target.holds = result
        return launch(given, place(target.tensor.untyped_storage()), result)

    def _execute(self, compiled: Compiled, arguments: dict[str, Value], breaks: bool = False) -> list[Value]:
        """Run a program as generated code does, and return its outputs. The caller may refer to the tensors
        only by `arguments`, so that a Forget can free a tensor.
        """
        env = dict(arguments)
        arguments.clear()
        stop = self.random.randrange(len(compiled.events)) if breaks else -1
        for at in range(len(compiled.events) + 1):
            for index, place in compiled.slots.get(at, ()):
                self.place = f"slot {index} of a {compiled.signature.kind}"
                self.engine.run_slot(
                    compiled.program, index, [n and env[n].tensor for n in place.names], None
                )
                self.place = ""
            if at == stop:
                raise Broken
            if at < len(compiled.events):
                self._event(compiled, compiled.events[at], env)
        outputs = [env[name] for name in compiled.signature.outputs if name is not None]
        self.engine.end_call([value.tensor for value in outputs])
        return outputs

    def _event(self, compiled: Compiled, event: Event, env: dict[str, Value]) -> None:
        match event:
            case Make(_, name, _):
                cells = compiled.sizes[name]
                env[name] = Value(self.device.empty(name, cells), [0] * cells)
            case Forget(_, name):
                del env[name]
            case Launch(_, kernel, reads, writes):
                (target,) = writes
                if event.awaits:
                    ended = self.flying.pop(target)
                    self.device.compute.wait_event(ended)
                    self.held = [pair for pair in self.held if pair[0] is not ended]
                elif event.begins:
                    given = [env[name] for name in sorted(reads)]
                    ended = self.flying[target] = self._launch(given, env[target], collective=True)
                    self.held = [pair for pair in self.held if not pair[0].fired]
                    self.held.append((ended, [value.tensor for value in (*given, env[target])]))
                else:
                    self._launch([env[name] for name in sorted(reads)], env[target])
                self._look(kernel)

    def _look(self, place: str) -> None:
        """Check the budget. The first step is exempt, because the engine does not know the weights yet.
        Memory that an abandoned collective holds is exempt, too.
        """
        abandoned = {t.untyped_storage()._cdata: t.nbytes for _, held in self.abandoned for t in held}
        used = self.device.used_bytes() - sum(abandoned.values())
        if used > self.budget * CELL and self.steps:
            self.over.append(f"{used // CELL} cells at {place}, memory is {self.budget}")

    def _fetch_begun(self) -> None:
        """Check the budget when a fetch of a slot has allocated its memory. All other checks are made when a
        kernel runs.

        Fetches for user code may exceed the budget, so they are not checked.
        """
        if self.place:
            self._look(self.place)

    # ---- a step

    def step(self) -> None:
        grads: list[list[list[Value]]] = []
        for _ in range(self.batches):
            grads.append(self._batch())
        self._optimizer(grads)
        self.engine.end_step()
        self.steps += 1

    def _optimizer(self, grads: list[list[list[Value]]]) -> None:
        """Step the optimizer in the engine's buckets, which are groups of parameters. The first step makes
        one optimizer state per weight.
        """
        values = {id(value.tensor): value for block in self.weights for value in block}
        found: dict[int, list[Value]] = {}
        for batch in grads:
            for weights, made in zip(self.weights, batch):
                for weight, grad in zip(weights, made):
                    found.setdefault(id(weight.tensor), []).append(grad)
        parameters = [value.tensor for value in values.values()]
        optimizer: Any = SimpleNamespace(param_groups=[{"params": parameters}], state=self.states)
        call = OptimizerCall(self.engine, optimizer, self.about, closure=False)
        call.closure = True  # with a closure, because this test's gradients are not in `.grad`
        for bucket in call.iterate_buckets():
            for parameter in bucket.parameters:
                weight = values[id(parameter)]
                state = self.moments.get(id(parameter))
                if state is None:
                    state = self.moments[id(parameter)] = self._made("state", weight.cells)
                    self.states[parameter] = {"moment": state.tensor}
                for grad in found[id(parameter)]:
                    self._launch([weight, grad, state], weight)
                    self._launch([grad], state)
        call.end()

    def _batch(self) -> list[list[Value]]:
        x = self._made("x", 1)
        saved: list[dict[str, Value]] = []
        for block, weights in zip(self.blocks, self.weights):
            arguments = {"x": x, **{f"w{n}": weight for n, weight in enumerate(weights)}}
            x, *kept = self._execute(block.forward, arguments)
            saved.append(dict(zip(block.saved, kept)))
            kept.clear()
        g = self._made("g", 1)
        del x
        grads: list[list[Value]] = []
        for block, weights in zip(reversed(self.blocks), reversed(self.weights)):
            arguments = {**saved.pop(), **{f"w{n}": weight for n, weight in enumerate(weights)}, "g": g}
            g, *found = self._execute(block.backward, arguments)
            grads.insert(0, found)
        return grads

    def _broken_batch(self) -> None:
        """Run a forward, raise an error in the middle of it, and abandon the call."""
        block, weights = self.blocks[0], self.weights[0]
        arguments = {"x": self._made("x", 1), **{f"w{n}": weight for n, weight in enumerate(weights)}}
        try:
            self._execute(block.forward, arguments, breaks=True)
        except Broken:
            self.engine.abandon_call()
            self.abandoned += self.held

    def go(self) -> list[str]:
        """Run all steps, and return the faults that were found."""
        for _ in range(STEPS):
            if self.random.random() < 0.1:
                self._broken_batch()
            self.step()
        self.engine.fetch_all_and_close()
        for value in [*[value for block in self.weights for value in block], *self.moments.values()]:
            self._launch([value], value)
        self.world.run_out()
        return self.world.faults + self.over

    # ---- plans

    def _on_step(self, step: Step | None) -> None:
        made: dict[str, Callable[[Profile], Plan]] = {
            "gaps": self._moves_in_gaps,
            "hostile": self._any_moves,
            "greedy": self._planned,
        }
        if self.plans in made and step is not None:
            # Without a plan for this budget, the engine fetches on demand.
            with contextlib.suppress(PlanError):
                self.engine.follow_plan(made[self.plans](lifetimes.profile_of_steps([step], "fake")))

    def _tier(self) -> str:
        """Return the name of a random tier. The tier may be missing or full, because the engine takes a plan
        only as a hint.
        """
        return self.random.choice(("ssd", "ssd", "host"))

    def _plan(self, moves: Sequence[Move]) -> Plan:
        return Plan("", self.plans, self.budget * CELL, (), tuple(moves))

    def _moves_in_gaps(self, profile: Profile) -> Plan:
        """Plan an eviction and a fetch between two uses of a tensor, if at least two kernels run between
        these uses.
        """
        random, ticks = self.random, len(profile.kernels)
        moves: list[Move] = []
        for tensor in profile.tensors:
            uses = sorted({*tensor.reads, *tensor.writes})
            ends = [*uses[1:], *([uses[0] + ticks] if tensor.persistent else [])]
            for start, end in zip(uses, ends):
                if end - start >= 3 and random.random() < self.part:
                    first, free, back = sorted(random.randint(start + 1, end) for _ in range(3))
                    tier = self._tier()
                    moves += [Evict(tensor.name, tier, free, first), Fetch(tensor.name, tier, back, end)]
        return self._plan(moves)

    def _any_moves(self, profile: Profile) -> Plan:
        random, ticks = self.random, len(profile.kernels)
        names = [tensor.name for tensor in profile.tensors] + ["no such tensor"]
        moves: list[Move] = []
        for _ in range(random.randrange(10, 100)):
            first, second = sorted(random.randrange(2 * ticks) for _ in range(2))
            if random.random() < 0.5:
                moves.append(Evict(random.choice(names), self._tier(), second, random.choice((first, None))))
            else:
                moves.append(Fetch(random.choice(names), self._tier(), first, second))
        return self._plan(moves)

    def _planned(self, profile: Profile) -> Plan:
        tiers = Tier("device", self.budget * CELL), Tier("ssd", 2**40), Tier("host", self.host_cells * CELL)
        machine = Machine("fake", tiers, LINKS)
        return planners.plan(profile, machine, self.budget * CELL, time_limit_s=0.005)


def run(
    seed: int, folder: Path, kind: type[EngineDevice] = EngineDevice, collectives: bool = False
) -> tuple[list[str], Run]:
    """Run the training of this seed. Increase its random budget until the engine accepts the budget. Return
    the faults and the run.
    """
    more = 0
    while True:
        one = Run(seed, folder, kind, more, collectives)
        try:
            return one.go(), one
        except BudgetError:
            one.engine.fetch_all_and_close()
            more += 2
