"""The predictions of a step. In: a plan, a profile, a machine. Out: timeline, period, device bytes by tick.

`event_simulation` makes the timeline of the last simulated step. The timeline's times count from the start of
this step. csrc/planner/recurrence.cpp computes the period, and the time at which compute reaches each tick.
It is about forty times as fast as the event simulation. The two simulators agree to the nanosecond, even if
links share a bandwidth.

Both simulators run step after step. They end when a step begins with the same unfinished transfers as an
earlier step. From then on the steps between these two repeat. The period is the mean duration of the
repeating steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Fetch, Move, Plan
from teraio.formats.profile import Profile
from teraio.formats.timeline import Counter, Timeline

from ..problem.problem import DEVICE, transfer_ns
from .event_simulation import Outcome, simulate_by_events


def simulate(plan: Plan, profile: Profile, machine: Machine) -> Timeline:
    """Return the timeline of a step with this plan, after the first steps, when steps repeat.

    Raise PlanError if plan_check does not accept the plan, for example if a step exceeds the plan's budget.
    """
    run = simulate_by_events(plan, profile, machine)
    slots_ns = [span.start_ns for span in run.spans if span.track == "compute"]
    counters: list[Counter] = []
    for kind, rows in sorted(device_bytes_by_kind(plan, profile).items()):
        for tick, size in enumerate(rows):
            if tick == 0 or size != rows[tick - 1]:
                counters.append(Counter(DEVICE, kind, slots_ns[tick], size))
    counters.sort(key=lambda counter: counter.at_ns)
    return Timeline("predicted", run.spans, tuple(counters), run.stalls, plan.budget_bytes, run.step_ns)


def step_ns(plan: Plan, profile: Profile, machine: Machine) -> int:
    """Return the period: the time from one step's start to the next step's start when steps repeat."""
    return tick_entries_and_period(plan, profile, machine)[1]


def unshared_step_ns(plan: Plan, profile: Profile, machine: Machine) -> int:
    """Return the period that the plan would have if links shared no bandwidth."""
    links = tuple(replace(link, shares=None) for link in machine.links)
    return step_ns(plan, profile, replace(machine, links=links, shared=()))


def tick_entries_and_period(plan: Plan, profile: Profile, machine: Machine) -> tuple[list[int], int]:
    """Return the times at which compute reaches each tick, before the tick's waits, and the period."""
    from teraio import _native

    try:
        period, _, entered = _native.settle(*native_step_arrays(plan, profile, machine))
        return entered.tolist(), period
    except OverflowError:  # with very slow links, 64 bits cannot hold the step time
        run = simulate_by_events(plan, profile, machine)
        return _tick_entries_and_end(run)[:-1], run.step_ns


def _tick_entries_and_end(run: Outcome) -> list[int]:
    """Return the times at which compute reaches each tick of the last step, and the end of the step."""
    return [0, *(span.end_ns for span in run.spans if span.track == "compute")]


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """The start and the end of a transfer, in ns from the start of the step in which it was issued."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of the last simulated step, in ns from its start.

    entered_ns   by tick: the time at which compute reaches the tick, before the tick's waits
    took_ns      the duration of the step
    transfers    the times of each transfer; a transfer may end after the step
    stalls_ns    by tick: the time for which compute waits
    """

    entered_ns: list[int]
    took_ns: int
    transfers: dict[Move, TransferTimes]
    stalls_ns: dict[int, int]


def last_step_times(plan: Plan, profile: Profile, machine: Machine) -> StepTimes:
    """Return the times of a plan's last simulated step, which the timeline of the plan has as well."""
    from teraio import _native

    try:
        took, entered, times, waits = _native.last_step(*native_step_arrays(plan, profile, machine))
    except OverflowError:  # with very slow links, 64 bits cannot hold the step time
        return last_step_times_by_events(plan, profile, machine)
    moves = (move for move in plan.moves if move.trigger is not None)
    ran = (TransferTimes(*row) for row in times.reshape(-1, 2).tolist())
    stalls = _sum_by_tick(waits.reshape(-1, 2).tolist())
    return StepTimes(entered.tolist(), took, dict(zip(moves, ran, strict=True)), stalls)


def last_step_times_by_events(plan: Plan, profile: Profile, machine: Machine) -> StepTimes:
    run, ticks = simulate_by_events(plan, profile, machine), len(profile.kernels)
    *entered, took = _tick_entries_and_end(run)
    issued = [(m.trigger % ticks, isinstance(m, Fetch), m) for m in plan.moves if m.trigger is not None]
    issued.sort(key=lambda entry: entry[:2])
    ran = (TransferTimes(span.start_ns, span.end_ns) for span in run.spans if span.track != "compute")
    stalls = _sum_by_tick((stall.tick, stall.ns) for stall in run.stalls)
    return StepTimes(entered, took, dict(zip((move for *_, move in issued), ran, strict=True)), stalls)


def _sum_by_tick(stalls: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return the stalled ns by tick. A stall is a pair: its tick and its ns."""
    sums: dict[int, int] = defaultdict(int)
    for tick, ns in stalls:
        sums[tick] += ns
    return sums


def native_step_arrays(
    plan: Plan, profile: Profile, machine: Machine
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the arguments of native code: kernel times, links, shared bandwidths, and transfers."""
    durations = np.array([kernel.duration_ns for kernel in profile.kernels], np.int64)
    rows = np.array(native_transfer_rows(plan, profile, machine), np.int64).reshape(-1, 6)
    return durations, *native_link_arrays(machine), rows


def native_link_arrays(machine: Machine) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the machine as two arrays for native code.

    The first array has a row for each link: (bytes/s, latency, group). Links of one group share a bandwidth,
    and -1 means no group. The second array has the bytes/s of each group.
    """
    groups = [name for name, _ in machine.shared]
    rows = [
        (
            link.bandwidth_bytes_per_s,
            link.latency_ns,
            -1 if link.shares is None else groups.index(link.shares),
        )
        for link in machine.links
    ]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table, np.array([bandwidth for _, bandwidth in machine.shared], np.int64)


def native_transfer_rows(
    plan: Plan, profile: Profile, machine: Machine
) -> list[tuple[int, int, int, int, int, bool]]:
    """Return the plan's transfers as rows for native code.

    A row is (index of the link, ns, bytes, issue tick, wait tick, True for a fetch). Compute waits for the
    transfer at the wait tick.
    """
    ticks = len(profile.kernels)
    at = {(link.source, link.target): lane for lane, link in enumerate(machine.links)}
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    rows = []
    for move in plan.moves:
        if move.trigger is None:
            continue
        lane, size, fetch = at[_link_ends_of_move(move)], sizes[move.tensor], isinstance(move, Fetch)
        end = move.ready if isinstance(move, Fetch) else move.free
        taken_ns = transfer_ns(machine.links[lane], size)
        rows.append((lane, taken_ns, size, move.trigger % ticks, end % ticks, fetch))
    return rows


def _link_ends_of_move(move: Move) -> tuple[str, str]:
    return (DEVICE, move.to) if isinstance(move, Evict) else (move.source, DEVICE)


def device_bytes_by_kind(plan: Plan, profile: Profile) -> dict[str, list[int]]:
    """Return, for a valid plan, the bytes on the device at each tick, by kind of tensor.

    The kind `workspace` has the memory that kernels use beside their tensors.
    """
    ticks = len(profile.kernels)
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    evicted = {home.tensor for home in plan.homes if home.tier != DEVICE}
    change: dict[str, list[int]] = defaultdict(lambda: [0] * (ticks + 1))
    for move in plan.moves:
        tensor = tensors[move.tensor]
        if isinstance(move, Evict):
            change[tensor.kind][move.free % ticks] -= tensor.size_bytes
        else:
            change[tensor.kind][move.trigger % ticks] += tensor.size_bytes
            # The fetch is in flight at the end of each step, so its bytes are on the device at tick 0.
            if move.ready % ticks < move.trigger % ticks:
                evicted.discard(tensor.name)
    for tensor in profile.tensors:
        first, end = tensor.life(ticks)
        if tensor.outlives_step:
            change[tensor.kind][0] += 0 if tensor.name in evicted else tensor.size_bytes
        if not tensor.persistent and first < end:
            change[tensor.kind][first] += tensor.size_bytes
            change[tensor.kind][end if end <= ticks else end - ticks] -= tensor.size_bytes
    rows: dict[str, list[int]] = {"workspace": [kernel.workspace_bytes for kernel in profile.kernels]}
    for kind, changes in change.items():
        total, rows[kind] = 0, []
        for delta in changes[:ticks]:
            total += delta
            rows[kind].append(total)
    return rows
