"""Collectives that take a chosen time and compute nothing, for benchmarks of overlap in one process.

A collective begins on a stream of its own: it begins after the collective before it, and its duration is
proportional to its bytes. Only the wait for its result blocks the host.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

NAME = "teraio-paced"


class PacedWork(Work):
    """A collective in flight. It ends at a known time."""

    def __init__(self, end_s: float) -> None:
        super().__init__()
        self.end_s = end_s

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the collective has ended."""
        time.sleep(max(0.0, self.end_s - time.perf_counter()))
        return True


class PacedGroup(dist.ProcessGroup):
    """A process group of one rank with slow collectives. `byte_s` is the duration of one byte."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.byte_s = 0.0
        self.busy_s = 0.0  # the sum of all durations
        self.end_s = 0.0  # the end of the last collective
        self.begun: deque[PacedWork] = deque(maxlen=64)  # C++ does not keep a work of Python alive

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], options: Any = None
    ) -> Any:
        """Begin a collective that leaves the tensors as they are."""
        took = self.byte_s * sum(tensor.nbytes for tensor in tensors)
        self.end_s = max(self.end_s, time.perf_counter()) + took
        self.busy_s += took
        self.begun.append(PacedWork(self.end_s))
        return self.begun[-1]

    def barrier(self, *args: Any) -> Any:
        """Return at once, because the group has one rank."""
        return PacedWork(0.0)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: Any) -> None:
        self.known_as = name

    @property
    def group_name(self) -> Any:
        """Return the name by which operators find this group."""
        return self.known_as


def begin_group() -> PacedGroup:
    """Make the process group of this process, and return it."""
    group = PacedGroup()
    dist.Backend.register_backend(NAME, lambda *args: group, devices=["cpu"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=1)
    return group
