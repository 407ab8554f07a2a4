"""Checks that the engine can end while copies to and from pinned memory are in flight."""

from __future__ import annotations

import weakref
from typing import Any

import torch

import teraio
from teraio.backend import backend
from teraio.session import session

SIDE, LAYERS = 256, 6
OPTIONS: dict[str, Any] = {
    "memory": "6MiB",
    "host_memory": "64MiB",
    "inner": "eager",
    "planner": "greedy",
}
LONG_BYTES, LONG_COUNT = 2**25, 40  # bytes of one copy, which takes milliseconds; number of copies


class Training:
    """A model and its optimizer. If `budget` is True, teraio compiles the model."""

    def __init__(self, budget: bool) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(SIDE, SIDE) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.called: Any = self.model
        if budget:
            self.called = torch.compile(self.model, backend=backend, dynamic=False, options=OPTIONS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def steps(self, count: int) -> None:
        for step in range(count):
            drawn = torch.Generator().manual_seed(step)
            self.called(torch.randn(64, SIDE, generator=drawn).cuda()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        return [value.detach().cpu() for value in (*self.model.parameters(), *states)]


def _occupied() -> list[torch.Tensor]:
    """Issue copies on the streams of the host tier, and return their tensors. The copies take a tenth of a
    second together.
    """
    assert session.SESSION is not None
    device: Any = session.SESSION.device
    on_device = torch.empty(LONG_BYTES, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(LONG_BYTES, dtype=torch.uint8).pin_memory()
    for stream in (device.fetch_stream, device.demand_stream, device.evict_stream):
        with torch.cuda.stream(stream):
            for _ in range(LONG_COUNT):
                on_device.copy_(on_host, non_blocking=True)
    return [on_device, on_host]


def check_copies_end_before_their_memory_is_unmapped() -> None:
    plain, ours = Training(False), Training(True)
    plain.steps(4)
    ours.steps(4)
    used = _occupied()
    assert session.SESSION is not None
    host = weakref.ref(session.SESSION.engine.mover.host)
    teraio.reset()
    assert host() is None, "pinned memory was not unpinned"
    assert all(torch.equal(one, other) for one, other in zip(plain.values(), ours.values(), strict=True))
    torch.cuda.synchronize()
    torch._dynamo.reset()
    del used


def check_the_process_ends_during_copies() -> None:
    """Let the process of this check end while copies are in flight. If it crashes, prove.py reports the check
    as failed.
    """
    ours = Training(True)
    ours.steps(4)
    ours.kept = _occupied()  # type: ignore[attr-defined]
    globals()["LEFT"] = ours
