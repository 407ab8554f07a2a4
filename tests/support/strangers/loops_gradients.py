"""Loops that compute gradients in unusual ways, or that replace the bytes of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from strangers.case import Compile
from strangers.loops_parts import Perceptron, fit, rows

Loop = Callable[[Compile], Iterable[Any]]


class Wrapped(nn.Module):
    """A model that is compiled whole. Its inner model can still be called uncompiled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def per_sample(compile: Compile) -> Iterable[Any]:
    """Clip each sample's gradient, as differentially private training does. vmap over grad of the uncompiled
    model computes these gradients.
    """
    model = Wrapped(Perceptron(128))
    compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model.inner, parameters, (x[None],)), y[None])

    for x, y in rows():
        parameters = {name: p.detach() for name, p in model.inner.named_parameters()}
        grads = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in grads.values()]).norm(dim=0)
        scale = (1 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.inner.named_parameters():
            p.grad = torch.einsum("n,n...->...", scale, grads[name]) / len(x)
        optimizer.step()
        yield functional.cross_entropy(model(x), y).item()
    yield from (model, optimizer)


class PerSample(nn.Module):
    """A model that computes each sample's gradients, and returns their means, in one compiled program."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron(128, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        parameters = {name: p.detach() for name, p in self.inner.named_parameters()}

        def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(functional_call(self.inner, parameters, (x[None],)), y[None])

        found: dict[str, torch.Tensor] = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        return {name: each.mean(0) for name, each in found.items()}


def per_sample_compiled(compile: Compile) -> Iterable[Any]:
    model: Any = compile(PerSample())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in rows():
        grads = model(x, y)
        for name, p in model.inner.named_parameters():
            p.grad = grads[name]
        optimizer.step()
        yield from (float(each.norm()) for each in grads.values())
    yield from (model, optimizer)


def meta_learns(compile: Compile, first_order: bool) -> Iterable[Any]:
    """Train through an inner training step, as MAML does. Unless `first_order` is True, the outer gradient
    also passes through the inner update.
    """
    model = Wrapped(Perceptron(128))
    compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tasks = list(rows(9))
    for at in range(0, 9, 3):
        optimizer.zero_grad()
        total = 0.0
        for x, y in tasks[at : at + 3]:
            fast: dict[str, torch.Tensor] = dict(model.inner.named_parameters())
            logits = model(x[:8]) if first_order else functional_call(model.inner, fast, (x[:8],))
            inner = functional.cross_entropy(logits, y[:8])
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=not first_order)
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes)}
            outer = functional.cross_entropy(functional_call(model.inner, fast, (x[8:],)), y[8:])
            outer.backward()
            total += outer.item()
        optimizer.step()
        yield total
        with torch.no_grad():
            yield float(model(tasks[at][0]).norm())
    yield from (model, optimizer)


def flattened(compile: Compile) -> Iterable[Any]:
    """Copy all weights into one buffer, and make the weights views of this buffer."""
    model = Perceptron()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from fit(model, optimizer)
    flat.mul_(0.99)
    yield from (*fit(model, optimizer, 3), model, flat, optimizer)


def evolves(compile: Compile) -> Iterable[Any]:
    """Train without gradients, by an evolution strategy. Each try changes a vector of all weights at random,
    and copies it into the model.
    """
    model = compile(Perceptron(128))
    with torch.no_grad():
        centre = nn.utils.parameters_to_vector(model.parameters()).clone()
        for x, y in rows(4):
            noises, scores = torch.randn(4, len(centre)), []
            for noise in noises:
                nn.utils.vector_to_parameters(centre + 0.02 * noise, model.parameters())
                scores.append(-functional.cross_entropy(model(x), y))
            scored = torch.stack(scores)
            centre += 0.05 * (noises * (scored - scored.mean())[:, None]).mean(0)
            yield scored.mean().item()
    yield from (model, centre)


def federated(compile: Compile) -> Iterable[Any]:
    """Train copies of a model separately and average their weights, as federated learning does."""
    server = Perceptron(128)
    client = compile(copy.deepcopy(server))
    for turn in range(3):
        states = []
        for number in range(2):
            client.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(client.parameters(), lr=0.05, momentum=0.9)
            yield from fit(client, optimizer, 2 + number + turn % 2)
            states.append({name: value.clone() for name, value in client.state_dict().items()})
        mean = {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
        server.load_state_dict(mean)
    yield from (server, client)


def attacks(compile: Compile) -> Iterable[Any]:
    """Train on inputs that were first changed along their own gradients to increase the loss (PGD)."""
    model = compile(Perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in rows(4):
        worse = x.clone().requires_grad_()
        for _ in range(2):
            (slope,) = torch.autograd.grad(functional.cross_entropy(model(worse), y), worse)
            worse = (worse + 0.1 * slope.sign()).detach().requires_grad_()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(worse), y)
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def projects(compile: Compile) -> Iterable[Any]:
    """Compute the gradients of two losses separately, and remove the conflicting part of one gradient
    (PCGrad).
    """
    model = compile(Perceptron(made=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    for x, _ in rows():
        out = model(x)
        losses = [(out[:, 0] - x[:, 0]).square().mean(), (out[:, 1] + x[:, 0]).abs().mean()]
        pairs = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        one, two = (torch.cat([each.flatten() for each in pair]) for pair in pairs)
        along = torch.dot(one, two)
        whole = one + two - (along / two.norm() ** 2 * two if along < 0 else 0)
        at = 0
        for p in parameters:
            p.grad = whole[at : at + p.numel()].view_as(p)
            at += p.numel()
        optimizer.step()
        yield from (loss.item() for loss in losses)
    yield from (model, optimizer)


def thaws(compile: Compile) -> Iterable[Any]:
    """Train the head first, then one more layer at a time. Each layer gets its own parameter group."""
    model: Any = Perceptron()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    compile(model)
    optimizer = torch.optim.AdamW(model.last.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for layer in reversed(model.layers):
        yield from fit(model, optimizer, 2)
        schedule.step()
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-4})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    yield from (model, optimizer)


def evaluates(compile: Compile) -> Iterable[Any]:
    """Evaluate in inference mode between epochs. Averaged weights replace the weights during the
    evaluation.
    """
    model = compile(Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        yield from fit(model, optimizer, 3)
        for name, p in model.named_parameters():
            slow[name].lerp_(p.detach(), 0.1)
        kept = {name: p.data for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = slow[name]
        model.eval()
        with torch.inference_mode():
            yield from (functional.cross_entropy(model(x), y).item() for x, y in rows(2, seed=5))
        model.train()
        for name, p in model.named_parameters():
            p.data = kept[name]
    yield from (model, slow, optimizer)


def stateless(compile: Compile) -> Iterable[Any]:
    """Keep the weights in a dict outside of the model, and update them without an optimizer."""
    model = compile(Perceptron(128))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for x, y in rows():
        loss = functional.cross_entropy(functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for name, slope in zip(weights, slopes):
                weights[name] -= 0.05 * slope
        yield loss.item()
    yield weights


def shared_twice(compile: Compile) -> Iterable[Any]:
    """Call one encoder three times in a step, for a triplet loss."""
    model = compile(Perceptron(made=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss()
    for x, _ in rows():
        loss = criterion(model(x), model(x + 0.1), model(x.flip(0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def penalizes_curvature(compile: Compile) -> Iterable[Any]:
    """Divide gradients by a curvature estimate, as AdaHessian and Sophia do. The estimate uses products of
    the uncompiled model's Hessian with vectors of random signs.
    """
    model = Wrapped(Perceptron(128, 2))
    compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parameters = list(model.parameters())
    for x, y in rows():
        loss = functional.cross_entropy(model.inner(x), y)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in parameters]
        products = torch.autograd.grad(slopes, parameters, grad_outputs=signs)
        for p, slope, sign, product in zip(parameters, slopes, signs, products):
            p.grad = slope.detach() / (1 + (sign * product).abs())
        optimizer.step()
        yield functional.cross_entropy(model(x), y).item()
    yield model


ALONE: tuple[Loop, ...] = (
    per_sample,
    per_sample_compiled,
    flattened,
    evolves,
    federated,
    attacks,
    projects,
    thaws,
    evaluates,
    stateless,
    shared_twice,
    penalizes_curvature,
)
LOOPS: dict[str, Loop] = {loop.__name__: loop for loop in ALONE} | {
    "meta_learns": partial(meta_learns, first_order=False),
    "meta_learns_first_order": partial(meta_learns, first_order=True),
}
