"""Models and training loops that others might write. Training is bit-equal to training without teraio, or an
error names the cause.

tests/long/what_strangers_write.py generates hundreds of models and loops. Some of them revealed faults. This
file has a small case for each fault.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import children
import pytest
import torch
import tree
from first_compile_child import CASES, train
from torch import nn
from torch.nn.utils import prune

import teraio
from teraio.errors import BudgetError, UnsupportedError
from teraio.formats.timeline import Timeline
from teraio.report import content, terminal_text
from teraio.runtime.ledger.record import Record
from teraio.runtime.ledger.resident_reasons import name_largest_resident

WIDTH, STEPS = 256, 4
CHILD = tree.SUPPORT / "first_compile_child.py"

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[[Any, nn.Module, torch.Tensor], torch.Tensor]
Optimize = Callable[[nn.Module], list[torch.optim.Optimizer]]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors: list[torch.Tensor] = [*model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors += [value for value in states if isinstance(value, torch.Tensor)]
    return hashlib.sha256(b"".join(t.detach().clone().numpy().tobytes() for t in tensors)).hexdigest()


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def mean(compiled: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = compiled(x).square().mean()
    return loss


def floats() -> torch.Tensor:
    return torch.randn(16, WIDTH)


def trained(
    make: Callable[[], nn.Module],
    loss: Loss = mean,
    batch: Callable[[], torch.Tensor] = floats,
    optimize: Optimize = adamw,
    **options: Any,
) -> list[Any]:
    """Train a model. Return a pair: the losses, and the digests of the weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    wanted = {"memory": "min", "inner": "eager", "warmup": 1, **options}
    compiled = torch.compile(model, backend="teraio", options=wanted)
    optimizers = optimize(model)
    losses = []
    for _ in range(STEPS):
        value = loss(compiled, model, batch())
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(value.item())
    return [losses, *(digest(model, optimizer) for optimizer in optimizers)]


@pytest.fixture
def same(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Callable[..., None]]:
    """Yield a function that trains with the engine and without it, and checks that all bits are equal."""

    def check(*args: Any, steps: int = STEPS, **kwargs: Any) -> None:
        found = trained(*args, **kwargs)
        stats = teraio.stats()
        assert stats["step"] + stats["evaluations"] == steps
        assert stats["evictions"] + stats["drops"] > 0
        teraio.reset()
        monkeypatch.setenv("TERAIO_DISABLE", "1")
        assert trained(*args, **kwargs) == found
        monkeypatch.delenv("TERAIO_DISABLE")

    yield check


# ---- cases that crashed


class Branches(nn.Module):
    """A model with a branch that gets no gradient, because the branch's result is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x) + self.unused(x).detach()
        return out


def test_model_with_unused_branch_trains(same: Callable[..., None]) -> None:
    same(Branches)


@cache
def first_compiles() -> dict[str, str]:
    """Run each case in its own child process. Return the outputs by case."""
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda case: children.ended([sys.executable, str(CHILD), case]), CASES)
    return {case: child.stdout or f"{child.returncode}: {child.stderr}" for case, child in zip(CASES, ended)}


@pytest.mark.parametrize("case", CASES)
def test_first_compiled_model_of_process_trains(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    assert json.loads(first_compiles()[case]) == train(case)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(2000, 64, sparse=True), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rows(x))
        return out


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def both_adams(model: nn.Module) -> list[torch.optim.Optimizer]:
    assert isinstance(model, Sparse)
    sparse = torch.optim.SparseAdam([model.rows.weight], lr=1e-2)
    return [sparse, torch.optim.AdamW(model.head.parameters(), lr=1e-2)]


@pytest.mark.parametrize("memory", ["10MiB", "min"])
@pytest.mark.parametrize("optimize", [sgd, both_adams])
def test_a_sparse_embedding_trains(optimize: Optimize, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch": lambda: torch.randint(0, 2000, (8, 16)), "memory": memory}
    found = trained(Sparse, optimize=optimize, **options)
    assert teraio.stats()["step"] == STEPS
    teraio.reset()
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    assert trained(Sparse, optimize=optimize, **options) == found


def convolutions() -> nn.Module:
    return nn.Sequential(*(nn.Conv1d(16, 16, 64, padding="same") for _ in range(4)))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def beside_an_eager_graph(compiled: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    eager = model(x).square().mean()  # eager autograd saves the weights before any compiled program uses them
    loss: torch.Tensor = compiled(x).mean() + eager
    return loss


def test_eager_graph_before_first_program_trains(same: Callable[..., None]) -> None:
    same(convolutions, beside_an_eager_graph, lambda: torch.randn(4, 16, 256))


def with_a_penalty(compiled: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    value = compiled(x).mean()
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    loss: torch.Tensor = value + slope.square().sum()
    return loss


def test_gradient_penalty_trains(same: Callable[..., None]) -> None:
    same(layers, with_a_penalty)


def test_foreach_functions_of_weights_give_right_results() -> None:
    trained(layers)
    model = layers()
    compiled: Any = torch.compile(
        model, backend="teraio", options={"memory": "min", "inner": "eager", "warmup": 1}
    )
    compiled(floats()).mean().backward()
    one, other = list(model.parameters())[:2]
    with torch.no_grad():
        assert one.grad is not None
        expected = one.clone() + one.grad
        torch._foreach_add_([one], [one.grad])
        assert torch.equal(one, expected) and other.grad is not None
        expected = other.clone() + other.grad
        torch._foreach_add_(self=[one, other], other=[one.grad, other.grad])
        assert torch.equal(other, expected)


# ---- cases with a missing warning


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.cells(x)[0])
        return out


def sequences() -> torch.Tensor:
    return torch.randn(4, 8, WIDTH)


def test_recurrent_model_is_warned_of_and_kept_within_budget(
    same: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "teraio"):
        same(Recurrent, batch=sequences)
    (line,) = [each for each in caplog.messages if "in no compiled graph" in each]
    assert "Recurrent" in line and "RNN, GRU, or LSTM" in line and "LSTM(256, 256" in line


def test_uncompiled_model_with_on_fallback_error_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"in no compiled graph: 9 weights .* of Recurrent"):
        trained(Recurrent, batch=sequences, on_fallback="error")


def test_compiled_model_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "teraio"):
        trained(layers)
    assert "in no compiled graph" not in caplog.text


class Begins(nn.Module):
    """A model with a graph break before its first trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.cumsum(0) / 10
        torch._dynamo.graph_break()
        out: torch.Tensor = self.layers(x)
        return out


def test_step_that_begins_without_gradients_trains(same: Callable[..., None]) -> None:
    same(Begins)


def test_teacher_joins_step_from_second_step_on(same: Callable[..., None]) -> None:
    def taught(compiled: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = compiled(x).tanh()
        loss: torch.Tensor = (compiled(x) - target).square().mean()
        return loss

    same(layers, taught, steps=STEPS + 1)


def test_overrun_is_reported_beside_peak(tmp_path: Path) -> None:
    """Check the peak and the overrun in `teraio.stats()` and in the report.

    The peak includes the reserve. The reserve is the part of the budget for memory that the engine does not
    manage, such as tensors of user code.
    """

    def greedy(compiled: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = compiled(x).square().mean()
        # This tensor exceeds the budget. The sum below touches all its pages.
        held = torch.zeros(24 << 20, dtype=torch.uint8)
        return value + held.sum() * 0.0

    timeline = tmp_path / "run.timeline.json"
    trained(layers, greedy, memory="10MiB", planner="none", timeline=str(timeline))
    stats = teraio.stats()
    assert 4 << 20 <= stats["reserve_bytes"] < stats["step_peak_bytes"] <= stats["budget_bytes"] == 10 << 20
    assert stats["step_overrun_bytes"] >= 16 << 20
    assert stats["overrun_bytes"] >= stats["step_overrun_bytes"]
    teraio.reset()
    line = Timeline.read(timeline)
    assert line.overrun_bytes >= 16 << 20
    text = terminal_text.report_as_text(content.assemble_content(content.Sources(line, "run")))
    assert re.search(r"took [\d.]+ MiB beyond the budget", text), text


# ---- cases with an unclear error or too large a budget


class Breaks(nn.Module):
    """A model that passes a tensor larger than the budget from one compiled graph to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: torch.Tensor = self.second(x)
        return out


def test_budget_error_names_largest_unevictable_tensor() -> None:
    with pytest.raises(BudgetError) as caught:
        trained(Breaks, batch=lambda: torch.randn(1024, WIDTH), memory="8MiB")
    text = str(caught.value)
    assert re.search(
        r"largest that cannot be evicted: \S+ \(1 MiB: an input that eager code made: your code", text
    )


def test_eager_tensor_passed_to_program_counts_once() -> None:
    """Check that the smallest budget has room for the eager tensor only once.

    The engine counts the tensor as an input of the program, and no longer as memory of user code.
    """

    class Handed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            tile = torch.ones(32768, WIDTH)  # a tensor of 32 MiB, made by eager code
            torch._dynamo.graph_break()
            out: torch.Tensor = self.second(x + tile[:16])
            return out

    trained(Handed)
    assert teraio.stats()["budget_bytes"] < 48 << 20


def test_min_budget_excludes_evictable_tensors() -> None:
    def loss(compiled: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = compiled(x).square().mean()
        # User code takes 16 MiB. While it holds them, the engine can evict all weights.
        held = torch.ones(4 << 20)
        return value + 0.0 * held.sum().item()

    def wide() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))

    trained(wide, loss, batch=lambda: torch.randn(16, 512), optimize=sgd)
    stats = teraio.stats()
    assert stats["budget_bytes"] <= stats["reserve_bytes"] + (16 << 20) + (1 << 19)


def test_weight_held_only_by_reference_cycle_is_evicted() -> None:
    """Prune the weights of all layers.

    In each forward, `prune` multiplies each weight by a mask. The product and the mask have 1 MiB each.
    Dynamo's trace keeps the first product alive, and the autograd graph of this product keeps the mask alive.
    """

    def pruned() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        for layer in model:
            prune.l1_unstructured(layer, "weight", amount=0.3)
        return model

    trained(pruned, batch=lambda: torch.randn(4, 512), optimize=sgd)
    stats = teraio.stats()
    assert stats["budget_bytes"] < stats["reserve_bytes"] + (26 << 20)


def test_largest_resident_tensors_are_named_with_reasons() -> None:
    tensors = [torch.zeros(1 << 16 >> n) for n in range(4)]
    records = [Record(t.untyped_storage(), f"w{n}", "weight", True) for n, t in enumerate(tensors)]
    records[1].pin()
    records[2].forbid_eviction()
    records[2].explain("the option 'keep' names it")
    assert name_largest_resident(records, {records[0].key}, lambda record: record is records[3]) == (
        "w1 (128 KiB: your code is using it); w2 (64 KiB: the option 'keep' names it); "
        "w3 (32 KiB: your code asked for its address (data_ptr, a storage object))"
    )
