"""Training loops with optimizers of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strangers.case import Compile
from strangers.loops_parts import Perceptron, Words, fit, next_word, rows, texts

Loop = Callable[[Compile], Iterable[Any]]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


def muon(compile: Compile) -> Iterable[Any]:
    """Train matrices by Muon, and all other parameters by the Adam that Muon's library includes."""
    from muon import SingleDeviceMuonWithAuxAdam

    model = compile(Perceptron(width=128))
    groups = [
        {"params": matrices(model), "use_muon": True, "lr": 0.02},
        {"params": vectors(model), "use_muon": False, "lr": 1e-3},
    ]
    optimizer = SingleDeviceMuonWithAuxAdam(groups)
    yield from (*fit(model, optimizer), model, optimizer)


def torch_muon(compile: Compile) -> Iterable[Any]:
    """Train matrices by torch's Muon and all other parameters by AdamW, so that two optimizers step."""
    model = compile(Perceptron(width=128))
    optimizers = torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(vectors(model), lr=1e-3)
    for x, y in rows():
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()
    yield from (model, *optimizers)


def schedule_free(compile: Compile, name: str) -> Iterable[Any]:
    """Train with a schedule-free optimizer, whose train() and eval() change the weights."""
    import schedulefree

    model = compile(Perceptron())
    optimizer = getattr(schedulefree, name)(model.parameters(), lr=0.01, warmup_steps=2)
    for _ in range(3):
        model.train()
        optimizer.train()
        yield from fit(model, optimizer, 3)
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            yield from (functional.cross_entropy(model(x), y).item() for x, y in rows(2, seed=7))
    yield from (model, optimizer)


def schedule_free_closure(compile: Compile) -> Iterable[Any]:
    import schedulefree

    model = compile(Perceptron())
    optimizer = schedulefree.AdamWScheduleFreeClosure(model.parameters(), lr=0.01)
    for x, y in rows():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        yield optimizer.step(closure).item()
    yield from (model, optimizer)


def eight_bits(compile: Compile, library: str, name: str) -> Iterable[Any]:
    """Train with optimizer states of 4 or 8 bits per element, by torchao or bitsandbytes."""
    import importlib

    make = getattr(importlib.import_module(library), name)
    model = compile(Words(width=128))
    optimizer = make(model.parameters(), lr=1e-3)
    for text in texts():
        loss = next_word(model(text), text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    yield from (model, [state for _, state in sorted(plain(optimizer).items())])


def plain(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer states that are plain tensors. States of a tensor subclass are left out."""
    return {
        f"{number}.{name}": value
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)
    }


def collected(compile: Compile, name: str, **given: Any) -> Iterable[Any]:
    """Train with an optimizer from the library pytorch_optimizer."""
    import pytorch_optimizer

    model = compile(Perceptron(width=128))
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), **{"lr": 1e-2} | given)
    yield from (*fit(model, optimizer, 7), model, optimizer)


def lookahead(compile: Compile) -> Iterable[Any]:
    import pytorch_optimizer

    model = compile(Perceptron())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer: Any = pytorch_optimizer.Lookahead(inner, k=2, alpha=0.5)
    yield from (*fit(model, optimizer, 7), model, inner)


def sharpness_aware(compile: Compile) -> Iterable[Any]:
    """Run forward and backward twice in each step. The second pass uses weights moved to the highest loss
    nearby (SAM).
    """
    import pytorch_optimizer

    model = compile(Perceptron())
    optimizer = pytorch_optimizer.SAM(
        model.parameters(), base_optimizer=torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9
    )
    for x, y in rows():
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        functional.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        yield loss.item()
    yield from (model, optimizer.base_optimizer)


class SharpnessAware(torch.optim.Optimizer):
    """The implementation of SAM that users copy most often."""

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **given: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **given})
        self.base = base(self.param_groups, **given)
        self.param_groups = self.base.param_groups
        for group in self.param_groups:
            group["rho"] = rho

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([grad.norm(p=2) for grad in grads]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


def sharpness_aware_copied(compile: Compile) -> Iterable[Any]:
    """Train with `SharpnessAware`, whose second step restores each parameter's bytes by `p.data = old`."""
    model = compile(Perceptron())
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for x, y in rows():
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step()
        functional.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        yield loss.item()
    yield from (model, optimizer.base)


BITS = (
    ("torchao.optim", "AdamW8bit"),
    ("torchao.optim", "AdamW4bit"),
    ("bitsandbytes.optim", "AdamW8bit"),
    ("bitsandbytes.optim", "Lion8bit"),
    ("bitsandbytes.optim", "AdEMAMix8bit"),
)
COLLECTED: dict[str, dict[str, Any]] = {
    "LARS": {},
    "Lamb": {},
    "Lion": {"lr": 1e-3},
    "SOAP": {},
    "Shampoo": {},
    "Adan": {},
    "Prodigy": {"lr": 1.0},
    "CAME": {},
    "AdEMAMix": {},
    "Ranger21": {"num_iterations": 10},
    "StableSPAM": {},
}
LOOPS: dict[str, Loop] = {
    "muon": muon,
    "torch_muon": torch_muon,
    "schedule_free_adamw": partial(schedule_free, name="AdamWScheduleFree"),
    "schedule_free_sgd": partial(schedule_free, name="SGDScheduleFree"),
    "schedule_free_closure": schedule_free_closure,
    "lookahead": lookahead,
    "sharpness_aware": sharpness_aware,
    "sharpness_aware_copied": sharpness_aware_copied,
    **{f"{library}.{name}": partial(eight_bits, library=library, name=name) for library, name in BITS},
    **{f"collected_{name}": partial(collected, name=name, **given) for name, given in COLLECTED.items()},
}
