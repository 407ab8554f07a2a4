"""A training that someone wants to end at any moment: by Ctrl-C, after which it goes on, or by `kill -9`.

interrupted.py COUNT SEED     prints one JSON object: what so many Ctrl-Cs at random moments came to
interrupted.py train ROOT     trains on from the last checkpoint, and saves, until it is killed; prints a line
                              when it is warm
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from optimizer_train import BUDGET, ROWS, WIDTH, Chain

import teraio

WARM = 6  # steps until a plan is followed, and all that planning needs is imported
LATE_S = 2.0  # a signal that has come to nothing by then was swallowed


class Training:
    """Within the budget, or plainly; step `n` is the same in both."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = Chain()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        named: Any = (
            {"backend": "aot_eager"} if options is None else {"backend": "teraio", "options": options}
        )
        self.compiled: Any = torch.compile(self.model, dynamic=False, **named)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        self.compiled(x).backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Of weights and states."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                found.update(tensor.detach().clone().numpy().tobytes())
        return found.hexdigest()

    def load(self, path: Path) -> int:
        """Goes on from a checkpoint; the number of the next step."""
        saved = teraio.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return int(saved["number"])


def within(**more: Any) -> Training:
    return Training({"inner": "eager", "memory": BUDGET, "warmup": 1, "planner": "greedy", **more})


class Timer:
    """Presses Ctrl-C once, a little later."""

    def __init__(self, seconds: float) -> None:
        self.fired = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._wait, args=(seconds,))
        self._thread.start()

    def _wait(self, seconds: float) -> None:
        if not self._stop.wait(seconds):
            self.fired = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def expected(steps: int) -> list[str]:
    """The digest after each step of the plain training. Before there is an engine, which would count it."""
    plain, states = Training(None), [""]
    for number in range(steps):
        plain.step(number)
        states.append(plain.digest())
    torch._dynamo.reset()
    return states


def interrupted(count: int, seed: int) -> dict[str, int]:
    """`whole`: steps that were done nevertheless; `undone`: those that left everything as it was."""
    chance = random.Random(seed)
    states = expected(2 * count + 20)
    ours = within()
    figures: Counter[str] = Counter(interrupted=0, whole=0, undone=0, torn=0, swallowed=0, errors=0)
    done, lately = 0, [0.0]  # how long steps took
    while figures["interrupted"] < count and not figures["torn"] and done + 1 < len(states):
        pressed = False
        timer = None
        seconds = chance.uniform(0, sorted(lately[-9:])[len(lately[-9:]) // 2])
        try:
            timer = Timer(seconds) if done >= WARM else None
            try:
                began = time.perf_counter()
                ours.step(done)
                lately.append(time.perf_counter() - began)
                if timer is not None and timer.fired:
                    time.sleep(LATE_S)
                    figures["swallowed"] += 1
            except Exception as error:  # noqa: BLE001 - whatever Ctrl-C was turned into
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                figures["errors"] += 1
            if timer is not None:
                timer.end()  # it may come as late as here
        except KeyboardInterrupt:
            pressed = True
            if timer is not None:
                timer.end()
        state = ours.digest()
        figures["interrupted"] += pressed
        if state == states[done + 1]:
            done += 1
            figures["whole"] += pressed
        elif state == states[done]:
            figures["undone"] += 1
        else:
            figures["torn"] += 1
    return {**figures, "steps": done, "moved": teraio.stats()["fetches"]}


# ---- kill -9


def trained_forever(root: Path) -> None:
    """Saves after each step."""
    training, path = within(store=str(root / "store")), root / "last.pt"
    number = first = training.load(path) if path.exists() else 0
    while True:
        training.step(number)
        number += 1
        model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
        teraio.save({"number": number, "model": model, "optimizer": optimizer}, path)
        if number == first + WARM:
            print("warm", flush=True)


def killed(
    root: Path,
    chance: random.Random,
    first: Sequence[str] = (),
    end: Callable[[subprocess.Popen[str]], None] = subprocess.Popen.kill,
) -> None:
    """Goes on with it, and ends it at a random moment, after some steps. No fork: a process that has compiled
    something has threads, whose locks a child would wait for. `first`: what its command begins with."""
    (root / "store").mkdir(exist_ok=True)
    command = [*first, sys.executable, __file__, "train", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "warm\n"
        time.sleep(chance.uniform(0, 0.5))
        end(child)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        trained_forever(Path(sys.argv[2]))
    print(json.dumps(interrupted(int(sys.argv[1]), int(sys.argv[2]))))


if __name__ == "__main__":
    main()
