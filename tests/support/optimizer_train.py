"""Trainings with different optimizers, and with loops whose user code changes or reads gradients. Each runs
plainly and under a budget.

    optimizer_train.py '["AdamW", ["clips", "updates are forgotten"], ...]'

The script prints one JSON line per scenario. The line tells whether losses, weights, states and groups are
equal, and holds the peaks and the moves. If an argument is a pair, its second element names a bug to plant.
The model is a chain of layers whose weights, gradients and states are most of the memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import counting_allocator
import steady
import torch
import unnoted
from optimizer_loops import LOOPS, OPTIMIZERS, WHOLE, Loop

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import Record, State
from teraio.runtime.optimizer import buckets, step_call, trial
from teraio.runtime.optimizer.buckets import is_bitwise_equal

WIDTH, LAYERS, ROWS, STEPS = 192, 10, 32, 4
BUDGET = 6 * 2**20  # teraio reserves 4 MiB; weights, gradients and Adam's states take 5.9 MiB
WHOLE_BUDGET = 24 * 2**20


class Chain(torch.nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


READ = Mover._read_starter_of_copy


def not_gradients(mover: Mover, record: Record, demand: bool) -> Any:
    """Read no bytes when a gradient is fetched, so that its memory keeps arbitrary bytes."""
    return READ(mover, record, demand) if record.kind != "grad" else lambda target, mark: unnoted.Done()


PLANTS: dict[str, list[Any]] = {
    # With this bug, the engine fetches the copy from before the update.
    "updates are forgotten": [
        *unnoted.writes(),
        patch("teraio.runtime.engine.engine.wrote_bound", lambda bound, written: None),
        patch("teraio.runtime.step.quiet_call.wrote_bound", lambda bound, written: None),
    ],
    # With this bug, autograd adds to arbitrary bytes.
    "gradients are not fetched": [patch.object(Mover, "_read_starter_of_copy", not_gradients)],
    # With this bug, no trial shows a difference, so the engine steps every optimizer in buckets, which are
    # small groups of parameters.
    "nothing is tried": [patch.object(trial, "is_bitwise_equal", lambda one, other: True)],
    "groups are not written back": [
        patch.object(buckets, "write_back_group_options", lambda groups, written: None)
    ],
    # With this bug, user code writes gradients, but the engine fetches the copy from before the write.
    "operators write unnoted": unnoted.writes(),
}


@contextlib.contextmanager
def planted(bug: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for plant in PLANTS.get(bug, ()):
            stack.enter_context(plant)
        yield


class Run:
    def __init__(self, scenario: str, budget: int, counting: counting_allocator.Counting) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.counting = counting
        before = counting.alive_bytes()
        self.model = Chain()
        make, self.loop = OPTIMIZERS.get(scenario, OPTIMIZERS["AdamW"]), LOOPS.get(scenario, Loop())
        self.optimizer = make(self.model)
        self.others = before
        options: dict[str, Any] = {"inner": "eager", "warmup": 1, "planning": "inline", "memory": budget}
        self.compiled: Any = self.model
        if budget:
            self.compiled = torch.compile(self.model, backend="teraio", options=options, dynamic=False)
        else:
            with patch.dict("os.environ", {"TERAIO_DISABLE": "1"}):
                self.compiled = torch.compile(self.model, backend="teraio", options={"inner": "eager"})
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.buckets = 0
        self.evicted: dict[str, int] = {}

    def train(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            self.counting.reset_peak()
            batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(self.loop.batches)]
            self.losses += self.loop.step(self, step, batches)
            self.look()
            self.peaks.append(self.counting.peak_bytes() - self.others)

    def look(self) -> None:
        """Count the tensors that are evicted between two steps, by kind."""
        if engine.ENGINE is not None:
            for record in engine.ENGINE.residency.records.values():
                if record.state is State.EVICTED and not record.is_dead():
                    self.evicted[record.kind] = self.evicted.get(record.kind, 0) + 1

    def outcome(self) -> list[Any]:
        parameters = list(self.model.parameters())
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        states = [dict(self.optimizer.state.get(p, {})) for p in parameters]
        return [self.losses, [p.data for p in parameters], states, groups, [p.grad for p in parameters]]


def compare(scenario: str, counting: counting_allocator.Counting, bug: str) -> dict[str, Any]:
    with patch.dict("os.environ", {"TERAIO_DISABLE": "1"}):
        plain = Run(scenario, 0, counting)
        plain.train()
    expected = plain.outcome()
    del plain
    opened: list[int] = []
    real = step_call.OptimizerCall.open_bucket

    def open_(self: Any, at: int) -> None:
        opened.append(at)
        real(self, at)

    with planted(bug), patch.object(step_call.OptimizerCall, "open_bucket", open_):
        held = counting.alive_bytes()
        ours = Run(scenario, WHOLE_BUDGET if scenario in WHOLE else BUDGET, counting)
        assert ours.others == held
        ours.train()
        counts = teraio.stats()
        teraio.reset()
    return {
        "same": is_bitwise_equal(expected, ours.outcome()),
        "peaks": ours.peaks,
        "buckets": max(opened, default=-1) + 1,
        "away": ours.evicted,
        "counts": counts,
    }


def main() -> None:
    counting = counting_allocator.install_over_ours()
    torch.set_num_threads(1)
    steady.plans()
    for request in json.loads(sys.argv[1]):
        scenario, bug = request if isinstance(request, list) else (request, "")
        print(json.dumps({"scenario": scenario, "bug": bug, **compare(scenario, counting, bug)}), flush=True)


if __name__ == "__main__":
    main()
