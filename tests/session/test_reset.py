"""Tests of `model.compile`, which works like `torch.compile`, and of `torch._dynamo.reset()`.

A reset fetches all tensors, and ends teraio's session, the object that holds the state of the run.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError

import teraio
from teraio.errors import BudgetError
from teraio.formats.schedule import Schedule, Slot
from teraio.runtime.engine import engine
from teraio.runtime.step.program import Program
from teraio.session import session

WIDTH, LAYERS, BATCH = 256, 8, 1024
# Activations take 16 MiB, weights 2 MiB and gradients 2 MiB. teraio reserves 4 MiB for other memory.
OPTIONS: dict[str, Any] = {"inner": "eager", "memory": 14 * 2**20, "planner": "none"}


pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """A model with its own class. For a model whose class is from torch.nn, `model.compile` compiles nothing,
    with any backend."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def step(compiled: Any, number: int) -> list[torch.Tensor]:
    """Run one step. Return its loss and all gradients."""
    loss = compiled(batch(number)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in compiled.parameters()]
    compiled.zero_grad()
    return [loss.detach(), *gradients]


def plainly(number: int) -> list[torch.Tensor]:
    """Run one step of a new model under TERAIO_DISABLE=1, so that teraio compiles the model but moves no
    tensor. Return the loss and all gradients."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERAIO_DISABLE", "1")
        expected = step(torch.compile(model(), backend="teraio", options={"inner": "eager"}), number)
    torch._dynamo.reset()
    return expected


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 2 * LAYERS and all(map(torch.equal, one, other))


def moved() -> bool:
    return bool(teraio.stats()["evictions"] > 3)


def test_model_compile_method_moves_tensors_and_keeps_numbers() -> None:
    expected = plainly(1)
    compiled = model()
    compiled.compile(backend="teraio", options=OPTIONS)
    assert same(step(compiled, 1), expected)
    assert moved()


def test_torch_compile_moves_tensors_and_keeps_numbers() -> None:
    expected = plainly(1)
    assert same(step(torch.compile(model(), backend="teraio", options=OPTIONS), 1), expected)
    assert moved()


def test_typed_options_are_accepted_like_a_dict() -> None:
    asked = teraio.Options(memory=14 * 2**20, inner="eager", planner="none")
    assert same(step(torch.compile(model(), backend="teraio", options=asked), 1), plainly(1))
    torch._dynamo.reset()
    step(torch.compile(model(), backend="teraio", options=asked), 1)
    assert session.SESSION is not None and session.SESSION.options.planner == "none"


def test_dynamo_reset_resets_session() -> None:
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    first = step(compiled, 1)
    assert moved()
    torch._dynamo.reset()
    assert session.SESSION is None
    assert engine.ENGINE is None
    assert teraio.stats() == {}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in compiled.parameters())
    # A new model of the same class is compiled with another budget, independently of the first compile.
    again = torch.compile(model(), backend="teraio", options={**OPTIONS, "memory": 15 * 2**20})
    assert same(step(again, 1), first)
    assert moved()
    assert session.SESSION is not None
    assert teraio.stats()["budget_bytes"] == 15 * 2**20


def test_each_dynamo_reset_resets_session() -> None:
    """A reset makes Dynamo forget its backends.

    The compiled model is used again after the reset, which starts a new session. The next reset must end this
    session too.
    """
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    for _ in range(3):
        step(compiled, 1)
        assert session.SESSION is not None
        torch._dynamo.reset()
        assert session.SESSION is None


def test_reset_before_backward_fetches_activations() -> None:
    expected = plainly(1)
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    loss = compiled(batch(1)).square().mean()
    assert moved()
    torch._dynamo.reset()
    loss.backward()
    gradients = [p.grad for p in compiled.parameters()]
    assert same([loss.detach(), *gradients], expected)


@pytest.mark.parametrize("allocator", [False, True])
def test_reset_without_enough_memory_raises_and_training_goes_on(allocator: bool) -> None:
    """With `allocator`, the allocator fails after three fetches. Without it, the engine detects the lack of
    memory before any fetch."""
    expected = plainly(1)
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    loss = compiled(batch(1)).square().mean()
    running = engine.ENGINE
    assert running is not None
    with pytest.MonkeyPatch.context() as patched:
        if allocator:
            patched.setattr(
                running.mover.device, "begin_copy_in", fetches(3, running.mover.device.begin_copy_in)
            )
        else:
            patched.setattr(running.mover.device, "default_budget_bytes", lambda: 2**20)
        with pytest.raises(BudgetError) as refused:
            teraio.reset()
    text = str(refused.value)
    assert re.search(r"[0-9.]+ MiB\) cannot all be fetched: the device has [0-9.]+ [MG]iB free", text), text
    assert ("can't allocate memory" in text) is allocator
    assert "del model, optimizer" in text
    assert session.SESSION is not None
    assert engine.ENGINE is running
    assert teraio.stats()["resident_bytes"] <= OPTIONS["memory"]
    loss.backward()
    assert same([loss.detach(), *[p.grad for p in compiled.parameters()]], expected)
    compiled.zero_grad()
    teraio.reset()
    assert session.SESSION is None


def fetches(count: int, begin: Any) -> Any:
    """Return a function that begins a fetch by `begin`, at most `count` times.

    Every later call raises the allocator's error for lack of memory.
    """
    left = iter(range(count))

    def fetch(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return begin(*arguments)

    return fetch


def test_failed_compile_unregisters_its_program_collector() -> None:
    """During a compile, a collector (a callback) gets each loaded program. After a failed compile, the
    collector gets no programs."""
    met: list[Program] = []
    with (
        engine.collect_loaded_programs(met.append),
        suppress(ValueError),
        engine.collect_loaded_programs(lambda program: None),
    ):
        raise ValueError("a compilation fails")
    text = Schedule("forward", (), (Slot("enter", (), (), 0),)).as_json_text
    engine.program(text)
    assert met == []


def test_error_at_end_of_compile_keeps_next_compile_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compile with another backend ends with a BudgetError, as if memory had no room for all weights.

    A program of another backend may read all weights. The next compile with teraio must still work.
    """

    def no_room() -> None:
        raise BudgetError("no room")

    expected = plainly(1)
    ours, other = model(), nn.Linear(4, 4)
    assert same(step(torch.compile(ours, backend="teraio", options=OPTIONS), 1), expected)
    assert session.WATCH is not None
    with monkeypatch.context() as patched:
        patched.setattr(session.WATCH, "foreign", no_room)
        with pytest.raises(InternalTorchDynamoError, match="BudgetError: no room"):
            torch.compile(other, backend="aot_eager")(torch.ones(4))
    assert same(step(torch.compile(ours, backend="teraio", options=OPTIONS, dynamic=True), 1), expected)
    torch._dynamo.reset()
