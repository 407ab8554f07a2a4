"""Clocks for the times of kernels.

A CPU kernel ends before its call returns, so the host's clock gives the kernel's time. A GPU kernel runs
after its launch has returned. The host's clock would give only the time of the launch, so the GPU's own clock
times the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Clock(Protocol):
    def moment_after_kernels(self) -> Any:
        """Return a handle of the moment at which all kernels launched so far have ended."""
        ...

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        """Wait until all moments have passed, and return their times in ns from an arbitrary origin."""
        ...


class HostClock:
    def moment_after_kernels(self) -> Any:
        return time.perf_counter_ns()

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        return list(moments)
