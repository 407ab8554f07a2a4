"""Clocks for the times of kernels.

A CPU kernel runs when it is called, so the host's clock times the kernel. A GPU kernel runs after its
launch, so the device's own clock times the kernel. The host's clock would show only the time of the launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Clock(Protocol):
    def moment_after_kernels(self) -> Any:
        """Return the moment at which all kernels launched so far have ended."""
        ...

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        """Return the moments in ns from an arbitrary origin, after a wait until all moments have passed."""
        ...


class HostClock:
    def moment_after_kernels(self) -> Any:
        return time.perf_counter_ns()

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        return list(moments)
