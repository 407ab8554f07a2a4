"""Promises about the two ways to compile and about forgetting: `model.compile` is `torch.compile`, and after
`torch._dynamo.reset()` nothing of ours is left and everything is where it was."""

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
# 16 MiB of activations, 2 of weights, 2 of gradients; 4 of reserve.
OPTIONS: dict[str, Any] = {"inner": "eager", "memory": 14 * 2**20, "planner": "none"}


pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Of a class of its own: of torch.nn's, `compile` compiles nothing, whatever the backend."""

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
    """The loss and all gradients of one step."""
    loss = compiled(batch(number)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in compiled.parameters()]
    compiled.zero_grad()
    return [loss.detach(), *gradients]


def plainly(number: int) -> list[torch.Tensor]:
    """By the same inner program without slots, with any memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERAIO_DISABLE", "1")
        expected = step(torch.compile(model(), backend="teraio", options={"inner": "eager"}), number)
    torch._dynamo.reset()
    return expected


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 2 * LAYERS and all(map(torch.equal, one, other))


def moved() -> bool:
    return bool(teraio.stats()["evictions"] > 3)


def test_a_model_compiles_itself() -> None:
    expected = plainly(1)
    compiled = model()
    compiled.compile(backend="teraio", options=OPTIONS)
    assert same(step(compiled, 1), expected)
    assert moved()


def test_torch_compile_gives_the_same() -> None:
    expected = plainly(1)
    assert same(step(torch.compile(model(), backend="teraio", options=OPTIONS), 1), expected)
    assert moved()


def test_the_typed_options_are_taken_in_place_of_the_dict() -> None:
    asked = teraio.Options(memory=14 * 2**20, inner="eager", planner="none")
    assert same(step(torch.compile(model(), backend="teraio", options=asked), 1), plainly(1))
    torch._dynamo.reset()
    step(torch.compile(model(), backend="teraio", options=asked), 1)
    assert session.SESSION is not None and session.SESSION.options.planner == "none"


def test_a_reset_of_dynamo_resets_us() -> None:
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    first = step(compiled, 1)
    assert moved()
    torch._dynamo.reset()
    assert session.SESSION is None
    assert engine.ENGINE is None
    assert teraio.stats() == {}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in compiled.parameters())
    # The same model, with another budget: it is compiled anew, and knows nothing of the first.
    again = torch.compile(model(), backend="teraio", options={**OPTIONS, "memory": 15 * 2**20})
    assert same(step(again, 1), first)
    assert moved()
    assert session.SESSION is not None
    assert teraio.stats()["budget_bytes"] == 15 * 2**20


def test_a_reset_is_heard_every_time() -> None:
    """Dynamo forgets its backends at a reset, also the one of a model that is used on."""
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    for _ in range(3):
        step(compiled, 1)
        assert session.SESSION is not None
        torch._dynamo.reset()
        assert session.SESSION is None


def test_a_reset_between_forward_and_backward_brings_the_activations_back() -> None:
    expected = plainly(1)
    compiled: Any = torch.compile(model(), backend="teraio", options=OPTIONS)
    loss = compiled(batch(1)).square().mean()
    assert moved()
    torch._dynamo.reset()
    loss.backward()
    gradients = [p.grad for p in compiled.parameters()]
    assert same([loss.detach(), *gradients], expected)


@pytest.mark.parametrize("allocator", [False, True])
def test_what_does_not_fit_when_it_comes_back_is_an_error_and_the_training_goes_on(allocator: bool) -> None:
    """Seen before anything is fetched, or only by the allocator, after some of it came."""
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
    assert re.search(r"[0-9.]+ MiB are away, [0-9.]+ [MG]iB can be had", text), text
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
    """As many as that; then memory is used up."""
    left = iter(range(count))

    def fetch(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return begin(*arguments)

    return fetch


def test_a_failed_compilation_leaves_nothing_registered() -> None:
    """Whom programs report to is known as long as a compilation goes on, however it ends."""
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


def test_an_error_at_the_end_of_a_compile_is_over_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another compiler's program may read all weights, and they may find no room."""

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
