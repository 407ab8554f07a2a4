"""Runs of a whole training. In each run, a different operation of the drive fails.

    fault_loop.py '[["flip", "read", "once", 1, 1, 200], ...]' [checksum=off]

A chain of layers trains four steps with AdamW under a budget. During these four steps, the optimizer makes
its states. The engine measures one step, makes a plan, and follows the plan.

A row is (kind, operation, once or sticky, first, stride, count). The row's first run lets operation number
`first` fail with this kind of fault, the next run operation number `first + stride`, and so on. A row ends
after `count` runs, or when no operation is left to fail.

Each run must end with the numbers of a run without faults, or with an error of teraio. After an error,
another run in the same process must give the correct numbers. The script prints a JSON line per run. A run
that hangs ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from optimizer_train import Chain

import teraio
from teraio import _native
from teraio.errors import TeraioError
from teraio.runtime.store.store import Store
from teraio.session import session

WIDTH, LAYERS, ROWS, STEPS = 96, 6, 64, 4
# teraio reserves 4 MiB of the budget, for transfer buffers and other memory. Weights, gradients and optimizer
# states take 0.9 MiB.
OPTIONS = {
    "inner": "eager",
    "memory": 4 * 2**20 + 320 * 2**10,
    "warmup": 1,
    "planning": "inline",
    "planner": "greedy",
}
DEADLINE_S = 0.5  # deadline of one operation in seconds; a busy drive may need this long
LOST = {"drop", "stall"}
HANGS_S = 300
KINDS = ("EIO", "ENOSPC", "short", "drop", "stall", "flip", "stale", "neighbour", "delay")


class Loop:
    """A model that is compiled only one time. Every run has its own engine and store."""

    def __init__(self, **options: Any) -> None:
        self.options = {**OPTIONS, **options}
        torch.manual_seed(0)
        self.model = Chain(WIDTH, LAYERS)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.compiled: Any = torch.compile(self.model, backend="teraio", options=self.options, dynamic=False)
        self.fault: _native.FaultIo | None = None
        with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
            plain = torch.compile(self.model, backend="teraio", options={"inner": "eager"}, dynamic=False)
            self.expected = self.train(plain)
        self.clean = self.run()
        assert self.clean == "same", "the run without faults is wrong"
        self.operations = self.count()

    def train(self, compiled: Any) -> list[Any]:
        self.model.load_state_dict(self.start)
        self.model.zero_grad()  # drops the gradients of a step that a fault ended
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(STEPS):
            loss = compiled(torch.randn(ROWS, WIDTH, generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return [losses, [p.detach().clone() for p in self.model.parameters()]]

    def run(self, **fault: Any) -> str:
        """Train, and return the outcome: `same`, `other numbers`, or the name of the error."""
        with self.faulty(**fault):
            try:
                result = self.train(self.compiled)
            except RuntimeError as error:
                if not isinstance(error, TeraioError) and not str(error).startswith("teraio: "):
                    raise  # not an error of teraio; torch may wrap teraio's error, but keeps its text
                return type(error).__name__
        same = result[0] == self.expected[0] and all(map(torch.equal, result[1], self.expected[1]))
        return "same" if same else "other numbers"

    def count(self) -> dict[str, int]:
        assert self.fault is not None
        return {op: self.fault.operations(op) for op in ("read", "write")}

    @contextlib.contextmanager
    def faulty(self, **fault: Any) -> Iterator[None]:
        def wrap(io: _native.Io) -> _native.Io:
            self.fault = _native.FaultIo(io)
            if fault:
                self.fault.add(**fault)
            return self.fault

        def opened(*places: Any, **settings: Any) -> Store:
            if fault.get("kind") in LOST:
                settings["deadline_s"] = DEADLINE_S
            return Store(*places, **settings, wrap=wrap)

        with patch.object(Store, "open", opened):
            session.start_with_options(self.options, torch.get_default_device())
        try:
            yield
        finally:
            with contextlib.suppress(TeraioError):  # reset may report again that bytes were lost
                teraio.reset()

    def outcome(self, fault: dict[str, Any]) -> dict[str, Any]:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        began = time.monotonic()
        ended = self.run(**fault)
        assert self.fault is not None
        result = {**fault, "outcome": ended, "hits": self.fault.hits}
        result["after"] = self.run() if ended != "same" else "same"
        faulthandler.cancel_dump_traceback_later()
        return {**result, "s": round(time.monotonic() - began, 3)}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TERAIO_CACHE_DIR"] = "off"
    loop = Loop(**dict(option.split("=") for option in sys.argv[2:]))
    print(json.dumps({"operations": loop.operations}), flush=True)
    for kind, op, how, first, stride, count in json.loads(sys.argv[1]):
        for n in range(first, first + stride * count, stride):
            fault = {"kind": kind, "op": op, "nth": n, "sticky": how == "sticky"}
            result = loop.outcome({**fault, "delay_s": 0.02} if kind == "delay" else fault)
            print(json.dumps(result), flush=True)
            if not result["hits"]:
                break


if __name__ == "__main__":
    main()
