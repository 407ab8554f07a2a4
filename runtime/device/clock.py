"""When kernels ran: on the host's clock where they run as they are called, on a device's own where they run
later. Then the host's times say when kernels were launched, and are no one's measure of anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Clock(Protocol):
    def moment_after_kernels(self) -> Any:
        """Now, behind all kernels given so far."""
        ...

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        """When they were, in ns since whenever. Waits until all of them are over."""
        ...


class HostClock:
    def moment_after_kernels(self) -> Any:
        return time.perf_counter_ns()

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        return list(moments)
