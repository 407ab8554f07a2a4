"""Trainings in which bytes change or are read outside of any compiled program. Each training runs plainly and
under a budget.

    untold_train.py '["hooks in place", ...]'

The script prints one JSON line per scenario. The line tells whether losses, weights, states and gradients are
equal, and holds the engine's counts.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import numpy
import steady
import torch
from eager_beside import evict_all
from torch import nn, optim

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.optimizer.buckets import is_bitwise_equal

WIDTH, LAYERS, ROWS, STEPS = 192, 12, 32, 6
MIB = 2**20


def scaled(x: torch.Tensor, by: float) -> None:
    """Write to `x` without incrementing the version of `x`, as a kernel of another library does."""
    x.data.mul_(by)


OTHERS = torch.library.Library("teraio_tests_untold", "DEF")
OTHERS.define("scale_(Tensor(a!) x, float by) -> ()")
OTHERS.impl("scale_", scaled, "CPU")


class Chain(nn.Module):
    """A chain of layers. If `lends` is True, the forward also returns views of the weights."""

    lends = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        given = [layer.weight[:100] for layer in self.layers[::4]] if self.lends else []  # type: ignore[index]
        return x.square().mean(), given


# ---- optimizers


class PerParameter(optim.Optimizer):
    """An optimizer with momentum that calls a method `update` for each parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("seen", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    self.update(p, state)
                    p.sub_(state["seen"], alpha=group["lr"])

    def update(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Late(PerParameter):
    """An optimizer that changes gradients from a parameter's tenth update on. The engine's trials of
    optimizers are shorter than that.
    """

    def update(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        if state["count"] > 9:
            p.grad.data.mul_(0.5)  # type: ignore[union-attr]


class Draws(PerParameter):
    """An optimizer that draws random numbers from Python's and numpy's generators, which other code also
    uses.
    """

    def update(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        p.add_(1e-3 * random.gauss(0, 1) + 1e-3 * float(numpy.random.rand()))


class InTheGradient(PerParameter):
    """An optimizer that computes a new weight in the gradient's memory, then exchanges the memory of weight
    and gradient.
    """

    def update(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        assert p.grad is not None
        p.grad.mul_(-1e-2).add_(p)
        p.data, p.grad.data = p.grad.data, p.data


class Clips(PerParameter):
    """An optimizer that scales updates down if the norm of a group's gradients is large, as some optimizers
    do internally.
    """

    most = 50.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm().item() if gradients else 0.0
            for p in group["params"]:
                if p.grad is not None:
                    scale = min(1.0, self.most / (norm + 1e-6)) if self.most else 1.0
                    self.state[p].setdefault("seen", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=scale)
                    p.sub_(self.state[p]["seen"], alpha=group["lr"])


# ---- user code of the scenarios


class Run:
    def __init__(self, scenario: str, memory: int) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.model = Chain().requires_grad_(scenario != "views of frozen weights")
        self.parameters = list(self.model.parameters())
        make = OPTIMIZERS.get(scenario, lambda parameters: optim.AdamW(parameters, lr=1e-3))
        self.optimizer = make(self.parameters)
        self.seen: list[Any] = []
        self.held: Any = None
        FIRST.get(scenario, lambda run: None)(self)
        options: dict[str, Any] = {
            "inner": "eager",
            "warmup": 1,
            "planning": "inline",
            **({"memory": memory} if memory else {}),
        }
        self.compiled: Any = torch.compile(self.model, backend="teraio", options=options, dynamic=False)

    def train(self, scenario: str) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        for step in range(2 * STEPS):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            self.model.lends = scenario == "views of frozen weights" and step % 3 == 2
            loss, views = self.compiled(x)
            self.seen.append(loss.item())
            for view in views:
                view.data.mul_(0.9)
            if scenario == "views of frozen weights":
                continue
            scaled_loss = loss * SCALE.get(scenario, 1.0)
            with BACKWARD.get(scenario, contextlib.nullcontext)():
                scaled_loss.backward()
            del loss, scaled_loss, views
            BEFORE.get(scenario, lambda run, step: None)(self, step)
            self.optimizer.step()
            AFTER.get(scenario, lambda run, step: self.optimizer.zero_grad())(self, step)
        states = [dict(self.optimizer.state.get(p, {})) for p in self.parameters]
        own = [[p.detach().clone(), None if p.grad is None else p.grad.clone()] for p in self.parameters]
        return [self.seen, own, states, random.random(), float(numpy.random.rand())]


def leaves() -> None:
    """Evict every evictable tensor, as if memory were needed."""
    if engine.ENGINE is not None:
        evict_all()


def reads_gradients(run: Run, step: int) -> None:
    leaves()
    run.seen += [p.grad.abs().sum().item() for p in run.parameters if p.grad is not None]
    run.optimizer.zero_grad()


def reads_weights(run: Run, step: int) -> None:
    leaves()
    run.seen += [p.detach().norm().item() for p in run.parameters]
    reads_gradients(run, step)


def hooks_in_place(run: Run) -> None:
    """Register hooks before any program exists. The hooks change in place the gradients that programs
    make.
    """
    for number, parameter in enumerate(run.parameters):
        if number % 3 == 0:
            parameter.register_hook(lambda gradient: torch.nan_to_num_(gradient).clamp_(-1e-5, 1e-5))
        elif number % 3 == 1:
            mask = (torch.arange(parameter.numel()).view_as(parameter) % 2).float()
            parameter.register_hook(lambda gradient, mask=mask: gradient.mul_(mask))
        else:
            torch.autograd.graph.register_multi_grad_hook([parameter], lambda given: given[0].mul_(0.5))


def hooks_on_the_step(run: Run) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in run.parameters:
            parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]

    run.optimizer.register_step_pre_hook(halve)


def counts_together(run: Run, step: int) -> None:
    """Share one step counter among all parameters. The engine then steps the optimizer whole, and not in
    buckets.
    """
    states = [*run.optimizer.state.values()]
    for state in states:
        state["step"] = states[0]["step"]
    leaves()


def others_operator(run: Run, step: int) -> None:
    leaves()
    for parameter in run.parameters[::2]:
        torch.ops.teraio_tests_untold.scale_(parameter.grad, 0.5)
        torch.ops.teraio_tests_untold.scale_.default(parameter.detach(), 0.999)
    leaves()


def gives_an_address(run: Run, step: int) -> None:
    """Give a gradient's address to another library by DLPack. The library keeps using the address."""
    if step == 3:
        run.held = torch.from_dlpack(run.parameters[0].grad)
    if run.held is not None:
        run.held.mul_(0.5)
        run.seen.append(run.held.sum().item())


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "writes gradients late": Late,
    "draws numbers": Draws,
    "new weights in the gradients": InTheGradient,
    "clips if they are large": Clips,
}
FIRST: dict[str, Callable[[Run], None]] = {
    "hooks in place": hooks_in_place,
    "hooks on a whole step": hooks_on_the_step,
}
BEFORE: dict[str, Callable[[Run, int], None]] = {
    "writes gradients late": lambda run, step: leaves(),
    "hooks on a whole step": counts_together,
    "an operator of others": others_operator,
    "an address": gives_an_address,
}
AFTER: dict[str, Callable[[Run, int], None]] = {
    "writes gradients late": reads_gradients,
    "new weights in the gradients": reads_weights,
    "hooks on a whole step": reads_gradients,
    "an address": lambda run, step: run.optimizer.zero_grad(set_to_none=False),
}
BACKWARD: dict[str, Callable[[], Any]] = {"a backward in inference mode": torch.inference_mode}
SCALE = {"clips if they are large": 1e3}
# Budgets in bytes. teraio reserves 4 MiB of each budget. Weights, gradients and Adam's states take 6.8 MiB.
BUDGET = {
    "views of frozen weights": int(5.5 * MIB),
    "new weights in the gradients": int(7.85 * MIB),
    "hooks on a whole step": 16 * MIB,
    "clips if they are large": 16 * MIB,
}
USUAL = int(6.5 * MIB)
SCENARIOS = (
    "hooks in place",
    "views of frozen weights",
    "writes gradients late",
    "draws numbers",
    "new weights in the gradients",
    "clips if they are large",
    "hooks on a whole step",
    "an operator of others",
    "an address",
    "a backward in inference mode",
)


def compare(scenario: str) -> dict[str, Any]:
    with patch.dict("os.environ", {"TERAIO_DISABLE": "1"}):
        expected = Run(scenario, 0).train(scenario)
    run = Run(scenario, BUDGET.get(scenario, USUAL))
    found = run.train(scenario)
    counts = {name: count for name, count in teraio.stats().items() if isinstance(count, int)}
    teraio.reset()
    return {"same": is_bitwise_equal(expected, found), "counts": counts}


def main() -> None:
    torch.set_num_threads(1)
    steady.plans()
    for scenario in json.loads(sys.argv[1]):
        print(json.dumps({"scenario": scenario, **compare(scenario)}), flush=True)


if __name__ == "__main__":
    main()
