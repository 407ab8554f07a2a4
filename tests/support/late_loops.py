"""Random training loops for late updates. A seed defines the optimizers, the loop, and what user code does
between the steps.

User code looks at weights, gradients and states, writes to them, replaces them, saves and loads them. What it
sees goes into a list. A run with late updates must give the same list as a plain run, bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import gradient_work
import torch
from generated_models import Generated, batch, make
from torch import nn, optim

STEPS = 8

Optimizer = optim.Optimizer
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.02),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW lr tensor": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2)),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam maximize": lambda p: optim.Adam(p, lr=1e-3, maximize=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
}


@dataclass
class Run:
    """One training: a model, its optimizers, and what user code has seen."""

    model: Generated
    call: Callable[..., Any]
    draw: Random  # the draws of the loop, the same in every run of a seed
    optimizers: list[Optimizer] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    averaged: Any = None
    saved: list[Any] = field(default_factory=list)
    scaler: Any = None
    schedulers: list[Any] = field(default_factory=list)
    stale: Any = None
    versions: dict[nn.Parameter, int] = field(default_factory=dict)  # at the begin of the third step
    unscaled: list[Optimizer] = field(default_factory=list)  # whose gradients the scaler has unscaled

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def some(self, count: int = 2) -> list[nn.Parameter]:
        own = self.parameters()
        return self.draw.sample(own, min(count, len(own)))

    def see(self, name: str, *values: Any) -> None:
        self.seen.append((name, *map(_as_bytes, values)))

    def loss_of(self, number: int) -> torch.Tensor:
        x, target = batch(self.model, number)
        loss, *rest = self.call(x, target)
        total: torch.Tensor = loss + rest[0] if self.model.extra == "used" else loss
        return total

    def states(self) -> Iterator[tuple[nn.Parameter, str, torch.Tensor]]:
        for optimizer in self.optimizers:
            for p in self.parameters():
                for name, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield p, name, value


def _as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).clone()
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return value.hex() if isinstance(value, float) else value  # NaN is not equal to itself


# ---- what user code does after a step


def reads_weights(run: Run) -> None:
    run.see("weights", *(p.detach().abs().sum() for p in run.some()))


def reads_gradients(run: Run) -> None:
    run.see("gradients", *(p.grad.abs().sum() for p in run.some() if p.grad is not None))


def reads_states(run: Run) -> None:
    for p in run.some():
        for optimizer in run.optimizers:
            state = optimizer.state.get(p, {})
            run.see("states", *(f"{k}: {float(v.double().sum())}" for k, v in state.items() if v is not None))


def reads_counters(run: Run) -> None:
    run.see("counters", *(value.item() for _, name, value in run.states() if name == "step"))


def reads_pointers(run: Run) -> None:
    run.see("pointers", *(float(p.detach().numpy().sum()) for p in run.some() if p.dtype == torch.float32))


def reads_versions(run: Run) -> None:
    """Read how versions have changed since the third step. In the first step, the engine may copy
    weights.
    """
    if run.versions:
        run.see("versions", *(p._version - run.versions[p] for p in run.parameters()))
        run.see("versions of states", *(value._version for _, _, value in run.states()))


def reads_in_thread(run: Run) -> None:
    some = run.some()
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(p.detach().double().sum().item() for p in some))
    thread.start()
    thread.join()
    run.see("thread", *found)


def averages(run: Run) -> None:
    if run.averaged is None:
        run.averaged = optim.swa_utils.AveragedModel(run.model)
    run.averaged.update_parameters(run.model)


def saves(run: Run) -> None:
    file = io.BytesIO()
    content = {"model": run.model.state_dict(), "optimizers": [o.state_dict() for o in run.optimizers]}
    torch.save(content, file)
    run.see("file", hashlib.sha256(file.getvalue()).hexdigest())
    run.saved.append(file.getvalue())


def copies_states(run: Run) -> None:
    for optimizer in run.optimizers:
        copied = copy.deepcopy(optimizer.state_dict())
        for key, state in copied["state"].items():
            run.see("copy", key, *state.values())


def copies_model(run: Run) -> None:
    run.see("model", *copy.deepcopy(run.model).state_dict().values())


def loads_optimizer(run: Run) -> None:
    if run.saved:
        content = torch.load(io.BytesIO(run.saved[-1]), weights_only=True)
        for optimizer, state in zip(run.optimizers, content["optimizers"]):
            if len(state["param_groups"]) == len(optimizer.param_groups):
                optimizer.load_state_dict(state)


def loads_model(run: Run) -> None:
    if run.saved:
        content = torch.load(io.BytesIO(run.saved[-1]), weights_only=True)
        run.model.load_state_dict(content["model"])


def changes_rates(run: Run) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
            if "weight_decay" in group:
                group["weight_decay"] += 0.01


def writes_weights(run: Run) -> None:
    with torch.no_grad():
        for p in run.some():
            p.mul_(0.99)


def replaces_data(run: Run) -> None:
    for p in run.some(1):
        p.data = torch.full_like(p.data, 0.01)


def replaces_data_unread(run: Run) -> None:
    for p in run.some(1):
        p.data = torch.full(p.shape, 0.02, dtype=p.dtype)


def writes_states(run: Run) -> None:
    for _, name, value in run.states():
        if name not in {"step", "mu_product"} and value.is_floating_point() and run.draw.random() < 0.2:
            value.mul_(0.5)


def replaces_states(run: Run) -> None:
    for p in run.some(1):
        for optimizer in run.optimizers:
            state = optimizer.state.get(p, {})
            for name in [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() > 1]:
                state[name] = torch.full_like(state[name], 0.01)


def clears_states(run: Run) -> None:
    run.optimizers[0].state.clear()


def writes_gradients(run: Run) -> None:
    for p in run.some():
        if p.grad is not None:
            p.grad.mul_(0.5)


def replaces_gradients(run: Run) -> None:
    for p in run.some():
        p.grad = torch.ones_like(p)


def evaluates(run: Run) -> None:
    with torch.no_grad():
        run.see("evaluation", run.loss_of(90))


def infers(run: Run) -> None:
    with torch.inference_mode():
        run.see("inference", run.loss_of(91))


def steps_again(run: Run) -> None:
    run.optimizers[0].step()


def makes_new_optimizer(run: Run) -> None:
    run.optimizers[0] = optim.SGD(run.parameters(), lr=0.01, momentum=0.9)


def holds_stale_graph(run: Run) -> None:
    run.stale = run.loss_of(92)


def backs_stale_graph(run: Run) -> None:
    stale, run.stale = run.stale, None
    if stale is not None:
        try:
            stale.backward()
            run.see("stale graph", "no error")
        except RuntimeError as error:
            run.see("stale graph", "modified by an inplace operation" in str(error))


def fails_in_forward(run: Run) -> None:
    x, target = batch(run.model, 3)
    try:
        run.call(x, target[:, :-1])
        run.see("failure", "no error")
    except Exception as error:  # noqa: BLE001  another class under another compiler
        run.see("failure", bool(str(error)))


AFTER: dict[str, tuple[int, Callable[[Run], None]]] = {
    "reads weights": (2, reads_weights),
    "reads gradients": (2, reads_gradients),
    "reads states": (2, reads_states),
    "reads counters": (2, reads_counters),
    "reads pointers": (1, reads_pointers),
    "reads versions": (3, reads_versions),
    "reads in a thread": (1, reads_in_thread),
    "averages": (3, averages),
    "saves": (3, saves),
    "copies states": (1, copies_states),
    "copies the model": (1, copies_model),
    "loads the optimizer": (2, loads_optimizer),
    "loads the model": (1, loads_model),
    "changes rates": (3, changes_rates),
    "writes weights": (2, writes_weights),
    "replaces data": (1, replaces_data),
    "replaces data unread": (1, replaces_data_unread),
    "writes states": (1, writes_states),
    "replaces states": (2, replaces_states),
    "clears states": (1, clears_states),
    "writes gradients": (1, writes_gradients),
    "replaces gradients": (1, replaces_gradients),
    "evaluates": (2, evaluates),
    "infers": (1, infers),
    "steps again": (1, steps_again),
    "new optimizer": (1, makes_new_optimizer),
    "holds a stale graph": (1, holds_stale_graph),
    "backward of a stale graph": (2, backs_stale_graph),
    "fails in the forward": (1, fails_in_forward),
}
# Code that updates in the backward do not allow after a step, or that breaks an assumption in the next step.
NOT_WITH_BACKWARD = {"reads gradients", "writes gradients", "steps again", "new optimizer"}


# ---- the loop


@dataclass(frozen=True)
class Plan:
    """The draws of a seed for the whole loop."""

    optimizers: tuple[str, ...]
    groups: int
    overlap: bool
    batches: int
    clip: str
    zero: str
    scaler: bool
    scheduler: bool
    sam: bool
    autocast: bool
    calm: float  # share of steps without any action of user code
    budget: float  # 0: the smallest budget; 1: the memory of all tensors

    @classmethod
    def of(cls, seed: int) -> Plan:
        draw = Random(seed * 7 + 1)
        count = draw.choice([1, 1, 1, 2])
        return cls(
            tuple(draw.choice(sorted(OPTIMIZERS)) for _ in range(count)),
            draw.choice([1, 1, 2]),
            draw.random() < 0.2,
            draw.choice([1, 1, 1, 2]),
            draw.choice(["", "", "norm", "value"]),
            draw.choice(["end", "end", "begin", "middle", "in place", "never"]),
            draw.random() < 0.15,
            draw.random() < 0.3,
            draw.random() < 0.1,
            draw.random() < 0.1,
            draw.choice([0.3, 0.6, 1.0]),
            draw.choice([0.0, 0.0, 0.1, 0.3]),
        )

    @classmethod
    def in_backward(cls, seed: int) -> tuple[Plan, bool]:
        """Return the draws of a seed for updates in the backward. Also return whether the loop keeps to their
        assumptions.
        """
        draw, plan = Random(seed * 7 + 3), cls.of(seed)
        if draw.random() < 0.25:
            return plan, False
        zero = draw.choice(["end", "end", "begin", "middle"])
        return replace(plan, clip="", scaler=False, sam=False, overlap=False, batches=1, zero=zero), True

    @property
    def what(self) -> str:
        words = [*self.optimizers, f"{self.groups} groups", f"{self.batches} batches", self.clip, self.zero]
        words += [w for w in ("overlap", "scaler", "scheduler", "sam", "autocast") if getattr(self, w)]
        return ", ".join(filter(None, words))


def make_run(seed: int, compile_: Callable[[nn.Module], Any], backward: bool = False) -> Run:
    model = make(seed, 3)
    run = Run(model, model, Random(seed))
    plan = Plan.in_backward(seed)[0] if backward else Plan.of(seed)
    own = run.parameters()
    half = len(own) // 2 if len(plan.optimizers) > 1 else len(own)
    parts = [own[:half], own if plan.overlap else own[half:]]
    for name, part in zip(plan.optimizers, parts):
        groups = [{"params": part[at :: plan.groups]} for at in range(plan.groups)]
        run.optimizers.append(OPTIMIZERS[name]([g for g in groups if g["params"]]))
    if plan.scheduler:
        run.schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.8) for o in run.optimizers]
    if plan.scaler:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    run.call = compile_(model)
    return run


def train(seed: int, run: Run, works: bool = False, backward: bool = False) -> list[Any]:
    """Train some steps. Return what user code has seen, and the final weights, states and gradients.

    If `works` is True, user code also works on gradients before the optimizers step. If `backward` is True,
    most loops keep to the assumptions of updates in the backward.
    """
    plan, obeys = Plan.in_backward(seed) if backward else (Plan.of(seed), False)
    torch.manual_seed(seed)
    names = [name for name in sorted(AFTER) if not (obeys and name in NOT_WITH_BACKWARD)]
    weights = [AFTER[name][0] for name in names]
    for step in range(STEPS):
        if step == 2:
            run.versions = {p: p._version for p in run.parameters()}
        if plan.zero == "begin":
            _zero(run, True)
        for part in range(plan.batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
                loss = run.loss_of(2 * step + part)
            if plan.zero == "middle" and part == 0:
                _zero(run, True)
            (loss if run.scaler is None else run.scaler.scale(loss)).backward()
            run.see("loss", loss)
            del loss
        if works:
            gradient_work.work(run, seed, step)
        _update(run, plan, step)
        calm = run.draw.random() < plan.calm
        for name in [] if calm else run.draw.choices(names, weights, k=run.draw.randint(1, 3)):
            run.see("action", name)
            AFTER[name][1](run)
        if plan.zero in {"end", "in place"}:
            _zero(run, plan.zero == "end")
        for scheduler in run.schedulers:
            scheduler.step()
    if obeys:
        _zero(run, True)
    return _outcome(run)


def _zero(run: Run, to_none: bool) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=to_none)
    run.model.zero_grad(set_to_none=to_none)


def _clip_and_perturb(run: Run, plan: Plan, step: int) -> None:
    if plan.clip == "norm" and run.scaler is None:
        run.see("norm", nn.utils.clip_grad_norm_(run.parameters(), 0.5))
    elif plan.clip == "value":
        nn.utils.clip_grad_value_(run.parameters(), 1e-3)
    if plan.sam:
        kept = []
        with torch.no_grad():
            for p in run.parameters():
                if p.grad is not None:
                    moved = p.grad * 0.01
                    p.add_(moved)
                    kept.append((p, moved))
        run.loss_of(2 * step).backward()
        with torch.no_grad():
            for p, moved in kept:
                p.sub_(moved)


def _update(run: Run, plan: Plan, step: int) -> None:
    _clip_and_perturb(run, plan, step)
    for optimizer in run.optimizers:
        if run.scaler is None:
            optimizer.step()
        else:
            if step == 4:
                for p in run.some(1):
                    if p.grad is not None:
                        p.grad.view(-1)[:1].fill_(float("inf"))
            run.scaler.step(optimizer)
    if run.scaler is not None:
        run.scaler.update()
        run.see("scale", run.scaler.get_scale())


def _outcome(run: Run) -> list[Any]:
    own = run.parameters()
    reads_versions(run)
    for optimizer in run.optimizers:
        order = [next((at for at, own_p in enumerate(own) if own_p is p), -1) for p in optimizer.state]
        run.see("order of states", *order)
    saves(run)
    for name, value in run.model.state_dict().items():
        run.see(name, value)
    for p in own:
        run.see("gradient", p.grad)
    if run.averaged is not None:
        run.see("average", *run.averaged.state_dict().values())
    run.see("random numbers", torch.get_rng_state())
    return run.seen
