"""Optimizers of torch and optimizers like those that users write, and loops with user code on gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from eager_beside import evict_all
from torch import nn, optim

from teraio.runtime.engine import engine

Parameters = list[nn.Parameter]


class Counted(optim.Optimizer):
    """An optimizer like schedule-free ones. Its parameter group holds a counter and an average weight for all
    updates.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            k = group["k"]
            weight = (k + 1) ** 0.5
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "z" not in state:
                        state["z"] = p.clone()
                    state["z"].sub_(p.grad, alpha=group["lr"])
                    p.lerp_(state["z"], weight / weight_sum)
            group["k"] = k + 1


class GlobalNorm(optim.Optimizer):
    """An optimizer like LAMB, whose every update uses the norm of all gradients. The norm is computed in one
    pass before all updates, or per group.
    """

    def __init__(self, parameters: Any, lr: float, by_group: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.by_group = by_group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        whole = None if self.by_group else self.scale(p for g in self.param_groups for p in g["params"])
        for group in self.param_groups:
            scale = self.scale(group["params"]) if whole is None else whole
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("seen", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(p.grad, alpha=group["lr"] * scale)

    def scale(self, parameters: Iterable[torch.Tensor]) -> float:
        norms = [p.grad.norm() for p in parameters if p.grad is not None]
        return 1 / max(1.0, torch.stack(norms).norm().item()) if norms else 1.0


class FusedAfterAll(optim.Optimizer):
    """An optimizer that reads all states before its first update. Its torch kernel updates weights without
    incrementing their versions.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("momentum", torch.zeros_like(p))
        for group in self.param_groups:
            for p in group["params"]:
                fused(p, [self.state[p]["momentum"]])


def fused(parameter: torch.Tensor, momentum: list[torch.Tensor]) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9 * len(momentum), "dampening": 0.0}
    settings |= {"weight_decay": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    if parameter.grad is not None:
        torch._fused_sgd_([parameter], [parameter.grad], momentum, **settings)


class Normed(optim.Optimizer):
    """An optimizer that changes gradients without incrementing the gradients' versions."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.data.div_(p.grad.norm() + 1e-6)
                    self.state[p].setdefault("seen", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(p.grad, alpha=group["lr"])


class Inherited(optim.AdamW):
    """An optimizer that calls its inherited step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]


Make = Callable[[nn.Module], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda m: optim.AdamW(m.parameters(), lr=1e-3),
    "one counter": lambda m: optim.AdamW(m.parameters(), lr=1e-3, foreach=True),
    "AdamW foreach": lambda m: optim.AdamW(two_groups(m), lr=1e-3, foreach=True),
    "AdamW fused": lambda m: optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "Adam amsgrad": lambda m: optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
    "SGD momentum": lambda m: optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), lr=1e-2),
    "Adafactor": lambda m: optim.Adafactor(m.parameters(), lr=1e-2),
    "NAdam": lambda m: optim.NAdam(m.parameters(), lr=1e-3),
    "counter in the group": lambda m: Counted(two_groups(m), lr=1e-2),
    "writes gradients": lambda m: Normed(m.parameters()),
    "scales in its kernel": lambda m: optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "inherited step": lambda m: Inherited(m.parameters(), lr=1e-3),
    "two passes": lambda m: GlobalNorm(m.parameters(), lr=1e-2, by_group=False),
    "two passes, fused": lambda m: FusedAfterAll(m.parameters()),
    "global norm": lambda m: GlobalNorm(m.parameters(), lr=1e-2, by_group=True),
    "LBFGS": lambda m: optim.LBFGS(m.parameters(), lr=1e-2, max_iter=2, history_size=1),
    "closure": lambda m: optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "adds a group": lambda m: optim.AdamW([p for p in m.parameters() if p.ndim > 1], lr=1e-3),
}
WHOLE = frozenset({"global norm", "LBFGS", "compiled step", "one counter"})


@dataclass
class Loop:
    """One step: forwards and backwards, user code on gradients, the optimizer, and user code after the
    optimizer.
    """

    batches: int = 1
    begin: Callable[[Any, int], None] = lambda run, step: None
    between: Callable[[Any, int], None] = lambda run, step: None
    update: Callable[[Any, int, Callable[[], Any]], None] = lambda run, step, again: run.optimizer.step()
    end: Callable[[Any, int], None] = lambda run, step: run.optimizer.zero_grad()
    backward: Callable[[Any, torch.Tensor], None] = lambda run, loss: loss.backward()
    extra: dict[str, Any] = field(default_factory=dict)

    def step(self, run: Any, step: int, batches: list[torch.Tensor]) -> list[float]:
        self.begin(run, step)
        losses = []
        for batch in batches:
            loss = run.compiled(batch)
            self.backward(run, loss)
            losses.append(loss.item())
            del loss

        def again() -> torch.Tensor:
            run.optimizer.zero_grad()
            loss: torch.Tensor = run.compiled(batches[0])
            loss.backward()
            return loss

        self.between(run, step)
        self.update(run, step, again)
        self.end(run, step)
        return losses


def clips(run: Any, step: int) -> None:
    run.losses.append(nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3).item())


def clips_values(run: Any, step: int) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-5)


def reads(run: Any, step: int) -> None:
    for parameter in run.model.parameters():
        run.losses.append(parameter.grad.abs().max().item())
    for state in run.optimizer.state.values():
        run.losses += [v.sum().item() for v in state.values() if isinstance(v, torch.Tensor)]


def halve(*gradients: torch.Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(0.5)


def hooks(run: Any, step: int) -> None:
    """Register three kinds of hooks: (1) on the optimizer, (2) on parameters, and (3) a hook that keeps a
    gradient. The parameters' hooks run before and after the engine's own hooks.
    """
    if step == 1:
        run.optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: halve(
                *[p.grad for g in optimizer.param_groups for p in g["params"]]
            )
        )
        run.seen = []
        for number, parameter in enumerate(run.model.parameters()):
            if number % 3 == 0:
                parameter.register_hook(lambda gradient: gradient * 2)
            elif number % 3 == 1:
                parameter.register_hook(run.seen.append)
            else:
                parameter.register_post_accumulate_grad_hook(lambda p: halve(p.grad))
    if step > 1:
        run.losses += [gradient.sum().item() for gradient in run.seen]
        run.seen.clear()


def scales(run: Any, loss: torch.Tensor) -> None:
    if not hasattr(run, "scaler"):
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    run.scaler.scale(loss).backward()


def unscales(run: Any, step: int, again: Any) -> None:
    """Step with a GradScaler. A gradient overflows in the third step."""
    if step == 2:
        run.model.layers[3].weight.grad[0, 0] = float("inf")
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.losses.append(run.scaler.get_scale())


def steps_scaled(run: Any, step: int, again: Any) -> None:
    """Step with a GradScaler. The optimizer's kernel divides the gradients by the scale."""
    run.scaler.step(run.optimizer)
    run.scaler.update()


def leaves(run: Any, step: int) -> None:
    """Evict all tensors, so that each gradient has a copy when the optimizer's step begins."""
    if engine.ENGINE is not None:
        evict_all()


def reads_spent(run: Any, step: int) -> None:
    """Evict all tensors after the optimizer's step, then read the gradients."""
    leaves(run, step)
    for parameter in run.model.parameters():
        run.losses.append(parameter.grad.abs().sum().item())
    run.optimizer.zero_grad()


def freezes(run: Any, step: int) -> None:
    for parameter in run.model.layers[2].parameters():
        parameter.requires_grad_(step != 1)


def adds_a_group(run: Any, step: int) -> None:
    if step == 1:
        vectors = [p for p in run.model.parameters() if p.ndim == 1]
        run.optimizer.add_param_group({"params": vectors, "lr": 1e-2})


def swaps(run: Any, step: int) -> None:
    if step == 2:
        run.optimizer = optim.SGD(run.model.parameters(), lr=1e-2, momentum=0.9)


def schedules(run: Any, step: int) -> None:
    if not hasattr(run, "scheduler"):
        run.scheduler = optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 4)
    run.scheduler.step()
    run.optimizer.zero_grad()


def twice(run: Any, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def graph_of_the_backward(run: Any, loss: torch.Tensor) -> None:
    """Compute gradients by `autograd.grad`, and assign them to the parameters."""
    parameters = list(run.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = gradient


def anomaly(run: Any, loss: torch.Tensor) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        loss.backward()


@torch.no_grad()
def fused_by_hand(run: Any, step: int, again: Callable[[], Any]) -> None:
    """Update the parameters by torch's fused kernel, without an optimizer."""
    for parameter in run.model.parameters():
        fused(parameter, [])


def needs_room(run: Any, step: int, again: Callable[[], Any]) -> None:
    """Step with a closure, which the optimizer calls in the middle of its update. The closure runs a forward
    and a backward, and then evicts all tensors, so that weights and states must be fetched again.
    """

    def closure() -> Any:
        loss = again()
        if engine.ENGINE is not None:
            evict_all()
        return loss

    run.losses.append(run.optimizer.step(closure).item())


def counts_together(run: Any, step: int) -> None:
    """Share one step counter among all parameters. The optimizer increments the counter for each parameter
    before the first update.
    """
    states = [*run.optimizer.state.values()]
    for state in states:
        state["step"] = states[0]["step"]


def steps_compiled(run: Any, step: int, again: Callable[[], Any]) -> None:
    torch.compile(run.optimizer.step, backend="eager")()


LOOPS: dict[str, Loop] = {
    "accumulates": Loop(batches=4, between=clips),
    "clips": Loop(between=clips),
    "clips values": Loop(between=clips_values),
    "reads": Loop(between=reads),
    "zeroes in place": Loop(end=lambda run, step: run.optimizer.zero_grad(set_to_none=False)),
    "zeroes before": Loop(begin=lambda run, step: run.optimizer.zero_grad(), end=lambda run, step: None),
    "hooks": Loop(begin=hooks),
    "scaler": Loop(backward=scales, update=unscales),
    "scales in its kernel": Loop(between=leaves, backward=scales, update=steps_scaled, end=reads_spent),
    "writes gradients": Loop(between=leaves, end=reads_spent),
    "reads spent": Loop(between=leaves, end=reads_spent),
    "freezes": Loop(begin=freezes),
    "adds a group": Loop(begin=adds_a_group),
    "compiled step": Loop(update=steps_compiled),
    "one counter": Loop(begin=counts_together),
    "swaps the optimizer": Loop(begin=swaps),
    "scheduler": Loop(end=schedules),
    "closure": Loop(update=lambda run, step, again: run.losses.append(run.optimizer.step(again).item())),
    "LBFGS": Loop(update=needs_room),
    "fused by hand": Loop(update=fused_by_hand),
    "backward twice": Loop(backward=twice),
    "autograd.grad": Loop(backward=graph_of_the_backward),
    "anomaly": Loop(backward=anomaly),
}
