"""Checks of a GPU's memory, as torch's own allocator counts it.

Each step must keep to the budget, and so must the engine's measurement of links. If only the first run of a
kernel needs some memory, the engine must not reserve this memory for later runs. The checks need a `cuda`
device that computes right numbers: a GPU, or the stand-in for its driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import teraio
from teraio.runtime.device.cuda_memory import CudaMemory
from teraio.session import session, tiers

MIB = 2**20
WIDTH, LAYERS, BATCH, STEPS = 512, 8, 2048, 6
BUDGET = 60 * MIB
OPTIONS: dict[str, Any] = {"inner": "eager", "warmup": 1, "host_memory": "128MiB"}

FIRST: list[int] = []  # bytes that the next run of the operator `passes` allocates and frees
KEEPS: list[int] = []  # bytes that the next run of the operator `passes` allocates and keeps
KEPT: list[torch.Tensor] = []


@torch.library.custom_op("teraio_checks::passes", mutates_args=())
def passes(x: torch.Tensor) -> torch.Tensor:
    if FIRST:
        torch.empty(FIRST.pop(), dtype=torch.uint8, device=x.device)
    if KEEPS:
        KEPT.append(torch.empty(KEEPS.pop(), dtype=torch.uint8, device=x.device))
    return x.clone()


@passes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


passes.register_autograd(lambda ctx, gradient: gradient)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = passes(torch.tanh(layer(x)))
        loss: torch.Tensor = x.square().mean()
        return loss


@contextmanager
def ended() -> Iterator[None]:
    """Close teraio and free all memory of a training when the block ends."""
    try:
        yield
    finally:
        teraio.reset()
        torch._dynamo.reset()
        for left in (FIRST, KEEPS, KEPT):
            left.clear()
        torch.cuda.empty_cache()


def model_on_gpu() -> nn.Module:
    torch.manual_seed(0)
    return Chain().cuda()


def train(memory: int | None, steps: int = STEPS) -> tuple[list[float], list[int]]:
    """Train, and return the loss of each step, and the peak of allocated bytes in each step."""
    model = model_on_gpu()
    optimizer = torch.optim.AdamW(model.parameters())
    run: Any = model
    if memory is not None:
        run = torch.compile(model, backend="teraio", options={**OPTIONS, "memory": memory})
    losses, peaks = [], []
    for step in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if session.SESSION is not None:
            session.SESSION.device.forget_highest_counts()
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = run(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
        seen = teraio.stats().get("device_peak_bytes", 0)
        peaks.append(max(torch.cuda.max_memory_allocated(), seen))
    return losses, peaks


def check_the_budget_holds_in_measured_and_in_planned_steps() -> None:
    with ended():
        plain, whole = train(None)
    with ended():
        losses, peaks = train(BUDGET)
        assert teraio.stats()["phase"] == "planned" and teraio.stats()["evictions"] > 0
    assert losses == plain
    assert max(whole) > 1.3 * BUDGET, "the plain peak fits into the budget"
    assert max(peaks) <= BUDGET, peaks


def check_memory_of_a_first_run_is_not_reserved_afterwards() -> None:
    """Check an operator that allocates a large buffer only in its first run, as Inductor's autotuner does.

    The buffer is as large as the L2 cache. It does not fit into the budget beside the training's tensors.
    """
    with ended():
        plain, _ = train(None)
    with ended():
        FIRST.append(50 * MIB)
        losses, peaks = train(BUDGET)
        assert not FIRST
        assert teraio.stats()["reserve_bytes"] < 12 * MIB
    assert losses == plain
    assert peaks[0] > BUDGET >= max(peaks[1:]), peaks


def check_memory_kept_by_a_library_is_reserved_at_once() -> None:
    with ended():
        KEEPS.append(16 * MIB)
        _, peaks = train(BUDGET)
        assert teraio.stats()["reserve_bytes"] >= 16 * MIB
    assert max(peaks[1:]) <= BUDGET, peaks


def check_links_are_measured_within_an_eighth_of_the_budget_and_memory_is_freed() -> None:
    seen: list[int] = []
    forget = CudaMemory.forget_highest_counts

    def looks(self: CudaMemory) -> None:
        seen.append(self.highest_used_bytes())
        forget(self)

    for budget in (16 * MIB, 64 * MIB, 512 * MIB):
        tiers._KNOWN.clear()
        seen.clear()
        with ended(), patch.object(CudaMemory, "forget_highest_counts", looks):
            torch.cuda.reset_peak_memory_stats()
            before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            numbers = torch.get_rng_state(), torch.cuda.get_rng_state()
            with torch.device("cuda"), teraio.init(memory=budget, **OPTIONS):
                assert 0 < seen[0] - before <= budget // 8, (seen, before)
                assert torch.cuda.memory_reserved() <= reserved
                assert teraio.stats()["device_peak_bytes"] <= before
                after = torch.get_rng_state(), torch.cuda.get_rng_state()
                assert all(torch.equal(one, other) for one, other in zip(numbers, after))


def check_a_session_starts_on_a_card_that_is_nearly_full() -> None:
    """Check that the engine measures its links with buffers that fit into the free memory of the GPU.

    If no memory is free, it measures the drives from RAM, and uses no host memory for evictions.
    """
    for left in (24 * MIB, 0):
        tiers._KNOWN.clear()
        with ended():
            held = []
            size = 64 * MIB
            while size >= max(left // 4, MIB):
                try:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    size //= 2
            if left:
                while torch.cuda.mem_get_info()[0] < left:
                    held.pop()
                    torch.cuda.empty_cache()
            with torch.device("cuda"), teraio.init(memory=2**30, **OPTIONS):
                current = session.SESSION
                assert current is not None
                names = [tier.name for tier in current.planning.machine.tiers]
                assert ("host" in names) == bool(left), (left, names, torch.cuda.mem_get_info())
            held.clear()


def check_reserved_memory_is_reported_beside_allocated_memory() -> None:
    """Check that teraio reports reserved memory. It exceeds allocated memory if user code has a stream of its
    own.

    The allocator reuses freed blocks only on the stream on which they were allocated.
    """
    with ended(), torch.cuda.stream(torch.cuda.Stream()):
        losses, _ = train(BUDGET)
        stats = teraio.stats()
        assert stats["device_peak_bytes"] <= BUDGET
        assert (
            stats["device_reserved_peak_bytes"] >= torch.cuda.memory_reserved() >= stats["device_peak_bytes"]
        )
    with ended():
        assert train(BUDGET)[0] == losses
