"""Plans that do not go by the clock: kernels and the drive are said to take what is written here.

For trainings in which is counted what moves. On a machine with neighbours two runs of the same training
measure other times, and their plans move other tensors.
"""

from __future__ import annotations

from pathlib import Path

from teraio import earlier, tiers
from teraio.passes import lifetimes
from teraio.runtime.measure import Link
from teraio.schedule import Step

KERNEL_NS = 10**6
RATE = 10**9  # bytes per s
LATENCY_NS = 10**5
REPLACED = ((lifetimes, "_durations"), (tiers, "_link"), (earlier, "DRIFT_PERCENT"))


def _durations(step: Step) -> list[int]:
    return [KERNEL_NS for call in step.calls for _ in call.at_ns]


def plans(rate: int = RATE) -> None:
    """From now on, in this process."""

    def link(directory: Path) -> Link:
        return Link("ssd", rate, rate, rate, rate, LATENCY_NS, LATENCY_NS)

    lifetimes._durations = _durations
    tiers._link = link  # type: ignore[assignment]
    earlier.DRIFT_PERCENT = 10**9  # none is planned again because it took another time
