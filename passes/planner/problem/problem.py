"""What a planner decides about. In: profile, machine, names that must stay. Out: gaps, routes and ledgers.

A gap is an idle interval of a tensor: after its use at `start` and before its use at `end`. Gaps of
persistent tensors may go around the end of the step, so `end` may be at or beyond the number of kernels, at
most one step after `start`. The widest absence in a gap is from tick `start + 1` up to `end`, where the
tensor must be back.
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
Bytes = NDArray[Any]  # int64, one row per tick


@dataclass(frozen=True, slots=True)
class Gap:
    """`version` is the tick of the write that made these bytes, None if no kernel makes them (always clean).

    `unused`: no kernel of the step touches the tensor; it may live in a slow tier without any move.
    """

    tensor: int
    start: int
    end: int
    size_bytes: int
    version: int | None
    unused: bool = False

    def ticks_since_write(self, ticks: int) -> int:
        """Ticks since these bytes were made; the gaps of one version come in this order."""
        return 0 if self.version is None else (self.start - self.version) % ticks


@dataclass(frozen=True, slots=True)
class Route:
    """A slow tier with a link both ways."""

    tier: str
    capacity_bytes: int
    out: Link
    back: Link


@dataclass(frozen=True, slots=True)
class Problem:
    """`live`: ledger if nothing moves; `floor`: if everything that may move is away whenever it is idle.

    Hints from a relaxation, empty if there is none: `stalls_ns`, by tick, where a step waits even at best;
    `away`, by gap, which part of its bytes is away then; `towards`, by tensor, on which route (-1: on none).
    """

    profile: Profile
    gaps: tuple[Gap, ...]
    routes: tuple[Route, ...]
    live: Bytes
    floor: Bytes
    stalls_ns: tuple[int, ...] = ()
    away: tuple[float, ...] = ()
    towards: tuple[int, ...] = ()

    @property
    def ticks_per_step(self) -> int:
        return len(self.profile.kernels)


def transfer_ns(link: Link, size_bytes: int) -> int:
    """Whole nanoseconds for which a transfer occupies its lane, rounded up."""
    return link.latency_ns - (-size_bytes * 1_000_000_000 // link.bandwidth_bytes_per_s)


def build_problem(profile: Profile, machine: Machine | None = None, keep: Collection[str] = ()) -> Problem:
    """Gaps and ledgers of a profile. Inputs belong to the user and `keep` was asked to stay: no gaps."""
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
    """The idle intervals of one tensor, in the order of the step."""
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
    """Slow tiers that can be reached and come back, the fastest first."""
    links = {(link.source, link.target): link for link in machine.links}
    routes = [
        Route(tier.name, tier.capacity_bytes, links[DEVICE, tier.name], links[tier.name, DEVICE])
        for tier in machine.tiers
        if tier.name != DEVICE and (DEVICE, tier.name) in links and (tier.name, DEVICE) in links
    ]
    return tuple(sorted(routes, key=lambda r: (-r.back.bandwidth_bytes_per_s, r.tier)))


def smallest_budget(profile: Profile, keep: Collection[str] = ()) -> int:
    """The bytes no plan can go below: a kernel's largest working set, with workspace and what must stay."""
    return int(build_problem(profile, None, keep).floor.max())


def refuse_budget_below_floor(problem: Problem, budget_bytes: int) -> None:
    """Raise with the certificate if no plan can exist: the kernel whose working set exceeds the budget."""
    tick = int(problem.floor.argmax())
    needed = int(problem.floor[tick])
    if needed <= budget_bytes:
        return
    name = problem.profile.kernels[tick].name if problem.profile.kernels else "(no kernels)"
    workspace = problem.profile.kernels[tick].workspace_bytes if problem.profile.kernels else 0
    raise PlanError(
        f"step needs {needed} bytes at kernel {name!r} (tick {tick}): its tensors, what must stay, and"
        f" {workspace} bytes of workspace; the budget is {budget_bytes}. Give at least {needed} bytes,"
        f" or a smaller batch"
    )


class BytesByTick:
    """Bytes on the device by tick, around the step. Windows are [first, end), at most one step long."""

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows.copy()
        self.ticks = len(rows)

    def add_bytes_between(self, first: int, end: int, size_bytes: int) -> None:
        """Add bytes to a window; negative bytes take away."""
        if end <= first:
            return
        assert end - first <= self.ticks, (first, end)
        first, end = first % self.ticks, first % self.ticks + end - first
        self.rows[first : min(end, self.ticks)] += size_bytes
        if end > self.ticks:
            self.rows[: end - self.ticks] += size_bytes

    def rows_between(self, first: int, end: int) -> Bytes:
        """The rows of a window, in order."""
        first, end = first % self.ticks, first % self.ticks + end - first
        if end <= self.ticks:
            return self.rows[first:end]
        return np.concatenate((self.rows[first:], self.rows[: end - self.ticks]))

    def earliest_tick_with_room(self, first: int, end: int, size_bytes: int, limit: int) -> int:
        """The earliest tick from `first` on from which the bytes fit without a break up to `end`."""
        if end <= first:
            return end
        full = np.flatnonzero(self.rows_between(first, end) > limit - size_bytes)
        return first + int(full[-1]) + 1 if len(full) else first

    def latest_tick_with_room(self, first: int, end: int, size_bytes: int, limit: int) -> int:
        """The latest tick up to `end` until which the bytes fit without a break from `first` on."""
        if end <= first:
            return first
        full = np.flatnonzero(self.rows_between(first, end) > limit - size_bytes)
        return first + int(full[0]) if len(full) else end
