"""Trainings with late updates, one per case. A case changes the loop, or something that the engine relies on.

    late_cases.py '["plain loop", "fork", ...]'

The script prints one JSON object per case: whether the numbers equal plain training, and what the case has
seen. The model is a chain of layers, whose weights, gradients and states do not fit into the budget together.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from unittest.mock import patch

import steady
import torch
from optimizer_train import Chain

import teraio
from teraio import _native
from teraio.errors import TeraioError
from teraio.runtime.engine import engine
from teraio.runtime.engine.late_updates import LateUpdate, LateUpdates
from teraio.runtime.ledger.record import State
from teraio.runtime.optimizer import late_step
from teraio.runtime.store.store import Store

WIDTH, LAYERS, ROWS, STEPS = 96, 6, 64, 9
OPTIONS = {"memory": 4 * 2**20 + 664 * 2**10, "warmup": 1, "planning": "inline", "planner": "greedy"}


class Training:
    """One training. `between` runs after each step of the optimizer, with the number of the step."""

    def __init__(self, compile_: Callable[[torch.nn.Module], Any]) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Chain(WIDTH, LAYERS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.call = compile_(self.model)
        self.seen: list[Any] = []
        self.step_number = 0
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        batch = torch.randn(ROWS, WIDTH, generator=self.generator)
        loss = self.call(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        self.seen.append(loss.item())

    def train(self, between: Callable[[Training], None]) -> None:
        while self.step_number < STEPS:
            self.step()
            between(self)

    def outcome(self) -> list[Any]:
        weights = [p.detach().clone() for p in self.model.parameters()]
        states = [v.clone() for p in self.model.parameters() for v in self.optimizer.state[p].values()]
        return [self.seen, *(tensor.numpy().tobytes() for tensor in (*weights, *states))]


Between = Callable[[Training], None]


def nothing(run: Training) -> None:
    """Do nothing between the steps."""


@cache
def plainly(between: Between) -> list[Any]:
    with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
        run = Training(lambda m: torch.compile(m, backend="teraio", options={"inner": "eager"}))
        run.train(between)
        return run.outcome()


def ours(between: Between, **options: Any) -> tuple[Training, list[Any], dict[str, Any]]:
    own = {**OPTIONS, "updates": "late", "inner": "eager", **options}
    run = Training(lambda m: torch.compile(m, backend="teraio", options=own))
    run.train(between)
    counts = dict(teraio.stats())
    return run, run.outcome(), counts


def compared(between: Between = nothing, **options: Any) -> dict[str, Any]:
    expected = plainly(between)
    _, outcome, counts = ours(between, **options)
    names = ("owed_updates", "late_updates", "settled_updates", "overrun_bytes", "step_misses", "peak_bytes")
    return {"same": outcome == expected, **{name: counts[name] for name in names}}


def late() -> LateUpdates:
    assert engine.ENGINE is not None
    return engine.ENGINE.late


# ---- cases


def plain_loop() -> dict[str, Any]:
    orders: list[int] = []

    def count_slots(run: Training) -> None:
        if engine.ENGINE is not None:
            orders.append(sum(len(p.schedule.slots) for p in engine.ENGINE.tracker.programs))

    result = compared(count_slots)
    return {**result, "slots": orders}


def reads_one_weight() -> dict[str, Any]:
    """Read one weight after each second step."""

    def read(run: Training) -> None:
        if run.step_number % 2:
            run.seen.append(dict(run.model.named_parameters())["layers.2.weight"].detach().sum().item())

    return compared(read)


def average_each_step() -> dict[str, Any]:
    """Read all weights after each step. Then updates run at `step()` again."""

    def read(run: Training) -> None:
        run.seen.append(sum(p.detach().sum().item() for p in run.model.parameters()))

    result = compared(read)
    return {**result, "unfit": len(late().unfit)}


def fits() -> dict[str, Any]:
    return compared(memory="64MiB")


def forked_child() -> dict[str, Any]:
    """Fork after a step. The child reads the counters of all updates."""
    read, write = os.pipe()
    owed = []

    def fork(run: Training) -> None:
        if run.step_number != 8:
            return
        if engine.ENGINE is not None:
            owed.append(len(late().owed))
        if (child := os.fork()) == 0:
            counters: list[float] = [-1]  # the answer if the child cannot read the counters
            try:
                counters = [state["step"].item() for state in run.optimizer.state.values()]
            finally:
                os.write(write, json.dumps(counters).encode())
                os._exit(0)
        os.waitpid(child, 0)
        run.seen += json.loads(os.read(read, 2**16))

    return {**compared(fork), "owed": owed}


def failing_code() -> dict[str, Any]:
    """Let the optimizer's code fail inside of a late update."""
    real = late_step.make_late_stand_in

    def fail(*given: Any) -> Any:
        made = real(*given)
        if len(late().owed) == 1:
            raise ValueError("planted")
        return made

    text = ""
    with patch.object(late_step, "make_late_stand_in", fail):
        try:
            ours(nothing)
        except TeraioError as error:
            text = f"{type(error).__name__}: {error}"
    try:
        teraio.reset()
    except TeraioError as error:
        text += f" / {type(error).__name__}"
    return {"error": text}


def failing_drive() -> dict[str, Any]:
    """Let each read of the drive fail in one forward. Later the updates of the step before still run."""
    expected = plainly(nothing)
    faults: list[_native.FaultIo] = []

    def wrap(io: _native.Io) -> _native.Io:
        faults.append(_native.FaultIo(io))
        return faults[0]

    def opened(*places: Any, **settings: Any) -> Store:
        return Store(*places, **settings, wrap=wrap)

    options: dict[str, Any] = {**OPTIONS, "updates": "late", "inner": "eager"}
    with patch.object(Store, "open", opened):
        run = Training(lambda m: torch.compile(m, backend="teraio", options=options))
        run.step()
    while run.step_number < 7:
        run.step()
    owed = len(late().owed)
    state = run.generator.get_state()
    failed: list[tuple[int, str]] = []
    faults[0].add("EIO", "read", 1, True)
    while run.step_number == 7 and len(failed) < 20:  # each error belongs to one read that was in flight
        try:
            run.step()
        except Exception as error:  # noqa: BLE001  torch may wrap the error
            failed.append((len(late().owed), f"{type(error).__name__}: {error}"[:200]))
            faults[0].clear()
            run.generator.set_state(state)
            run.model.zero_grad()
    run.train(nothing)
    return {"same": run.outcome() == expected, "owed": owed, "failed": failed}


def evicted_while_owed() -> dict[str, Any]:
    """Evict all tensors after each step, so that withheld bytes are written to the drive."""
    states: set[str] = set()

    def evict(run: Training) -> None:
        if engine.ENGINE is None:
            return
        residency = engine.ENGINE.residency
        withheld = [r for r in residency.records.values() if r.state is State.WITHHELD]
        states.update(record.kind for record in withheld)
        residency.advance_slot()
        residency.evict_until_fits(2**40, None)
        assert not any(r.state is State.WITHHELD for r in withheld)

    return {**compared(evict), "withheld": sorted(states)}


def loads_weights() -> dict[str, Any]:
    """Load weights after a step. The step's updates must not change the loaded weights."""

    def load(run: Training) -> None:
        if run.step_number == 8:
            saved = {name: torch.full_like(v, 0.01) for name, v in run.model.state_dict().items()}
            run.model.load_state_dict(saved)

    return compared(load)


def evaluates() -> dict[str, Any]:
    """Evaluate several batches after a step. The first evaluation runs the step's updates."""
    lengths: list[int] = []

    def evaluate(run: Training) -> None:
        if run.step_number != 7:
            return
        with torch.no_grad():
            for _ in range(4):
                run.seen.append(run.call(torch.ones(ROWS, WIDTH)).item())
                if engine.ENGINE is not None:
                    lengths.append(len(engine.ENGINE.tracker.programs))

    return {**compared(evaluate), "lengths": lengths}


def read_by_thread() -> dict[str, Any]:
    """Read a weight in another thread while the weight's late update runs. The thread must not see the old
    weight."""
    expected = plainly(nothing)
    seen: list[bool] = []
    readers: list[threading.Thread] = []
    run_resident = LateUpdates._run_resident

    def run_beside_reader(self: LateUpdates, update: LateUpdate) -> None:
        own = update.run
        at = next(at for at, record in enumerate(update.records) if record.kind == "weight")
        weight = update.tensors[at]
        before = torch.empty(0).set_(update.records[at].block).clone()

        def read() -> None:
            seen.append(not torch.equal(weight.flatten(), before))

        def run(blocks: Any) -> None:
            readers.append(threading.Thread(target=read))
            readers[-1].start()
            time.sleep(0.02)
            own(blocks)

        if len(readers) < 3 and self.running:  # at a slot of a program
            update.run = run
        run_resident(self, update)

    with patch.object(LateUpdates, "_run_resident", run_beside_reader):
        _, outcome, _ = ours(nothing)
    for reader in readers:
        reader.join()
    return {"same": outcome == expected, "seen": seen}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain loop": plain_loop,
    "reads one weight": reads_one_weight,
    "reads all weights": average_each_step,
    "fits": fits,
    "fork": forked_child,
    "failing code": failing_code,
    "failing drive": failing_drive,
    "evicted while owed": evicted_while_owed,
    "loads weights": loads_weights,
    "evaluates": evaluates,
    "read by a thread": read_by_thread,
}


def run_cases(cases: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Run the cases that the script's argument names, and print one JSON object for each of them."""
    torch.set_num_threads(1)
    steady.plans()
    os.environ["TERAIO_CACHE_DIR"] = "off"
    for name in json.loads(sys.argv[1]):
        try:
            print(json.dumps({"case": name, **cases[name]()}), flush=True)
        finally:
            with contextlib.suppress(TeraioError):
                teraio.reset()


if __name__ == "__main__":
    run_cases(CASES)
