"""Trainings whose optimizer steps on the host. User code runs between the steps and around them.

RAM stands in for a device that has its own memory.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import teraio

MIB = 2**20
WIDTH, LAYERS, BATCH, STEPS = 128, 6, 512, 6
OPTIONS: dict[str, Any] = {
    "inner": "eager",
    "memory": 6 * MIB,
    "warmup": 1,
    "planning": "inline",
    "optimizer_step": "host",
}

Optimizer = torch.optim.Optimizer


class Chain(nn.Module):
    def __init__(self, dtype: torch.dtype, flat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        ).to(dtype)
        if flat:  # make the weights views of one tensor
            parameters = [p for p in self.parameters() if p.ndim > 1]
            joined = torch.cat([p.detach().reshape(-1) for p in parameters])
            parts = joined.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts):
                parameter.data = part.view_as(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


@dataclass
class Training:
    """A training. `after` is called at the end of each step."""

    make: Callable[[Any], Optimizer]
    after: Callable[[Training], None] = lambda training: None
    backwards: int = 1
    batch: int = BATCH
    dtype: torch.dtype = torch.float32
    flat: bool = False
    model: Any = None
    optimizer: Any = None
    number: int = 0
    seen: list[Any] = field(default_factory=list)  # losses, and values that the loop's user code reads

    def run(self, **options: Any) -> dict[str, Any]:
        torch._dynamo.reset()
        self.model, self.seen = Chain(self.dtype, self.flat), []
        self.optimizer = self.make(self.model)
        call: Any = torch.compile(self.model, backend="teraio", options={**OPTIONS, **options})
        for self.number in range(STEPS):
            for part in range(self.backwards):
                random = torch.Generator().manual_seed(10 * self.number + part)
                loss = call(torch.randn(self.batch, WIDTH, generator=random).to(self.dtype))
                loss.backward()
                self.seen.append(loss.item())
            self.step()
            self.after(self)
            self.optimizer.zero_grad()
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        result = {
            "seen": self.seen,
            "weights": [parameter.detach().clone() for parameter in self.model.parameters()],
            "states": [v.clone() for v in states if isinstance(v, torch.Tensor)],
        }
        teraio.reset()
        return result

    def step(self) -> None:
        self.optimizer.step()


class Scaled(Training):
    """A training with a GradScaler. The GradScaler skips step number 2, because a gradient is infinite."""

    def run(self, **options: Any) -> dict[str, Any]:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.scaler.scale(torch.zeros(()))
        return super().run(**options)

    def step(self) -> None:
        if self.number == 2:
            self.model.layers[0].weight.grad[0, 0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Closed(Training):
    def step(self) -> None:
        self.optimizer.step(lambda: None)


class Compiled(Training):
    def step(self) -> None:
        torch.compile(self.optimizer.step, backend="eager")()


def adamw(model: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def groups(model: Any) -> Optimizer:
    """Make parameter groups with different options. Some parameters get no gradient, and one weight is not
    contiguous.
    """
    parameters = [*model.parameters()]
    parameters[2].requires_grad_(False)
    parameters[4].data = parameters[4].data.t().contiguous().t()
    listed: Any = [{"params": parameters[:6], "lr": 0.02, "weight_decay": 0.1}, {"params": parameters[6:]}]
    return torch.optim.Adam(listed, lr=torch.tensor(0.01), amsgrad=True, maximize=True, fused=True)


def clip(training: Training) -> None:
    """Clip the gradients of the step that has just ended. The gradients of the next step do not exist yet."""
    training.seen.append(nn.utils.clip_grad_norm_(training.model.parameters(), 0.1).item())


def look(training: Training) -> None:
    """Read a state, a weight and a gradient, then all states together."""
    weight = training.model.layers[4].weight
    state = training.optimizer.state[weight]
    training.seen += [weight.sum().item(), weight.grad.norm().item(), state["exp_avg"].abs().max().item()]
    training.seen.append(sum(s["exp_avg_sq"].sum().item() for s in training.optimizer.state.values()))


def write(training: Training) -> None:
    """Write to weights and states in the ways in which users do."""
    with torch.no_grad():
        first, second = training.model.layers[0].weight, training.model.layers[2].weight
        first.mul_(0.99)
        second.data.copy_(second.data * 1.01)
        training.optimizer.state[first]["exp_avg"].mul_(0.5)
        training.model.layers[6].weight.data = training.model.layers[6].weight.data.clone()


def hold(training: Training) -> None:
    """Keep views of a state and of a weight. Read and write through these views in later steps."""
    weight = training.model.layers[2].weight
    if training.number == 2:
        training.view = training.optimizer.state[weight]["exp_avg"].view(-1)  # type: ignore[attr-defined]
        training.row = weight.detach()[3]  # type: ignore[attr-defined]
    if training.number > 2:
        training.seen.append(training.view.sum().item())  # type: ignore[attr-defined]
        training.row.add_(0.01)  # type: ignore[attr-defined]


def save_and_load(training: Training) -> None:
    """Save the model and the optimizer to bytes, and load them, in the middle of the training."""
    if training.number == 3:
        data = io.BytesIO()
        torch.save([training.model.state_dict(), training.optimizer.state_dict()], data)
        data.seek(0)
        model, optimizer = torch.load(data)
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)


def another(training: Training) -> None:
    """Copy the optimizer's states to a new optimizer, and continue with the new optimizer."""
    if training.number == 2:
        states = copy.deepcopy(training.optimizer.state_dict())
        training.optimizer = adamw(training.model)
        training.optimizer.load_state_dict(states)


def share(training: Training) -> None:
    """Make two parameters' states share one tensor."""
    if training.number == 0:
        states = [training.optimizer.state[layer.weight] for layer in training.model.layers[:4:2]]
        states[0]["exp_avg"] = states[1]["exp_avg"]


LOOPS: dict[str, Callable[[], Training]] = {
    "AdamW": lambda: Training(adamw),
    "small batches": lambda: Training(adamw, batch=32),
    "bfloat16": lambda: Training(adamw, dtype=torch.bfloat16),
    "views of one tensor": lambda: Training(adamw, flat=True),
    "groups": lambda: Training(groups),
    "SGD": lambda: Training(
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    ),
    "Adagrad": lambda: Training(lambda m: torch.optim.Adagrad(m.parameters(), fused=True)),
    "accumulates and clips": lambda: Training(adamw, clip, backwards=3),
    "looks": lambda: Training(adamw, look),
    "writes": lambda: Training(adamw, write),
    "holds": lambda: Training(adamw, hold),
    "saves and loads": lambda: Training(adamw, save_and_load),
    "another optimizer": lambda: Training(adamw, another),
    "shares": lambda: Training(adamw, share),
    "scales": lambda: Scaled(adamw),
    "has a closure": lambda: Closed(adamw),
    "is compiled": lambda: Compiled(lambda m: torch.optim.AdamW(m.parameters(), foreach=True)),
    "no states": lambda: Training(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True)),
    "not torch's own": lambda: Training(
        lambda m: type("Own", (torch.optim.AdamW,), {})(m.parameters(), fused=True)
    ),
}
# Loops whose optimizer does not step on the host, with the reason that the engine logs.
ON_DEVICE = {
    "has a closure": "its step has a closure",
    "is compiled": "it steps all parameters at once",
    "no states": "",
    "not torch's own": "torch has fused CPU kernels only for these classes",
    "shares": "it steps all parameters at once",
    "scales": "a GradScaler leaves unscaling",
}
