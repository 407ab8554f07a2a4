"""Random work of user code on gradients, between a backward and the optimizer's step.

A loop does the same each step, so that the engine can foresee the norms, and sometimes something else. All
that the work returns goes into the list of what user code has seen.
"""

from __future__ import annotations

import copy
import hashlib
import io
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

Work = Callable[[Any, Random], Any]


def _gradients(run: Any) -> list[torch.Tensor]:
    return [p.grad for p in run.parameters() if p.grad is not None]


def _some(run: Any, draw: Random, count: int = 2) -> list[torch.Tensor]:
    found = _gradients(run)
    return draw.sample(found, min(count, len(found)))


def _clips(norm_type: float, foreach: bool | None) -> Work:
    return lambda run, _: nn.utils.clip_grad_norm_(run.parameters(), 0.5, norm_type, foreach=foreach)


def _clips_values(foreach: bool | None) -> Work:
    return lambda run, _: nn.utils.clip_grad_value_(run.parameters(), 1e-3, foreach=foreach)


def clips_by_own_code(run: Any, _: Random) -> float:
    total = sum(g.data.norm(2).item() ** 2 for g in _gradients(run)) ** 0.5
    for gradient in _gradients(run):
        gradient.data.mul_(min(1.0, 0.5 / (total + 1e-6)))
    return float(total)


def clips_detached(run: Any, _: Random) -> torch.Tensor:
    norms = torch.stack([torch.linalg.vector_norm(g.detach(), 2) for g in _gradients(run)])
    total = torch.linalg.vector_norm(norms)
    for gradient in _gradients(run):
        gradient.detach().mul_((0.5 / (total + 1e-6)).clamp(max=1.0))
    return total


def scales_by_changing_tensor(run: Any, _: Random) -> None:
    factor = torch.tensor(0.5, dtype=torch.float64)
    for gradient in _gradients(run):
        gradient.mul_(factor)
        factor.data.mul_(1.1)


def scales_by_integer(run: Any, _: Random) -> None:
    for gradient in _gradients(run):
        gradient.mul_(torch.tensor(3)).div_(2)


def averages(run: Any, _: Random) -> None:
    torch._foreach_div_(_gradients(run), 2.0)


def scales_by_out(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw):
        torch.mul(gradient, 0.5, out=gradient)


def scales_by_own_mean(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw):
        gradient.mul_(gradient.abs().mean())


def adds_noise(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw):
        gradient.add_(0.01)


def doubles(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw):
        gradient.add_(gradient)


def writes_part(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw):
        gradient.view(-1)[:3].mul_(2)


def has_no_gradient(run: Any, draw: Random) -> None:
    draw.choice(run.parameters()).grad = None


def has_infinite_gradient(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw, 1):
        gradient.view(-1)[:1].fill_(draw.choice([float("inf"), float("nan")]))


def replaces_infinite_numbers(run: Any, _: Random) -> None:
    for gradient in _gradients(run):
        torch.nan_to_num_(gradient, nan=0.0, posinf=1.0, neginf=-1.0)


def scales_by_zero(run: Any, draw: Random) -> None:
    for gradient in _some(run, draw):
        gradient.mul_(0.0)


def works_in_thread(run: Any, draw: Random) -> list[float]:
    found: list[float] = []

    def work(gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            found.append(gradient.norm().item())
            gradient.mul_(0.5)

    thread = threading.Thread(target=work, args=(_some(run, draw),))
    thread.start()
    thread.join()
    return found


def saves(run: Any, _: Random) -> str:
    file = io.BytesIO()
    torch.save(_gradients(run), file)
    return hashlib.sha256(file.getvalue()).hexdigest()


def copies(run: Any, draw: Random) -> list[torch.Tensor]:
    return [copy.deepcopy(gradient) for gradient in _some(run, draw)]


def peeks(run: Any, draw: Random) -> list[torch.Tensor]:
    return [gradient.double().sum() for gradient in _some(run, draw)]


def reads_pointer(run: Any, draw: Random) -> list[float]:
    return [float(gradient.numpy().sum()) for gradient in _some(run, draw) if gradient.dtype == torch.float32]


def asks_twice(run: Any, _: Random) -> list[torch.Tensor]:
    norms = torch._foreach_norm(_gradients(run), 2.0)
    norms[0].mul_(2)
    return [*norms, *torch._foreach_norm(_gradients(run), 2.0)]


def raises_versions(run: Any, draw: Random) -> list[int]:
    found = []
    for gradient in _some(run, draw):
        before = gradient._version
        gradient.mul_(0.9).clamp_(min=-1.0)
        found.append(gradient._version - before)
    return found


def fails(run: Any, draw: Random) -> list[str]:
    found = []
    for gradient in _some(run, draw):
        for factor in (torch.tensor(1j), torch.ones(gradient.numel() + 1)):
            try:
                gradient.mul_(factor)
            except RuntimeError as error:
                found.append(str(error))
    return found


def replaces(run: Any, draw: Random) -> None:
    for p in draw.sample(run.parameters(), 1):
        if p.grad is not None:
            p.grad = p.grad * 0.5


def evaluates(run: Any, _: Random) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = run.loss_of(93)
        return found


def unscales(run: Any, _: Random) -> None:
    if run.scaler is not None:
        for optimizer in run.optimizers:
            if optimizer not in run.unscaled:
                run.unscaled.append(optimizer)
                run.scaler.unscale_(optimizer)


WORK: dict[str, tuple[int, Work]] = {
    "clips": (4, _clips(2.0, None)),
    "clips one by one": (3, _clips(2.0, False)),
    "clips the largest": (1, _clips(float("inf"), None)),
    "clips the sum": (1, _clips(1.0, False)),
    "clips values": (2, _clips_values(None)),
    "clips values one by one": (2, _clips_values(False)),
    "clips by own code": (2, clips_by_own_code),
    "clips detached": (2, clips_detached),
    "scales by a tensor that changes": (2, scales_by_changing_tensor),
    "scales by an integer": (1, scales_by_integer),
    "averages": (2, averages),
    "scales by out=": (1, scales_by_out),
    "scales by its own mean": (1, scales_by_own_mean),
    "adds noise": (1, adds_noise),
    "doubles": (1, doubles),
    "writes a part": (1, writes_part),
    "has no gradient": (1, has_no_gradient),
    "has an infinite gradient": (1, has_infinite_gradient),
    "replaces infinite numbers": (1, replaces_infinite_numbers),
    "scales by zero": (1, scales_by_zero),
    "works in a thread": (1, works_in_thread),
    "saves": (1, saves),
    "copies": (1, copies),
    "peeks": (2, peeks),
    "reads a pointer": (1, reads_pointer),
    "asks twice": (2, asks_twice),
    "raises versions": (1, raises_versions),
    "fails": (1, fails),
    "replaces": (1, replaces),
    "evaluates": (2, evaluates),
    "unscales": (3, unscales),
}


def work_of(seed: int) -> list[str]:
    """Return what this seed's loop does in each step."""
    draw = Random(seed * 11 + 3)
    return draw.choices(list(WORK), [share for share, _ in WORK.values()], k=draw.randint(1, 3))


def work(run: Any, seed: int, step: int) -> None:
    """Do the work of this step, and see its results."""
    draw = Random(f"{seed} {step}")
    run.unscaled = []
    names = work_of(seed)
    if draw.random() < 0.3:
        names.insert(draw.randrange(len(names) + 1), draw.choice(list(WORK)))
    for name in names:
        if not _gradients(run):
            return
        run.see("work", name)
        result = WORK[name][1](run, draw)
        run.see("result", *(result if isinstance(result, list) else [result]))
