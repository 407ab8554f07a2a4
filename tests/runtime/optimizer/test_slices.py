"""Optimizer steps that update a parameter in slices of rows.

A parameter is updated in slices under two conditions: (1) the optimizer updates each element alone, and (2)
an update of the whole parameter does not fit in memory.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
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
    """Return parameters, states and groups after four steps.

    With a `limit_bytes`, each step updates slices of at most this size. Otherwise each step updates whole
    parameters. In the third step the last parameter has no gradient.
    """
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
    assert len(optimizer.state) <= 4, "states of slices are left"
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
def test_update_per_element_in_slices_gives_the_same_bits(name: str, limit_bytes: int) -> None:
    assert is_bitwise_equal(stepped(name, limit_bytes), stepped(name, None))


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_trial_accepts_rows_for_an_update_per_element(name: str) -> None:
    optimizer = OPTIMIZERS[name](nn.Linear(WIDTH, ROWS))
    before = copy.deepcopy(optimizer.state_dict())
    assert trial.can_step_by_rows(optimizer)
    assert is_bitwise_equal(optimizer.state_dict(), before)


class Trusting(torch.optim.Optimizer):
    """An optimizer like LAMB and LARS, whose update of a parameter depends on the parameter's norm."""

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
    """Return an AdamW optimizer with fused kernels.

    On a CPU, fused kernels treat the last elements of a tensor differently from the other elements. They
    allocate no temporaries.
    """
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("make", [Trusting, torch.optim.Adafactor, fused])
def test_trial_refuses_rows_for_an_update_of_whole_parameters(make: Any) -> None:
    optimizer = make(nn.Linear(WIDTH, ROWS).parameters())
    assert trial.try_in_buckets(optimizer).reason is None
    assert not trial.can_step_by_rows(optimizer)


class Marked(torch.optim.Optimizer):
    """An optimizer whose update depends on attributes and sizes of the parameters."""

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
    """Return three parameters, and set the given attributes on the middle one."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((8,), (ROWS, WIDTH), (8,))]
    vars(parameters[1]).update(marks)
    return parameters


@pytest.mark.parametrize(
    ("marks", "normed_from", "by_rows"),
    [({}, 10**6, True), ({"normed": True}, 10**6, False), ({}, 32, False)],
)
def test_trial_of_rows_finds_rules_for_attributes_and_sizes(
    marks: Any, normed_from: int, by_rows: bool
) -> None:
    optimizer = Marked(marked(**marks))
    optimizer.param_groups[0]["normed_from"] = normed_from
    assert trial.can_step_by_rows(optimizer) == by_rows


def test_trial_accepts_a_parameter_of_many_dimensions() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones((2,) * 8))])
    assert trial.try_in_buckets(optimizer).reason is None
    assert trial.can_step_by_rows(optimizer)


def test_slices_have_the_attributes_of_their_parameter() -> None:
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


def test_parameter_with_a_mask_or_a_state_per_row_is_not_sliced() -> None:
    for marks, state, slices in (
        ({}, {}, 19),
        ({"mask": torch.ones(ROWS, 1)}, {}, 1),
        ({}, torch.ones(ROWS), 1),
    ):
        optimizer = Marked(marked(**marks))
        optimizer.state[optimizer.param_groups[0]["params"][1]] = {"state": state}
        buckets = split_into_slices(optimizer.param_groups, 4096, optimizer.state)
        assert [bucket.slices for bucket in buckets] == [1, slices, 1]


def test_parameter_with_a_sparse_gradient_is_not_sliced() -> None:
    parameter = nn.Parameter(torch.ones(ROWS, 64))
    groups = torch.optim.SGD([parameter], lr=0.1).param_groups
    assert split_into_slices(groups, 4096)[0].slices > 1
    parameter.grad = torch.ones(ROWS, 64).to_sparse()
    assert split_into_slices(groups, 4096)[0].slices == 1


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_slices_raise_versions_like_a_whole_update(make: Any) -> None:
    versions = []
    for limit_bytes in (2**30, 1024):
        parameter = nn.Parameter(torch.ones(ROWS, 64))
        optimizer = make([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)

            def walk(real: torch.optim.Optimizer = optimizer, limit: int = limit_bytes) -> Iterator[Bucket]:
                for bucket in split_into_slices(real.param_groups, limit, real.state):
                    yield from slices_of_bucket(real, bucket)

            type(optimizer).step.__wrapped__(make_stand_in(optimizer, walk))
        states = optimizer.state[parameter].values()
        versions.append([parameter._version, *(state._version for state in states)])
    assert versions[0] == versions[1]


class Words(nn.Module):
    """A model that consists mostly of its embedding of 4 MiB."""

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
        assert engine.ENGINE is not None and len(engine.ENGINE.tracker.known) == 1, "steps differ"
    states = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    result = copy.deepcopy([losses, weights, states])
    teraio.reset()
    return result


def test_embedding_trains_in_slices_if_its_whole_update_does_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Train an embedding whose weight, gradient and two states take 16 MiB together. An update of all rows
    needs 8 MiB more."""
    with caplog.at_level(logging.INFO, "teraio"):
        ours = trained("23MiB")
    lines = [r.getMessage() for r in caplog.records if "some rows at a time" in r.getMessage()]
    assert len(lines) == 1 and "AdamW" in lines[0]
    assert is_bitwise_equal(ours, trained(None))
    with pytest.raises(BudgetError, match="needs"):
        trained("19MiB")


def test_step_that_calls_its_inherited_step_has_a_trial_of_its_own() -> None:
    """Train with a subclass of AdamW whose step calls the inherited step.

    When the first AdamW optimizer is made, torch wraps `AdamW.step`. The subclass then inherits the wrapped
    step.
    """
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert is_bitwise_equal(trained("23MiB", Inherited), trained(None, Inherited))


def test_budget_too_small_for_an_update_without_slices_is_refused(nothing_left: None) -> None:
    with pytest.raises(BudgetError, match=r"Trusting.step rows.weight"):
        trained("13MiB", Trusting)
