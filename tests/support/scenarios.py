"""Scenarios of things that people do with a model besides a plain loop.

Each scenario is a function that trains models compiled by `run.compile`, and records values. The recorded
values of a run with a budget must equal the recorded values of a run without a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, BLOCKS, ROWS = 128, 384, 3, 1024


class Run:
    """One run of a scenario: the options of its compilations, and its recorded values."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.seen: list[Any] = []
        self.generator = torch.Generator().manual_seed(1)
        torch.manual_seed(0)

    def compile(self, target: Any, **more: Any) -> Any:
        return torch.compile(target, backend="teraio", options=self.options, **more)

    def batch(self, rows: int = ROWS) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=self.generator)

    def see(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                assert value.isfinite().all(), "a NaN cannot be compared"
            self.seen.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)

    def see_model(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.see(parameter)
            if parameter.grad is not None:
                self.see(parameter.grad)

    def step(self, model: nn.Module, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        loss.backward()
        self.see(loss)
        self.see_model(model)
        optimizer.step()
        optimizer.zero_grad()

    def loop(self, model: nn.Module, compiled: Any, rows: tuple[int, ...] = (ROWS,) * 4) -> None:
        optimizer = sgd(model)
        for each in rows:
            self.step(model, compiled(self.batch(each)).square().mean(), optimizer)

    def fails(self, action: Callable[[], Any]) -> None:
        """Check that the action raises an exception, and record the exception."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  the comparison shows wrong errors
            self.see(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        raise AssertionError("the action does not raise")


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """A model of three blocks. The function `between` runs after each block."""

    def __init__(self, between: Callable[[torch.Tensor, nn.Module], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                x = self.between(x, block)
        return x


SCENARIOS: dict[str, Callable[[Run], None]] = {}


def scenario(does: Callable[[Run], None]) -> Callable[[Run], None]:
    SCENARIOS[does.__name__.replace("_", " ")] = does
    return does


def with_between(between: Callable[[torch.Tensor, nn.Module], torch.Tensor]) -> Callable[[Run], None]:
    """Return a scenario. Its training loop trains a model that calls `between` after each block."""

    def does(run: Run) -> None:
        model = Net(between)
        run.loop(model, run.compile(model))
        run.see(torch.get_rng_state())

    does.__name__ = between.__name__
    scenario(does)
    return does
