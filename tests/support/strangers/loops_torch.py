"""Training loops with torch's own features: checkpoints, parametrizations, averages, mixed precision."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from strangers.case import Compile
from strangers.loops_parts import (
    Convolutions,
    Perceptron,
    fit,
    images,
    rows,
)

Loop = Callable[[Compile], Iterable[Any]]


def accumulates_without_sync(compile: Compile) -> Iterable[Any]:
    """Accumulate the gradients of four batches. The first three are inside `no_sync`, in which DDP would not
    synchronize.
    """
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(rows(12), start=1):
        last = number % 4 == 0
        with contextlib.nullcontext() if last else getattr(model, "no_sync", contextlib.nullcontext)():
            loss = functional.cross_entropy(model(x), y) / 4
            loss.backward()
        yield loss.item()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    yield from (model, optimizer)


def mixed(compile: Compile, scales: bool | None) -> Iterable[Any]:
    """Train as in torch's recipe for automatic mixed precision."""
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=bool(scales), init_scale=1024.0)
    for x, y in rows():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        if scales is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        yield loss.item()
    yield from (model, optimizer)


class Blocks(nn.Module):
    """A perceptron that recomputes each layer in the backward by torch's checkpoint."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inner.first(x))
        for layer in self.inner.layers:
            x = self.again(layer, x)
        out: torch.Tensor = self.inner.last(x)
        return out

    def again(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(layer(x)) * torch.sigmoid(x)

        given: dict[str, Any] = {"use_reentrant": self.kind == "reentrant"}
        if self.kind == "selective":
            kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            given["context_fn"] = partial(checkpoint.create_selective_checkpoint_contexts, kept)
        out: torch.Tensor = checkpoint.checkpoint(block, x, **given)
        return out


def checkpointed(compile: Compile, kind: str) -> Iterable[Any]:
    model = compile(Blocks(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from (*fit(model, optimizer), model, optimizer)


def checkpointed_outside(compile: Compile) -> Iterable[Any]:
    """Apply torch's checkpoint to a model that is compiled whole."""
    model = Perceptron()
    whole = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for x, y in rows():
        out = checkpoint.checkpoint(whole, x.requires_grad_(), use_reentrant=True)
        loss = functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def parametrized(compile: Compile, which: str) -> Iterable[Any]:
    """Train with weight norm, spectral norm or orthogonal weights."""
    from torch.nn.utils import parametrizations

    model = Perceptron(width=128)
    for layer in model.layers:
        getattr(parametrizations, which)(layer)
    compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from (*fit(model, optimizer), model, optimizer)


def old_spectral_norm(compile: Compile) -> Iterable[Any]:
    """Train with torch's old spectral norm, whose hook assigns a new weight before each call."""
    model = Perceptron()
    for layer in model.layers:
        torch.nn.utils.spectral_norm(layer)
    compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from (*fit(model, optimizer), model.state_dict(), optimizer)


def pruned(compile: Compile) -> Iterable[Any]:
    """Prune the weights twice during the training, and make the pruning permanent at the end."""
    from torch.nn.utils import prune

    model = Perceptron()
    layers = [(layer, "weight") for layer in model.layers]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.3)
    compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    yield from fit(model, optimizer)
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.3)
    yield from fit(model, optimizer, 3)
    for layer, name in layers:
        prune.remove(layer, name)
    yield model.state_dict()


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.inner: Any = Perceptron()
        make = partial(FakeQuantize, observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.weights = nn.ModuleList(make() for _ in self.inner.layers)
        self.activations = nn.ModuleList(make() for _ in self.inner.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inner.first(x))
        for layer, weight, activation in zip(self.inner.layers, self.weights, self.activations):
            x = activation(torch.relu(functional.linear(x, weight(layer.weight), layer.bias)))
        out: torch.Tensor = self.inner.last(x)
        return out


def quantization_aware(compile: Compile) -> Iterable[Any]:
    """Train with fake quantization, and freeze the quantization's observers in the last steps."""
    from torch.ao.quantization import disable_observer

    model = compile(Quantized())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from fit(model, optimizer, 4)
    model.apply(disable_observer)
    yield from (*fit(model, optimizer, 3), model, optimizer)


def averaged(compile: Compile) -> Iterable[Any]:
    """Train with two averages of the weights: an exponential one, and SWA, whose batch norms are updated at
    the end.
    """
    from torch.optim import swa_utils

    model = compile(Convolutions())
    swa = swa_utils.AveragedModel(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for number, (x, y) in enumerate(images(6)):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        if number > 2:
            swa.update_parameters(model)
            schedule.step()
        yield loss.item()
    swa_utils.update_bn(images(2), swa)
    yield from (model, swa, ema, optimizer)


def logs_with_numpy(compile: Compile) -> Iterable[Any]:
    """Read all weights and gradients as numpy arrays after each step."""
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in rows(6):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            yield float(abs(parameter.grad.numpy()).max())
        optimizer.step()
        optimizer.zero_grad()
        yield from (float(p.detach().cpu().numpy().std()) for p in model.parameters())
        yield loss.item()


def copies_in_between(compile: Compile) -> Iterable[Any]:
    """Keep a deep copy of the best model, as early stopping does, and restore this copy."""
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from fit(model, optimizer)
    best, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    yield from fit(model, optimizer, 3)
    model.load_state_dict(best.state_dict())
    optimizer.load_state_dict(state)
    yield from (*fit(model, optimizer, 3), model, best, optimizer)


def saves_in_between(compile: Compile) -> Iterable[Any]:
    """Load a checkpoint into a new model and a new optimizer in the middle of the training."""
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from fit(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    model = compile(Perceptron())
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    yield from (*fit(model, optimizer), model, optimizer)


def steps_in_the_backward(compile: Compile) -> Iterable[Any]:
    """Use one optimizer per parameter, which steps as soon as the parameter's gradient exists."""
    model = compile(Perceptron())
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in rows(6):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        yield loss.item()
    yield from (model, *optimizers.values())


def packs_saved_tensors(compile: Compile) -> Iterable[Any]:
    """Use saved_tensors_hooks to replace each tensor that autograd saves by a copy, as activation offloading
    does.
    """
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.detach().clone(), tensor.dtype

    for x, y in rows():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
            loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    with torch.autograd.graph.save_on_cpu():
        yield from fit(model, optimizer, 2)
    yield from (model, optimizer)


def closures(compile: Compile) -> Iterable[Any]:
    """Train by L-BFGS with a line search."""
    model = compile(Perceptron())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    for x, y in rows(3):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        yield optimizer.step(closure).item()
    yield model


def hooks_read(compile: Compile) -> Iterable[Any]:
    """Read the norms of each layer's output and gradient in hooks, and clip the gradients."""
    model = Perceptron()
    seen: list[float] = []

    def look(module: nn.Module, given: Any, made: Any) -> None:
        seen.append(made[0].norm().item())

    for layer in model.layers:
        layer.register_forward_hook(lambda m, given, made: seen.append(made.norm().item()))
        layer.register_full_backward_hook(look)
    compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in rows():
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        yield torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    yield from (seen, model, optimizer)


def _variants() -> Iterator[tuple[str, Loop]]:
    for scales, name in ((None, "autocast"), (True, "autocast_scaled"), (False, "scaler_disabled")):
        yield name, partial(mixed, scales=scales)
    for kind in ("reentrant", "plain", "selective"):
        yield f"checkpoint_{kind}", partial(checkpointed, kind=kind)
    for which in ("weight_norm", "spectral_norm", "orthogonal"):
        yield which, partial(parametrized, which=which)


ALONE: tuple[Loop, ...] = (
    accumulates_without_sync,
    checkpointed_outside,
    old_spectral_norm,
    pruned,
    quantization_aware,
    averaged,
    logs_with_numpy,
    copies_in_between,
    saves_in_between,
    steps_in_the_backward,
    packs_saved_tensors,
    closures,
    hooks_read,
)
LOOPS: dict[str, Loop] = {loop.__name__: loop for loop in ALONE} | dict(_variants())
