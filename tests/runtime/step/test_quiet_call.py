"""Tests of quiet calls. In a quiet call, a compiled program runs and the engine moves no tensor.

A slot is a call of the engine before a kernel. In a quiet call, only the last slot records the tensors that
the program made, all at once. The engine's counts then equal the counts of a call in which each slot records
its own tensors. The counts are also complete after an error, or when the budget shrinks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_device import CELL
from engine_run import Compiled, Run, with_forgets
from torch import nn

import teraio
from teraio.errors import BudgetError
from teraio.passes.slots.events import Signature
from teraio.runtime.engine import engine
from teraio.runtime.step.program import Program
from teraio.runtime.step.quiet_call import QuietCall
from teraio.session import plan_reuse

WIDTH, LAYERS, BATCH = 128, 6, 512
# Two budgets in bytes. The first has room for all tensors, and the second does not. Activations take 3 MiB.
# The model, its gradients and optimizer states together take 1.6 MiB. teraio reserves 4 MiB for other memory.
ROOM, LITTLE = 2**24, 6 * 2**20


@pytest.fixture(autouse=True)
def no_drift(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_reuse, "DRIFT_PERCENT", 10**9)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list. Each call of a compiled program appends True if the call is quiet, otherwise False."""
    found: list[bool] = []
    begins = QuietCall.begin_if_quiet

    def counted(self: QuietCall, program: Program) -> None:
        begins(self, program)
        found.append(self.program is not None)

    monkeypatch.setattr(QuietCall, "begin_if_quiet", counted)
    return found


class Remembers(nn.Module):
    """A model whose compiled program writes to a buffer of the model."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.5).add_(x[:WIDTH])
        loss: torch.Tensor = (self.layers(x) + self.seen.sum()).square().mean()
        return loss


def trained(memory: list[int], **options: Any) -> tuple[list[str], list[Any], list[torch.Tensor]]:
    """Train one step per entry of `memory`. The entry is the budget of the step in bytes.

    Return (1) the losses, (2) the engine's counts after each step, and (3) the model's tensors.
    """
    torch.manual_seed(0)
    model = Remembers()
    optimizer = torch.optim.AdamW(model.parameters())
    chosen: dict[str, Any] = {"inner": "eager", "warmup": 1, "planner": "greedy", **options}
    compiled: Any = torch.compile(model, backend="teraio", options={**chosen, "memory": ROOM})
    losses, counts, given = [], [], ROOM
    for number, room in enumerate(memory):
        if room != given and engine.ENGINE is not None:
            teraio.set_memory(room)
            given = room
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        counts.append(counted())
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return losses, counts, tensors


def counted() -> Any:
    """Return a pair: the engine's counts, and facts about the engine's tensors in the order of their last
    use. Return None if no engine exists."""
    if engine.ENGINE is None:
        return None
    stats = teraio.stats()
    records = sorted(engine.ENGINE.residency.records.values(), key=lambda r: (r.used_at, r.name))
    order = [(record.name, record.kind, record.clean, record.evictable) for record in records]
    return {name: stats[name] for name in ("slots", "step_peak_bytes", "resident_bytes")}, order


def test_quiet_call_counts_the_same_as_its_slots_would(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = trained([ROOM] * 6)
    assert calls[-2:] == [True, True]
    teraio.reset()
    torch._dynamo.reset()
    monkeypatch.setattr(QuietCall, "_is_quiet", lambda self, program: False)
    busy = trained([ROOM] * 6)
    assert not any(calls[-12:])
    assert quiet[0] == busy[0]
    assert quiet[1] == busy[1]


def test_smaller_budget_after_quiet_calls_evicts_all_that_they_wrote(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [ROOM] * 4 + ([LITTLE] * 3 + [ROOM] * 3) * 2 + [LITTLE] * 3
    losses, _, tensors = trained(memory)
    assert calls.count(True) > 8 and calls.count(False) > 12
    assert teraio.stats()["evictions"] > 20
    teraio.reset()
    torch._dynamo.reset()
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    plain = trained([ROOM] * len(memory))
    assert losses == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(tensors, plain[2], strict=True))


def test_step_with_a_recorder_has_no_quiet_call(calls: list[bool], tmp_path: Path) -> None:
    trained([ROOM] * 5, timeline=str(tmp_path / "run.timeline.json"))
    assert calls and not any(calls)


class Changing(Run):
    """A run of random programs on a fake asynchronous device. In half of the steps, the budget has room for
    all tensors."""

    calm = 0

    def _on_step(self, step: Any) -> None:
        if step is not None:
            self.engine.settle_plan(None)

    def step(self) -> None:
        little = self.budget
        if self.steps % 4 > 1:
            self.budget = little + 10_000
            self.engine.set_budget(self.budget * CELL)
        else:
            self.engine.set_budget(self.budget * CELL)
        super().step()
        self.budget = little


def test_random_programs_read_correct_bytes_with_and_without_quiet_calls(
    calls: list[bool], tmp_path: Path
) -> None:
    for seed in range(6):
        more = 0
        while True:
            one = Changing(seed, tmp_path, more=more)
            try:
                for _ in range(7):
                    one.step()
                one.steps = 0
                assert one.go() == [], f"seed {seed}"
                break
            except BudgetError:
                one.engine.fetch_all_and_close()
                more += 2
    assert calls.count(True) > 25


def test_quiet_call_makes_copies_of_written_tensors_stale(calls: list[bool], tmp_path: Path) -> None:
    one = Changing(0, tmp_path, more=10_000)
    weight = one.weights[0][0]
    x = one._made("x", 1)
    sizes = {"w0": weight.cells, "x": 1, "a": 1}
    arguments = tuple((name, sizes[name] * CELL) for name in ("w0", "x"))
    kernels = [("launch", ("f", ["x", "w0"], ["w0"])), ("make", ("a", 1)), ("launch", ("g", ["w0"], ["a"]))]
    events = with_forgets(kernels, ["a"], {"w0", "x"})
    program = Compiled(Signature("inference", arguments, ("a",), frozenset()), events, sizes)
    for _ in range(4):
        one._execute(program, {"w0": weight, "x": x})
        record = one.engine.residency.by_name["w0"]
        assert record.clean is False
        record.copied()
    assert calls[-1]
    one.engine.fetch_all_and_close()


def test_quiet_call_that_an_exception_ends_keeps_no_collected_tensors(calls: list[bool]) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.one(x))
            return self.two(h[index]).square().mean()

    torch.manual_seed(0)
    model = Fails()
    compiled: Any = torch.compile(
        model, backend="teraio", options={"inner": "eager", "warmup": 1, "planner": "greedy", "memory": ROOM}
    )
    x, index = torch.randn(BATCH, WIDTH), torch.arange(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        compiled(x, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls[-1]
    assert engine.ENGINE is not None
    quiet = engine.ENGINE.quiet_call
    with pytest.raises(IndexError):
        compiled(x, index + 1)
    assert quiet.program is None and quiet.made == []
    compiled(x, index).backward()
