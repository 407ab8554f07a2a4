"""A parameter that is stepped some rows at a time: where the update is per element, and nothing else fits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from optimizer_loops import OPTIMIZERS, Inherited
from torch import nn

import teraio
from teraio.errors import BudgetError
from teraio.runtime.engine import engine
from teraio.runtime.optimizer import trial
from teraio.runtime.optimizer.buckets import Bucket, is_bitwise_equal, make_stand_in
from teraio.runtime.optimizer.slices import largest_slice_bytes, slices_of_bucket, split_into_slices

PER_ELEMENT = [
    "AdamW",
    "AdamW foreach",
    "Adam amsgrad",
    "SGD momentum",
    "RMSprop",
    "Adagrad",
    "NAdam",
    "counter in the group",
    "inherited step",
    "closure",
]
ROWS, WIDTH = 301, 64


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


def stepped(name: str, limit_bytes: int | None) -> list[Any]:
    """Parameters, states and groups after steps, whole or in slices of so many bytes. In the third the last
    parameter has no gradient."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, 3)])
    optimizer = OPTIMIZERS[name](model)
    run = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    for step in range(4):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn_like(parameter) if number < 3 or step != 2 else None
        if limit_bytes is None:
            run(optimizer)
        else:
            step_in_slices(optimizer, limit_bytes)
    states = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    assert len(optimizer.state) <= 4, "what slices had is gone"
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [[p.data for p in model.parameters()], states, groups]


def step_in_slices(optimizer: torch.optim.Optimizer, limit_bytes: int) -> None:
    buckets = split_into_slices(optimizer.param_groups, limit_bytes)
    parts = [list[Bucket]() for _ in buckets]

    def walk() -> Any:
        for bucket, seen in zip(buckets, parts):
            for part in slices_of_bucket(optimizer, bucket):
                seen.append(part)
                yield part

    type(optimizer).step.__wrapped__(make_stand_in(optimizer, walk))  # type: ignore[attr-defined]
    for bucket, seen in zip(buckets, parts):
        if bucket.slices > 1 and bucket.parameters[0].grad is not None:
            assert max(p.nbytes for part in seen for p in part.parameters) <= largest_slice_bytes(bucket)
            assert len(seen) > bucket.slices // 2


@pytest.mark.parametrize("limit_bytes", [20_000, 1_000, 1])
@pytest.mark.parametrize("name", PER_ELEMENT)
def test_an_update_per_element_gives_the_same_bits(name: str, limit_bytes: int) -> None:
    assert is_bitwise_equal(stepped(name, limit_bytes), stepped(name, None))


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_that_it_is_one_is_seen_on_clones(name: str) -> None:
    optimizer = OPTIMIZERS[name](nn.Linear(WIDTH, ROWS))
    before = copy.deepcopy(optimizer.state_dict())
    assert trial.can_step_by_rows(optimizer)
    assert is_bitwise_equal(optimizer.state_dict(), before)


class Trusting(torch.optim.Optimizer):
    """Like LAMB and LARS: how far a parameter goes depends on its norm."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm()
                    parameter.sub_(parameter.grad * ratio, alpha=group["lr"])


def fused(parameters: Any) -> torch.optim.Optimizer:
    """On a CPU it treats the last elements of a tensor in another way; and it holds nothing besides."""
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("make", [Trusting, torch.optim.Adafactor, fused])
def test_one_that_looks_at_a_whole_parameter_is_not(make: Any) -> None:
    optimizer = make(nn.Linear(WIDTH, ROWS).parameters())
    assert trial.try_in_buckets(optimizer).reason is None
    assert not trial.can_step_by_rows(optimizer)


class Marked(torch.optim.Optimizer):
    """Marks on parameters, and their sizes, say how they are updated."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "normed_from": 10**6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                update.add_(parameter.grad)
                if getattr(parameter, "normed", False) or min(parameter.shape) >= group["normed_from"]:
                    update = update / update.norm()
                parameter.sub_(update, alpha=group["lr"] * getattr(parameter, "lr_scale", 1.0))


def marked(**marks: Any) -> list[nn.Parameter]:
    """The one that has the marks is neither the first nor the last."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((8,), (ROWS, WIDTH), (8,))]
    vars(parameters[1]).update(marks)
    return parameters


@pytest.mark.parametrize(
    ("marks", "normed_from", "by_rows"),
    [({}, 10**6, True), ({"normed": True}, 10**6, False), ({}, 32, False)],
)
def test_one_that_is_looked_at_whole_for_its_mark_or_size(
    marks: Any, normed_from: int, by_rows: bool
) -> None:
    optimizer = Marked(marked(**marks))
    optimizer.param_groups[0]["normed_from"] = normed_from
    assert trial.can_step_by_rows(optimizer) == by_rows


def test_a_parameter_of_many_dimensions_is_tried() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones((2,) * 8))])
    assert trial.try_in_buckets(optimizer).reason is None
    assert trial.can_step_by_rows(optimizer)


def test_slices_have_the_marks_of_their_parameter() -> None:
    results = []
    for step in (Marked.step, lambda optimizer: step_in_slices(optimizer, 4096)):
        torch.manual_seed(0)
        optimizer = Marked(marked(lr_scale=0.5))
        parameters = optimizer.param_groups[0]["params"]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        step(optimizer)
        results.append([parameter.detach() for parameter in parameters])
    assert is_bitwise_equal(*results)


def test_what_has_a_factor_or_a_mask_of_its_rows_is_not_cut() -> None:
    for marks, state, slices in (
        ({}, {}, 19),
        ({"mask": torch.ones(ROWS, 1)}, {}, 1),
        ({}, torch.ones(ROWS), 1),
    ):
        optimizer = Marked(marked(**marks))
        optimizer.state[optimizer.param_groups[0]["params"][1]] = {"state": state}
        buckets = split_into_slices(optimizer.param_groups, 4096, optimizer.state)
        assert [bucket.slices for bucket in buckets] == [1, slices, 1]


class Words(nn.Module):
    """Its embedding is most of it: 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4096, 256)
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(self.rows(words)).square().mean()
        return loss


def trained(memory: str | None, make: Any = torch.optim.AdamW) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Words()
    optimizer = make(model.parameters())
    options: Any = {"inner": "eager", "memory": memory, "warmup": 1} if memory else None
    compiled: Any = torch.compile(model, backend="teraio" if memory else "aot_eager", options=options)
    losses = []
    for step in range(5):
        loss = compiled(torch.arange(64) * 7 + step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if memory:
        assert teraio.stats()["overrun_bytes"] == 0
        assert teraio.stats()["step"] == 5
        assert engine.ENGINE is not None and len(engine.ENGINE.tracker.known) == 1, "all are alike"
    states = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    result = copy.deepcopy([losses, weights, states])
    teraio.reset()
    return result


def test_an_embedding_trains_where_its_update_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Weight, gradient and two states are 16 MiB; the update of all rows would hold 8 beside them."""
    with caplog.at_level(logging.INFO, "teraio"):
        ours = trained("23MiB")
    said = [r.getMessage() for r in caplog.records if "some rows at a time" in r.getMessage()]
    assert len(said) == 1 and "AdamW" in said[0]
    assert is_bitwise_equal(ours, trained(None))
    with pytest.raises(BudgetError, match="needs"):
        trained("19MiB")


def test_a_step_that_calls_the_one_it_inherits_is_tried_by_itself() -> None:
    """Torch wraps the inherited one as well, once an optimizer of that class was made."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert is_bitwise_equal(trained("23MiB", Inherited), trained(None, Inherited))


def test_where_it_cannot_be_cut_it_is_refused_as_before(nothing_left: None) -> None:
    with pytest.raises(BudgetError, match=r"Trusting.step rows.weight"):
        trained("13MiB", Trusting)
