"""A training that is interrupted at any moment, by Ctrl-C or by `kill -9`. After Ctrl-C the training
continues.

interrupted.py COUNT SEED     prints one JSON object: the outcomes of COUNT Ctrl-Cs at random moments
interrupted.py train ROOT     resumes from the last checkpoint, trains and saves until killed; prints a line
                              after its first steps
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

WARM = 6  # steps after which the engine follows a plan and has imported the planner
LATE_S = 2.0  # seconds; a signal without effect after this time was lost


class Training:
    """A training, either plain or within the budget. The number of a step decides the step's batch, so both
    trainings do the same steps.
    """

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
        """Return a digest of weights and optimizer states."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                found.update(tensor.detach().clone().numpy().tobytes())
        return found.hexdigest()

    def load(self, path: Path) -> int:
        """Load a checkpoint and return the number of the next step."""
        saved = teraio.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return int(saved["number"])


def within(**more: Any) -> Training:
    return Training(
        {"inner": "eager", "memory": BUDGET, "warmup": 1, "planning": "inline", "planner": "greedy", **more}
    )


class Timer:
    """A timer that sends one Ctrl-C to the main thread after a delay."""

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
    """Train plainly. Return one digest of the weights and states per step, and an empty string before the
    first.

    Call this function before an engine exists, because the engine would count the plain training's tensors.
    """
    plain, states = Training(None), [""]
    for number in range(steps):
        plain.step(number)
        states.append(plain.digest())
    torch._dynamo.reset()
    return states


def interrupted(count: int, seed: int) -> dict[str, int]:
    """Interrupt steps by Ctrl-C. In the returned counts, `whole` is the number of interrupted steps that were
    completed. `undone` is the number of interrupted steps without any effect.
    """
    chance = random.Random(seed)
    states = expected(2 * count + 20)
    ours = within()
    figures: Counter[str] = Counter(interrupted=0, whole=0, undone=0, torn=0, swallowed=0, errors=0)
    done, lately = 0, [0.0]  # steps that are done, and the durations of recent steps
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
            except Exception as error:  # noqa: BLE001 - other code may turn Ctrl-C into any error
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                figures["errors"] += 1
            if timer is not None:
                timer.end()  # the signal may also arrive during this call
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
    """Train until the process is killed, and save after each step."""
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
    """Resume the training in a new process, and kill it at a random moment after some steps. The process's
    command line begins with `first`.

    This function does not fork, because a process that has compiled has other threads. A forked child would
    wait forever for the locks of these threads.
    """
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
