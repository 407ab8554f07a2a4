"""A training or an inference, which an alarm interrupts again and again. The alarm's handler reads the
model's weights and the optimizer's states.

    signalled.py train COUNT SEED    the digest of weights and states must always be that of a whole step
    signalled.py infer COUNT SEED    a weight must never change
    signalled.py leave FILE SEED     trains until SIGTERM, whose handler saves and exits

`train` and `infer` print one JSON object. `leave` prints a line after its first steps. The script runs in its
own process, because a handler that runs at a wrong moment can crash the process.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from interrupted import WARM, expected, within

import teraio

SOONEST_S, LATEST_S = 0.001, 0.02
STEPS_MAX = 20_000  # largest number of steps of inference; training ends at the last known digest
LAYERS, SIDE = 16, 256
BUDGET = "6MiB"  # teraio reserves 4 MiB; weights take 4.1 MiB


class Alarm:
    """An alarm that sends `count` signals, each after a random delay. The handler checks the weights."""

    def __init__(self, count: int, seed: int, good: Callable[[], bool]) -> None:
        self.left, self.wrong, self.errors = count, 0, 0
        self.good, self.chance = good, random.Random(seed)
        signal.signal(signal.SIGALRM, self._rings)
        self._set()

    def _set(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(SOONEST_S, LATEST_S))

    def _rings(self, *_: Any) -> None:
        self.left -= 1
        try:
            self.wrong += not self.good()
        except Exception as error:  # noqa: BLE001 - the handler may meet any error
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            self.errors += 1
        if self.left:
            self._set()


def trains(count: int, seed: int) -> dict[str, int]:
    states = expected(2 * count + 20)
    ours, done, alarm = within(), 0, None

    def whole() -> bool:
        return ours.digest() in states[done : done + 2]

    while (alarm is None or alarm.left) and done + 1 < len(states):
        if done == WARM:
            alarm = Alarm(count, seed, whole)
        ours.step(done)
        done += 1
        if ours.digest() != states[done]:
            return {"torn": done}
    assert alarm is not None
    return _found(alarm, done)


def infers(count: int, seed: int) -> dict[str, int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
    x = torch.randn(SIDE, SIDE)
    weights = [(p, p.detach().clone()) for p in model.parameters()]
    options: dict[str, Any] = {"memory": BUDGET, "inner": "eager", "planner": "greedy"}
    compiled = torch.compile(model, backend="teraio", dynamic=False, options=options)
    chance = random.Random(seed)
    with torch.no_grad():
        result, done, alarm = compiled(x), 1, None
        while (alarm is None or alarm.left) and done < STEPS_MAX:
            if done == WARM:
                alarm = Alarm(count, seed, lambda: torch.equal(*chance.choice(weights)))
            done += 1
            if not torch.equal(compiled(x), result):
                return {"torn": done}
    assert alarm is not None
    return _found(alarm, done)


def leaves(path: str) -> None:
    ours, done = within(), 0

    def saves(*_: Any) -> None:
        model, optimizer = ours.model.state_dict(), ours.optimizer.state_dict()
        steps = {int(state["step"]) for state in ours.optimizer.state.values()}
        assert steps in ({done}, {done + 1})
        teraio.save({"number": steps.pop(), "model": model, "optimizer": optimizer}, path)
        sys.exit(0)

    signal.signal(signal.SIGTERM, saves)
    while True:
        ours.step(done)
        done += 1
        if done == WARM:
            print("warm", flush=True)


def _found(alarm: Alarm, steps: int) -> dict[str, int]:
    moved = teraio.stats()["fetches"]
    called = {"left": alarm.left, "wrong": alarm.wrong, "errors": alarm.errors}
    return {**called, "torn": 0, "steps": steps, "moved": moved}


def main() -> None:
    torch.set_num_threads(1)
    does, what, seed = sys.argv[1:]
    if does == "leave":
        leaves(what)
    print(json.dumps({"train": trains, "infer": infers}[does](int(what), int(seed))))


if __name__ == "__main__":
    main()
