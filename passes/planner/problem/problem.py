"""The problem that every planner solves: which tensors can be evicted, when, and to which tiers.

In: a profile, a machine, names of tensors to keep resident. Out: gaps, routes, and bytes on the device by
tick.

A tick is the index of a kernel in the step. A *gap* is an idle interval of a tensor, between its use at tick
`start` and its next use at tick `end`. At most, the tensor is evicted from tick `start + 1` up to tick `end`.
A gap may contain the end of the step, if its tensor exists when the next step begins. Then `end` is a tick of
the next step: the number of kernels is added to it.
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
Bytes = NDArray[Any]  # an array with one number of bytes for each tick


@dataclass(frozen=True, slots=True)
class Gap:
    """An idle interval of one tensor, from its use at tick `start` to its use at tick `end`.

    tensor     index of the tensor in the profile
    version    tick of the kernel that wrote these bytes; None if no kernel writes the tensor
    unused     True if no kernel uses the tensor. It can be in a slow tier all the time, without moves
    """

    tensor: int
    start: int
    end: int
    size_bytes: int
    version: int | None
    unused: bool = False

    def ticks_since_write(self, ticks: int) -> int:
        """Return the number of ticks from the write of these bytes to the start of this gap. Return 0 if no
        kernel writes them.
        """
        return 0 if self.version is None else (self.start - self.version) % ticks


@dataclass(frozen=True, slots=True)
class Route:
    """A slow tier (host memory or SSD) with its links: `out` for evictions, and `back` for fetches."""

    tier: str
    capacity_bytes: int
    out: Link
    back: Link


@dataclass(frozen=True, slots=True)
class Problem:
    """The gaps and routes of a profile, bytes on the device by tick, and hints from a relaxation.

    live             bytes on the device by tick if no tensor moves
    floor            bytes on the device by tick if every tensor that can move is evicted in all of its gaps

    The relaxation is a linear program that no plan can beat (`bound/`). Without it the hints are empty:

    stalls_ns        by tick: the wait before the kernel in the relaxation's optimum
    evicted_parts    by gap: the largest fraction of its bytes that the relaxation evicts at a check kernel
    towards          by tensor: the index of its route, or -1 if the relaxation never evicts the tensor
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
    """Return the time of a transfer on the link, with its latency, rounded up to whole nanoseconds."""
    return link.latency_ns - (-size_bytes * 1_000_000_000 // link.bandwidth_bytes_per_s)


def build_problem(profile: Profile, machine: Machine | None = None, keep: Collection[str] = ()) -> Problem:
    """Return the problem of a profile: the gaps of its tensors, and the bytes on the device at each tick.

    Inputs get no gaps, because they belong to the user. Tensors in `keep` get no gaps, because they are kept
    resident. Without a machine, the problem has no routes.
    """
    ticks = max(len(profile.kernels), 1)
    workspaces = np.zeros(ticks, np.int64)
    workspaces[: len(profile.kernels)] = [kernel.workspace_bytes for kernel in profile.kernels]
    live, floor = BytesByTick(workspaces), BytesByTick(workspaces)
    gaps: list[Gap] = []
    for index, tensor in enumerate(profile.tensors):
        first, end = tensor.life(ticks)
        live.add_bytes_between(first, end, tensor.size_bytes)
        if tensor.kind == "input" or tensor.name in keep:
            floor.add_bytes_between(first, end, tensor.size_bytes)
            continue
        floor.rows[sorted({*tensor.reads, *tensor.writes})] += tensor.size_bytes
        gaps += _gaps_of_tensor(index, tensor, ticks)
    routes = _routes_to_slow_tiers(machine) if machine else ()
    return Problem(profile, tuple(gaps), routes, live.rows, floor.rows)


def _gaps_of_tensor(index: int, tensor: Tensor, ticks: int) -> list[Gap]:
    """Return the gaps (idle intervals) of one tensor, in the order of its life. Each begins in this step."""
    uses = tensor.uses_in_order(ticks)
    if tensor.size_bytes == 0:
        return []
    if not uses:
        return [Gap(index, -1, ticks, tensor.size_bytes, None, unused=True)] if tensor.persistent else []
    following = [*uses[1:], uses[0] + ticks] if tensor.persistent else uses[1:]
    written = set(tensor.writes)
    version = max(written) if written and tensor.persistent else None
    gaps: list[Gap] = []
    for start, end in zip(uses, following, strict=False):
        version = start % ticks if start % ticks in written else version
        if end - start > 1:
            lap = start // ticks * ticks
            gaps.append(Gap(index, start - lap, end - lap, tensor.size_bytes, version))
    return gaps


def _routes_to_slow_tiers(machine: Machine) -> tuple[Route, ...]:
    """Return a route for each slow tier with links to and from the device. The route with the fastest reads
    is first.
    """
    links = {(link.source, link.target): link for link in machine.links}
    routes = [
        Route(tier.name, tier.capacity_bytes, links[DEVICE, tier.name], links[tier.name, DEVICE])
        for tier in machine.tiers
        if tier.name != DEVICE and (DEVICE, tier.name) in links and (tier.name, DEVICE) in links
    ]
    return tuple(sorted(routes, key=lambda r: (-r.back.bandwidth_bytes_per_s, r.tier)))


def smallest_budget(profile: Profile, keep: Collection[str] = ()) -> int:
    """Return the smallest budget with which a plan can exist: the bytes that the largest kernel needs.

    A kernel needs its tensors, its workspace, and all tensors that are kept resident.
    """
    return int(build_problem(profile, None, keep).floor.max())


def refuse_budget_below_floor(problem: Problem, budget_bytes: int) -> None:
    """Raise PlanError if a kernel needs more bytes than the budget, even with all other tensors evicted."""
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
    """Bytes on the device, or in a tier, by tick. A range of ticks [first, end) may go on in the next step.
    It is at most one step long.
    """

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows.copy()
        self.ticks = len(rows)

    def add_bytes_between(self, first: int, end: int, size_bytes: int) -> None:
        """Add bytes to all ticks from `first` up to `end`. If `size_bytes` is negative, subtract them."""
        if end <= first:
            return
        assert end - first <= self.ticks, (first, end)
        first, end = first % self.ticks, first % self.ticks + end - first
        self.rows[first : min(end, self.ticks)] += size_bytes
        if end > self.ticks:
            self.rows[: end - self.ticks] += size_bytes

    def rows_between(self, first: int, end: int) -> Bytes:
        """Return the bytes of the ticks from `first` up to `end`, in this order."""
        first, end = first % self.ticks, first % self.ticks + end - first
        if end <= self.ticks:
            return self.rows[first:end]
        return np.concatenate((self.rows[first:], self.rows[: end - self.ticks]))

    def earliest_tick_with_room(self, first: int, end: int, size_bytes: int, limit: int) -> int:
        """Return the earliest tick in the range such that the bytes fit from this tick up to `end`."""
        if end <= first:
            return end
        full = np.flatnonzero(self.rows_between(first, end) > limit - size_bytes)
        return first + int(full[-1]) + 1 if len(full) else first

    def latest_tick_with_room(self, first: int, end: int, size_bytes: int, limit: int) -> int:
        """Return the latest tick in the range such that the bytes fit from `first` up to this tick."""
        if end <= first:
            return first
        full = np.flatnonzero(self.rows_between(first, end) > limit - size_bytes)
        return first + int(full[0]) if len(full) else end
