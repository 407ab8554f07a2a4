"""The problem that every planner solves.

In: a profile, a machine, names of tensors to keep resident. Out: gaps, routes, ledgers.

A gap is an idle interval of a tensor, after its use at `start` and before its use at `end`. The gap of a
persistent tensor may cross the end of the step. In that case `end` is at least the number of kernels, but at
most one step after `start`. In the widest absence of a gap the tensor is evicted from tick `start + 1` to
tick `end`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teraio.errors import PlanError
from teraio.formats.machine import Link, Machine
from teraio.formats.profile import Profile, Tensor

DEVICE = "device"
Bytes = NDArray[Any]  # an array of int64 with one row per tick


@dataclass(frozen=True, slots=True)
class Gap:
    """An idle interval of one tensor.

    version    tick of the write that made these bytes; None if no kernel writes them: they are always clean
    unused     True if no kernel of the step touches the tensor; its home may be a slow tier without any move
    """

    tensor: int
    start: int
    end: int
    size_bytes: int
    version: int | None
    unused: bool = False

    def ticks_since_write(self, ticks: int) -> int:
        """Return the ticks since these bytes were written.

        This number is the gap's age within its version.
        """
        return 0 if self.version is None else (self.start - self.version) % ticks


@dataclass(frozen=True, slots=True)
class Route:
    """A slow tier with a link in each direction."""

    tier: str
    capacity_bytes: int
    out: Link
    back: Link


@dataclass(frozen=True, slots=True)
class Problem:
    """The gaps, routes and ledgers of a profile, with hints from a relaxation.

    live             bytes on the device by tick if no tensor moves
    floor            bytes on the device by tick if every movable tensor is evicted whenever it is idle

    The hints are empty without a relaxation:

    stalls_ns        by tick: the stall in the relaxation's optimum
    evicted_parts    by gap: the largest fraction of its bytes that is evicted at a check kernel
    towards          by tensor: the index of its route, or -1 if the tensor never moves
    """

    profile: Profile
    gaps: tuple[Gap, ...]
    routes: tuple[Route, ...]
    live: Bytes
    floor: Bytes
    stalls_ns: tuple[int, ...] = ()
    evicted_parts: tuple[float, ...] = ()
    towards: tuple[int, ...] = ()

    @property
    def ticks_per_step(self) -> int:
        return len(self.profile.kernels)


def transfer_ns(link: Link, size_bytes: int) -> int:
    """Return the time for which a transfer occupies its lane, rounded up to whole nanoseconds."""
    return link.latency_ns - (-size_bytes * 1_000_000_000 // link.bandwidth_bytes_per_s)


def build_problem(profile: Profile, machine: Machine | None = None, keep: Collection[str] = ()) -> Problem:
    """Return the gaps and ledgers of a profile. Inputs and tensors in `keep` get no gaps.

    Inputs belong to the user. The caller keeps the tensors in `keep` resident.
    """
    ticks = max(len(profile.kernels), 1)
    live = np.zeros(ticks, np.int64)
    live[: len(profile.kernels)] = [kernel.workspace_bytes for kernel in profile.kernels]
    floor = live.copy()
    gaps: list[Gap] = []
    for index, tensor in enumerate(profile.tensors):
        uses = sorted({*tensor.reads, *tensor.writes})
        if not uses and not tensor.persistent:
            continue
        first = 0 if tensor.persistent or tensor.kind == "input" else uses[0]
        last = ticks - 1 if tensor.persistent else uses[-1]
        live[first : last + 1] += tensor.size_bytes
        if tensor.kind == "input" or tensor.name in keep:
            floor[first : last + 1] += tensor.size_bytes
            continue
        floor[uses] += tensor.size_bytes
        gaps += _gaps_of_tensor(index, tensor, uses, ticks)
    return Problem(profile, tuple(gaps), _routes_to_slow_tiers(machine) if machine else (), live, floor)


def _gaps_of_tensor(index: int, tensor: Tensor, uses: list[int], ticks: int) -> list[Gap]:
    """Return the idle intervals of one tensor, in the order of the step."""
    if tensor.size_bytes == 0:
        return []
    if not uses:
        return [Gap(index, -1, ticks, tensor.size_bytes, None, unused=True)]
    following = [*uses[1:], uses[0] + ticks] if tensor.persistent else uses[1:]
    written = set(tensor.writes)
    version = max(written) if written and tensor.persistent else None
    gaps: list[Gap] = []
    for start, end in zip(uses, following, strict=False):
        version = start if start in written else version
        if end - start > 1:
            gaps.append(Gap(index, start, end, tensor.size_bytes, version))
    return gaps


def _routes_to_slow_tiers(machine: Machine) -> tuple[Route, ...]:
    """Return a route for each slow tier that has links in both directions, the fastest first."""
    links = {(link.source, link.target): link for link in machine.links}
    routes = [
        Route(tier.name, tier.capacity_bytes, links[DEVICE, tier.name], links[tier.name, DEVICE])
        for tier in machine.tiers
        if tier.name != DEVICE and (DEVICE, tier.name) in links and (tier.name, DEVICE) in links
    ]
    return tuple(sorted(routes, key=lambda r: (-r.back.bandwidth_bytes_per_s, r.tier)))


def smallest_budget(profile: Profile, keep: Collection[str] = ()) -> int:
    """Return the smallest budget with which a plan can exist: the largest working set of any kernel.

    The working set includes the kernel's workspace and the tensors that are kept resident.
    """
    return int(build_problem(profile, None, keep).floor.max())


def refuse_budget_below_floor(problem: Problem, budget_bytes: int) -> None:
    """Raise PlanError if the working set of a kernel exceeds the budget. No plan can exist then."""
    tick = int(problem.floor.argmax())
    needed = int(problem.floor[tick])
    if needed <= budget_bytes:
        return
    name = problem.profile.kernels[tick].name if problem.profile.kernels else "(no kernels)"
    workspace = problem.profile.kernels[tick].workspace_bytes if problem.profile.kernels else 0
    raise PlanError(
        f"step needs {needed} bytes at kernel {name!r} (tick {tick}): its tensors, all tensors kept resident"
        f" and {workspace} bytes of workspace; the budget is {budget_bytes}. Give at least {needed} bytes,"
        f" or a smaller batch"
    )


class BytesByTick:
    """Bytes by tick. The ticks are cyclic, as the step is. A window [first, end) is at most one step long."""

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows.copy()
        self.ticks = len(rows)

    def add_bytes_between(self, first: int, end: int, size_bytes: int) -> None:
        """Add bytes to a window, or subtract them if `size_bytes` is negative."""
        if end <= first:
            return
        assert end - first <= self.ticks, (first, end)
        first, end = first % self.ticks, first % self.ticks + end - first
        self.rows[first : min(end, self.ticks)] += size_bytes
        if end > self.ticks:
            self.rows[: end - self.ticks] += size_bytes

    def rows_between(self, first: int, end: int) -> Bytes:
        """Return the rows of a window, in the order of its ticks."""
        first, end = first % self.ticks, first % self.ticks + end - first
        if end <= self.ticks:
            return self.rows[first:end]
        return np.concatenate((self.rows[first:], self.rows[: end - self.ticks]))

    def earliest_tick_with_room(self, first: int, end: int, size_bytes: int, limit: int) -> int:
        """Return the earliest tick, at least `first`, from which the bytes fit at every tick up to `end`."""
        if end <= first:
            return end
        full = np.flatnonzero(self.rows_between(first, end) > limit - size_bytes)
        return first + int(full[-1]) + 1 if len(full) else first

    def latest_tick_with_room(self, first: int, end: int, size_bytes: int, limit: int) -> int:
        """Return the latest tick, at most `end`, up to which the bytes fit at every tick from `first` on."""
        if end <= first:
            return first
        full = np.flatnonzero(self.rows_between(first, end) > limit - size_bytes)
        return first + int(full[0]) if len(full) else end
