"""Plans that are independent of the clock, for trainings that count moves.

Kernels and the drive get fixed durations. Without fixed durations, two runs of a training on a loaded machine
measure different times, and their plans move different tensors.

When the engine checks whether a transfer is done, the check waits for the transfer. Without this wait, a
write could still be unfinished when a fetch needs the write's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from teraio.errors import StoreError
from teraio.formats.schedule import Step
from teraio.passes.slots import lifetimes
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.device.pending_transfer import Pending
from teraio.session import plan_reuse, tiers

KERNEL_NS = 10**6
RATE = 10**9  # bytes per second of the link to the drive
LATENCY_NS = 10**5
REPLACED = (
    (lifetimes, "_kernel_durations_ns"),
    (tiers, "_measure_link_once"),
    (plan_reuse, "DRIFT_PERCENT"),
    (Pending, "done"),
)


def _durations(step: Step) -> list[int]:
    return [KERNEL_NS for call in step.calls for _ in call.at_ns]


def _done(self: Pending) -> bool:
    with contextlib.suppress(StoreError):  # the code that ends the transfer also gets this error
        self.ticket.wait()
    return True


def plans(rate: int = RATE) -> None:
    """Use fixed durations in this process from this call on."""

    def link(directory: Path, device: object, memory_bytes: int) -> LinkRates:
        return LinkRates("ssd", rate, rate, rate, rate, LATENCY_NS, LATENCY_NS)

    lifetimes._kernel_durations_ns = _durations
    tiers._measure_link_once = link
    Pending.done = _done  # type: ignore[method-assign]
    plan_reuse.DRIFT_PERCENT = 10**9  # so large that no drift makes the engine plan again


@contextlib.contextmanager
def planned(rate: int = RATE) -> Iterator[None]:
    """Use fixed durations until the end of this block."""
    before = [getattr(owner, name) for owner, name in REPLACED]
    plans(rate)
    try:
        yield
    finally:
        for (owner, name), value in zip(REPLACED, before):
            setattr(owner, name, value)
