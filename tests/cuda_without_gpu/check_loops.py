"""Checks of training loops on a GPU. With and without a budget, the numbers must be bitwise equal.

Each check trains twice in this process. It tests the engine together with torch's own CUDA code. The results
depend on three choices of this code: (1) which scalars are on the device, (2) which streams run the kernels,
and (3) which values the host reads.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from stack import SIDE, Model

import teraio
from teraio.backend import backend

ROWS, STEPS = 64, 9
# The weights take 1.6 MiB. The weights, gradients, two optimizer states and activations together exceed the
# budget.
BUDGET = "6MiB"
OPTIONS: dict[str, Any] = {
    "memory": BUDGET,
    "host_memory": "64MiB",
    "inner": "eager",
    "planner": "greedy",
}

Loop = Callable[[Any, torch.nn.Module], Any]


def batch(step: int, device: str = "cuda") -> torch.Tensor:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, SIDE, generator=drawn).to(device)


def digest(*values: Any) -> str:
    """Return a hash of the bytes of all tensors, and of all other values, in these nested values."""
    found = hashlib.sha256()
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


@contextlib.contextmanager
def within(budget: bool, device: str = "cuda", **options: Any) -> Iterator[tuple[Any, torch.nn.Module]]:
    """Yield (function to call, model). If `budget` is True, the function is the model as compiled by teraio.

    Close teraio at the end.
    """
    torch.manual_seed(0)
    model = Model().to(device)
    called: Any = model
    if budget:
        called = torch.compile(model, backend=backend, dynamic=False, options={**OPTIONS, **options})
    try:
        yield called, model
    finally:
        teraio.reset()
        torch._dynamo.reset()


def same(loop: Loop, **options: Any) -> dict[str, Any]:
    """Run the loop with and without a budget, and check that both runs return the same values. Return
    teraio's counts.
    """
    with within(False) as (called, model):
        plain = digest(loop(called, model), model.state_dict())
    with within(True, **options) as (called, model):
        ours = loop(called, model)
        counted = dict(teraio.stats())
        found = digest(ours, model.state_dict())
    assert found == plain, "the numbers differ with a budget"
    assert counted["evictions"], counted
    return counted


def trained(
    make: Callable[[Any], torch.optim.Optimizer], clip: float | None = None, accumulate: int = 1
) -> Loop:
    """Return a training loop with this optimizer. The loop returns the losses and the final optimizer
    states.
    """

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer, losses = make(model.parameters()), []
        for step in range(STEPS):
            for part in range(accumulate):
                loss = called(batch(step * accumulate + part)).square().mean() / accumulate
                loss.backward()
                losses.append(float(loss))
            if clip is not None:
                losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, optimizer.state_dict()

    return loop


def check_adamw() -> None:
    counted = same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3)))
    assert counted["fetches"] and counted["phase"] == "planned", counted


def check_adamw_capturable() -> None:
    same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3, capturable=True)))


def check_adamw_fused() -> None:
    same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True)))


def check_adamw_foreach_with_a_tensor_as_its_rate() -> None:
    def make(weights: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-3, device="cuda")
        return torch.optim.AdamW(weights, lr=rate, foreach=True, capturable=True)

    same(trained(make))


def check_sgd_with_momentum() -> None:
    same(trained(lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)))


def check_late_updates() -> None:
    counted = same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3), clip=0.01), updates="late")
    assert counted["late_updates"], counted


def check_updates_in_the_backward() -> None:
    counted = same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3)), updates="backward")
    assert counted["backward_updates"], counted


def check_clipping() -> None:
    same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3), clip=0.01))


def check_accumulation() -> None:
    same(trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3), clip=0.01, accumulate=3))


def check_a_step_on_the_host() -> None:
    same(trained(lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)), optimizer_step="host")


def scaled(make: Callable[[Any], torch.optim.Optimizer], overflows: bool) -> Loop:
    """Return a training loop with half precision and a GradScaler.

    If `overflows` is True, the first scale is too large. So the scaler must find infinities, skip steps and
    reduce the scale.
    """

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer, losses = make(model.parameters()), []
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**23 if overflows else 2.0**8, growth_interval=2)
        for step in range(STEPS):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = called(batch(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append((float(loss), repr(float(norm)), scaler.get_scale()))
        scales = [scale for *_, scale in losses]
        skipped = sum(after < before for before, after in pairwise(scales))
        assert (0 < skipped < STEPS - 3) == overflows, scales
        return losses, optimizer.state_dict(), scaler.state_dict()

    return loop


def check_a_grad_scaler() -> None:
    same(scaled(lambda weights: torch.optim.AdamW(weights, lr=1e-3), overflows=False))


def check_a_grad_scaler_that_finds_infinities() -> None:
    same(scaled(lambda weights: torch.optim.AdamW(weights, lr=1e-3), overflows=True))


def check_a_grad_scaler_with_a_fused_optimizer() -> None:
    same(scaled(lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True), overflows=True))


def check_a_grad_scaler_without_unscaling() -> None:
    """Check a loop that never calls `scaler.unscale_`. The fused optimizer kernel then unscales the
    gradients, and skips the update if it finds infinities.
    """

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler, losses = torch.amp.GradScaler("cuda", init_scale=2.0**24), []
        for step in range(STEPS):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = called(batch(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append((float(loss), scaler.get_scale()))
        return losses, optimizer.state_dict(), scaler.state_dict()

    same(loop)


def check_a_training_on_a_stream_of_its_own(clip: float | None = 1.0, **options: Any) -> None:
    plain = trained(lambda weights: torch.optim.AdamW(weights, lr=1e-3), clip=clip)

    def loop(called: Any, model: torch.nn.Module) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = plain(called, model)
        torch.cuda.current_stream().wait_stream(stream)
        return found

    same(loop, **options)


def check_a_training_whose_streams_change(**options: Any) -> None:
    """Check a loop that alternates between two streams. At each step, the stream waits for the stream of the
    previous step.
    """

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        streams = [torch.cuda.Stream() for _ in range(2)]
        before = torch.cuda.current_stream()
        for step in range(STEPS):
            stream = streams[step % 2]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                loss = called(batch(step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            before = stream
        torch.cuda.current_stream().wait_stream(before)
        return losses, optimizer.state_dict()

    same(loop, **options)


CASES: dict[str, Callable[[], None]] = {
    "check_streams_with_late_updates": partial(check_a_training_whose_streams_change, updates="late"),
    "check_streams_with_updates_in_the_backward": partial(
        check_a_training_whose_streams_change, updates="backward"
    ),
    "check_an_own_stream_with_updates_in_the_backward": partial(
        check_a_training_on_a_stream_of_its_own, clip=None, updates="backward"
    ),
}
SAMPLE = {
    "check_late_updates",
    "check_updates_in_the_backward",
    "check_streams_with_updates_in_the_backward",
    "check_adamw_capturable",
    "check_adamw_fused",
    "check_adamw_foreach_with_a_tensor_as_its_rate",
    "check_clipping",
    "check_accumulation",
    "check_a_step_on_the_host",
    "check_a_grad_scaler_that_finds_infinities",
    "check_a_grad_scaler_with_a_fused_optimizer",
    "check_a_training_on_a_stream_of_its_own",
    "check_a_training_whose_streams_change",
}
