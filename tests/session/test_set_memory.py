"""Promises about memory that changes while a training runs, and about the smallest that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import teraio
from teraio.errors import BudgetError, OptionError
from teraio.runtime.engine import engine
from teraio.runtime.ledger.residency import Need
from teraio.session import plan_reuse

WIDTH, LAYERS, BATCH = 256, 8, 1024
MIB = 2**20  # 16 of activations, 2 of weights, 2 of gradients, 4 of states; 4 of reserve
OPTIONS: dict[str, Any] = {"inner": "eager", "memory": 20 * MIB, "warmup": 1, "planner": "greedy"}


@pytest.fixture(autouse=True)
def no_drift(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_reuse, "DRIFT_PERCENT", 10**9)  # on a busy machine a step would be planned again


class Chain(nn.Module):
    """Its loss is compiled: what user code takes is learnt from the system, which other processes disturb."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


class Training:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Chain()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.compiled: Any = torch.compile(self.model, backend="teraio", options={**OPTIONS, **options})
        self.steps = 0

    def step(self, batch: int = BATCH) -> float:
        self.steps += 1
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(self.steps))
        loss = self.compiled(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def plainly(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERAIO_DISABLE", "1")
        training = Training()
        losses = training.run(steps)
    torch._dynamo.reset()
    return losses, training.weights()


def peak_of(training: Training, steps: int) -> tuple[list[float], int]:
    """Return the losses of so many steps, and the most that was in memory in them, reserve included."""
    losses, peaks = [], []
    for _ in range(steps):
        losses.append(training.step())
        peaks.append(teraio.stats()["step_peak_bytes"])
    return losses, max(peaks)


def misses_in(training: Training, steps: int) -> tuple[list[float], int]:
    before = teraio.stats()["misses"]
    return training.run(steps), teraio.stats()["misses"] - before


def test_a_running_training_takes_less_memory_and_more_again() -> None:
    """It follows a new plan from the second step on, and nothing is compiled again."""
    expected, weights = plainly(12)
    training = Training()
    losses = training.run(4)
    graphs = counters["stats"]["unique_graphs"]
    assert engine.ENGINE is not None
    for memory, bytes_ in (("14MiB", 14 * MIB), (40 * MIB, 40 * MIB)):
        teraio.set_memory(memory)
        assert teraio.stats()["budget_bytes"] == bytes_
        assert teraio.stats()["resident_bytes"] + engine.ENGINE.residency.reserve_bytes <= bytes_
        some, peak = peak_of(training, 2)
        more, misses = misses_in(training, 2)
        losses += some + more
        assert peak <= bytes_
        assert misses == 0, "the plan that is followed is for this memory"
        assert peak > 0.8 * bytes_ or bytes_ > 30 * MIB
    assert losses == expected
    assert all(map(torch.equal, training.weights(), weights))
    assert counters["stats"]["unique_graphs"] == graphs


def test_less_than_a_kernel_needs_is_refused_and_nothing_changes() -> None:
    expected, _ = plainly(3)
    training = Training()
    losses = training.run(2)
    with pytest.raises(BudgetError, match="Give at least"):
        teraio.set_memory("5MiB")
    assert teraio.stats()["budget_bytes"] == 20 * MIB
    assert losses + training.run(1) == expected


def test_min_takes_what_the_largest_kernel_needs_and_no_more() -> None:
    """From the first step on: four tensors of 1 MiB at a kernel of the backward, weight, gradient."""
    expected, weights = plainly(5)
    training = Training(memory="min")
    losses, peak = peak_of(training, 5)
    smallest = teraio.stats()["budget_bytes"]
    assert losses == expected
    assert all(map(torch.equal, training.weights(), weights))
    assert engine.ENGINE is not None
    reserve = engine.ENGINE.residency.reserve_bytes
    assert 3 * MIB < smallest - reserve < 6 * MIB
    assert peak <= smallest
    # A step of larger tensors takes more.
    training.step(2 * BATCH)
    assert smallest + MIB < teraio.stats()["budget_bytes"] < smallest + 8 * MIB


def test_a_running_training_takes_as_little_as_it_can() -> None:
    training = Training()
    expected, _ = plainly(6)
    losses = training.run(3)
    teraio.set_memory("min")
    some, peak = peak_of(training, 3)
    assert losses + some == expected
    assert peak <= teraio.stats()["budget_bytes"] < 12 * MIB


def test_before_anything_is_compiled_there_is_nothing_to_change() -> None:
    with pytest.raises(OptionError, match="nothing is compiled"):
        teraio.set_memory("1GiB")
    Training().run(1)
    with pytest.raises(OptionError, match="accepted are 20GiB, 80% and min"):
        teraio.set_memory("much")


def test_what_a_few_bytes_are_missing_to_is_told_in_bytes() -> None:
    """Where rounding would say that 20.1 MiB are needed, and that there are 20.1 MiB."""
    given = 20 * MIB + 64_000
    Training(memory=given).run(2)
    residency = engine.ENGINE.residency  # type: ignore[union-attr]
    need = Need(0, given - residency.reserve_bytes + 1, "k")
    with pytest.raises(BudgetError, match=rf"needs {given + 1} bytes at kernel k .*{given} bytes"):
        residency.raise_budget_error(need)
