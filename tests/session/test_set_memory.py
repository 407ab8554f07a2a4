"""Tests of `set_memory` during a training, and of the option memory="min", which gives the smallest possible
budget."""

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
# In MiB, activations take 16, weights 2, gradients 2, and optimizer states 4. teraio reserves 4 for other
# memory.
MIB = 2**20
OPTIONS: dict[str, Any] = {"inner": "eager", "memory": 20 * MIB, "warmup": 1, "planner": "greedy"}


@pytest.fixture(autouse=True)
def no_drift(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # No drift (measured time minus predicted time) reaches this limit. On a busy machine, drift would
    # otherwise end the trial of a plan.
    monkeypatch.setattr(plan_reuse, "DRIFT_PERCENT", 10**9)


class Chain(nn.Module):
    """A chain of layers that also computes the loss, so that the loss is compiled.

    The engine would measure the memory of an eager loss, and other processes would disturb the measurement.
    """

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
    """Train for `steps` steps. Return the losses, and the highest peak of these steps. The peak includes the
    memory that teraio reserves."""
    losses, peaks = [], []
    for _ in range(steps):
        losses.append(training.step())
        peaks.append(teraio.stats()["step_peak_bytes"])
    return losses, max(peaks)


def misses_in(training: Training, steps: int) -> tuple[list[float], int]:
    before = teraio.stats()["misses"]
    return training.run(steps), teraio.stats()["misses"] - before


def test_set_memory_shrinks_and_grows_a_running_training() -> None:
    """Two steps after each change of the budget, the training follows a plan for the new budget.

    The changes compile no graph.
    """
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
        assert misses == 0, "the plan in force is for this memory"
        assert peak > 0.8 * bytes_ or bytes_ > 30 * MIB
    assert losses == expected
    assert all(map(torch.equal, training.weights(), weights))
    assert counters["stats"]["unique_graphs"] == graphs


def test_set_memory_below_largest_kernel_is_refused() -> None:
    expected, _ = plainly(3)
    training = Training()
    losses = training.run(2)
    with pytest.raises(BudgetError, match="Give at least"):
        teraio.set_memory("5MiB")
    assert teraio.stats()["budget_bytes"] == 20 * MIB
    assert losses + training.run(1) == expected


def test_memory_min_is_what_largest_kernel_needs() -> None:
    """With memory="min", the budget has room for the largest kernel from the first step on.

    This kernel is in the backward. It needs four tensors of 1 MiB each, one weight and one gradient.
    """
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
    # The tensors of a larger batch need a larger budget.
    training.step(2 * BATCH)
    assert smallest + MIB < teraio.stats()["budget_bytes"] < smallest + 8 * MIB


def test_set_memory_min_shrinks_a_running_training() -> None:
    training = Training()
    expected, _ = plainly(6)
    losses = training.run(3)
    teraio.set_memory("min")
    some, peak = peak_of(training, 3)
    assert losses + some == expected
    assert peak <= teraio.stats()["budget_bytes"] < 12 * MIB


def test_set_memory_before_first_compile_is_refused() -> None:
    with pytest.raises(OptionError, match="nothing is compiled"):
        teraio.set_memory("1GiB")
    Training().run(1)
    with pytest.raises(OptionError, match="accepted are 20GiB, 80% and min"):
        teraio.set_memory("much")


def test_budget_error_whose_sizes_round_equal_is_in_bytes() -> None:
    """With rounded sizes, the error would state that the step needs 20.1 MiB and memory is 20.1 MiB."""
    given = 20 * MIB + 64_000
    Training(memory=given).run(2)
    residency = engine.ENGINE.residency  # type: ignore[union-attr]
    need = Need(0, given - residency.reserve_bytes + 1, "k")
    with pytest.raises(BudgetError, match=rf"needs {given + 1} bytes at kernel k .*{given} bytes"):
        residency.raise_budget_error(need)
