"""How long does a step take with this plan? In: plan, profile, machine. Out: a predicted timeline.

Event by event, at tick k, which is entered when kernel k-1 ends:

    issue the evictions triggered at k -> wait for those that are free at k
    -> issue the fetches triggered at k -> wait for those that are ready at k -> run kernel k

Each link is one lane that serves its transfers in the order they were issued, one at a time, latency
included. Links are independent here: one that `shares` a bandwidth runs at its own rate, so where links
share, the result is optimistic; `events` is the judge there. Steps follow each other until one begins as an
earlier one began, with the same left to do on each lane: from there on they repeat. The timeline is the last
such step, and it starts at 0. A plan without moves is simulated as it stands: what an engine fetches on
demand is not in it.

csrc/planner/recurrence.cpp is the same recurrence for planners, a hundred times as fast; this one makes the
timeline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teraio.formats.machine import Link, Machine
from teraio.formats.plan import Evict, Fetch, Move, Plan
from teraio.formats.profile import Profile
from teraio.formats.timeline import Counter, Span, Stall, Timeline

from ..problem.problem import DEVICE, transfer_ns

MOST_STEPS = 24  # steps until we stop waiting for one that begins as an earlier one did


@dataclass(slots=True)
class _Ticket:
    """A transfer in the queue of its lane."""

    move: Move
    start_ns: int
    end_ns: int
    queued: bool  # it found its lane occupied


@dataclass(slots=True)
class _Run:
    """What survives from step to step, and what the last step left to look at."""

    lanes: dict[Link, int] = field(default_factory=lambda: defaultdict(int))
    tickets: dict[Move, _Ticket] = field(default_factory=dict)
    now_ns: int = 0
    begun_ns: int = 0
    spans: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    slots_ns: list[int] = field(default_factory=list)  # when kernel k starts


def simulate(plan: Plan, profile: Profile, machine: Machine) -> Timeline:
    """The steady state of a plan that `check` accepts."""
    run, period_ns = _run_until_steady(plan, profile, machine)
    spans = [
        Span(s.track, s.name, s.start_ns - run.begun_ns, s.end_ns - run.begun_ns, s.bytes, s.tensor)
        for s in run.spans
    ]
    counters: list[Counter] = []
    for kind, rows in sorted(device_bytes_by_kind(plan, profile).items()):
        for tick, size in enumerate(rows):
            if tick == 0 or size != rows[tick - 1]:
                counters.append(Counter(DEVICE, kind, run.slots_ns[tick] - run.begun_ns, size))
    counters.sort(key=lambda counter: counter.at_ns)
    return Timeline(
        "predicted", tuple(spans), tuple(counters), tuple(run.stalls), plan.budget_bytes, period_ns
    )


def step_ns(plan: Plan, profile: Profile, machine: Machine) -> int:
    """The period: time from the start of one step to the start of the next, once steps look alike."""
    return _run_until_steady(plan, profile, machine)[1]


def tick_entries_and_period(plan: Plan, profile: Profile, machine: Machine) -> tuple[list[int], int]:
    """When each tick of a settled step is entered (before its waits), and the period.

    By the native code, which knows links that share a bandwidth: there it agrees with `events`.
    """
    from teraio import _native

    durations = np.array([kernel.duration_ns for kernel in profile.kernels], np.int64)
    try:
        rows = np.array(native_transfer_rows(plan, profile, machine), np.int64).reshape(-1, 6)
        period, _, entered = _native.settle(durations, *native_link_arrays(machine), rows)
        return entered.tolist(), period
    except OverflowError:  # links so slow that 64 bits do not hold a step
        run, period = _run_until_steady(plan, profile, machine)
        found = [0]
        for slot_ns, kernel in zip(run.slots_ns[:-1], profile.kernels, strict=False):
            found.append(slot_ns + kernel.duration_ns - run.begun_ns)
        return found, period


def native_link_arrays(machine: Machine) -> tuple[NDArray[Any], NDArray[Any]]:
    """What native code knows of a machine: (bytes/s, latency, group or -1) per link, bytes/s per group."""
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
    """What native code knows of a plan: (lane, ns, bytes, issue tick, wait tick, is a fetch) per transfer."""
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


def _run_until_steady(plan: Plan, profile: Profile, machine: Machine) -> tuple[_Run, int]:
    """Run steps until they repeat; the period is the mean of those that do, rounded up.

    After MOST_STEPS without a repetition the mean of the later half counts. No period is shorter than the
    kernels together or than what one lane carries per step, so the result is not either.
    """
    links = {(link.source, link.target): link for link in machine.links}
    at: list[list[list[Move]]] = [[[] for _ in profile.kernels] for _ in range(4)]
    ticks, busy = len(profile.kernels), dict.fromkeys(machine.links, 0)
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    for move in plan.moves:
        if isinstance(move, Evict) and move.trigger is not None:
            at[0][move.trigger % ticks].append(move)
            at[1][move.free % ticks].append(move)
        elif isinstance(move, Fetch):
            at[2][move.trigger % ticks].append(move)
            at[3][move.ready % ticks].append(move)
        else:
            continue
        link = links[_link_ends_of_move(move)]
        busy[link] += transfer_ns(link, sizes[move.tensor])
    run, took = _Run(), list[int]()
    begun = [_busy_ns_by_lane(run)]
    while len(took) < MOST_STEPS and begun[-1] not in begun[:-1]:
        run.begun_ns = run.now_ns
        _run_one_step(run, at, profile, links, sizes)
        took.append(run.now_ns - run.begun_ns)
        begun.append(_busy_ns_by_lane(run))
    repeat = begun[-1] in begun[:-1]
    alike = begun[-2::-1].index(begun[-1]) + 1 if repeat else MOST_STEPS // 2
    period = -(-sum(took[-alike:]) // alike)
    return run, max(period, profile.compute_ns, *busy.values(), 0)


def _busy_ns_by_lane(run: _Run) -> dict[Link, int]:
    """How a step begins: for how long each lane is occupied.

    That says all, because what is in flight is always the tail of the same queue: the rest was waited for.
    """
    return {link: end - run.now_ns for link, end in run.lanes.items() if end > run.now_ns}


def _run_one_step(
    run: _Run,
    at: list[list[list[Move]]],
    profile: Profile,
    links: dict[tuple[str, str], Link],
    sizes: dict[str, int],
) -> None:
    """One step: every tick in order."""
    run.spans, run.stalls, run.slots_ns = [], [], []
    for tick, kernel in enumerate(profile.kernels):
        for move in at[0][tick]:
            _issue_transfer(run, move, links[_link_ends_of_move(move)], sizes[move.tensor])
        for move in at[1][tick]:
            _wait_for_ticket(run, move, tick)
        for move in at[2][tick]:
            _issue_transfer(run, move, links[_link_ends_of_move(move)], sizes[move.tensor])
        for move in at[3][tick]:
            _wait_for_ticket(run, move, tick)
        run.slots_ns.append(run.now_ns)
        run.spans.append(Span("compute", kernel.name, run.now_ns, run.now_ns + kernel.duration_ns))
        run.now_ns += kernel.duration_ns


def _issue_transfer(run: _Run, move: Move, link: Link, size_bytes: int) -> None:
    """Put a transfer at the end of its lane's queue."""
    start = max(run.now_ns, run.lanes[link])
    end = start + transfer_ns(link, size_bytes)
    run.tickets[move] = _Ticket(move, start, end, start > run.now_ns)
    run.lanes[link] = end
    track = f"evict:{link.target}" if isinstance(move, Evict) else f"fetch:{link.source}"
    run.spans.append(Span(track, move.tensor, start, end, size_bytes, move.tensor))


def _wait_for_ticket(run: _Run, move: Move, tick: int) -> None:
    """Compute waits for a ticket; one that was issued before the first step is long done.

    The cause is `late read` for a fetch that started when it was issued, else `link busy`: it queued, or it
    is a write that the link had not carried out in time.
    """
    ticket = run.tickets.get(move)
    if ticket is None or ticket.end_ns <= run.now_ns:
        return
    cause = "link busy" if ticket.queued or isinstance(move, Evict) else "late read"
    run.stalls.append(Stall(tick, move.tensor, ticket.end_ns - run.now_ns, cause))
    run.now_ns = ticket.end_ns


def _link_ends_of_move(move: Move) -> tuple[str, str]:
    return (DEVICE, move.to) if isinstance(move, Evict) else (move.source, DEVICE)


def device_bytes_by_kind(plan: Plan, profile: Profile) -> dict[str, list[int]]:
    """Bytes on the device by kind and tick, with `workspace` a kind; the plan is one that `check` accepts."""
    ticks = len(profile.kernels)
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    away = {home.tensor for home in plan.homes if home.tier != DEVICE}
    change: dict[str, list[int]] = defaultdict(lambda: [0] * (ticks + 1))
    for move in plan.moves:
        tensor = tensors[move.tensor]
        if isinstance(move, Evict):
            change[tensor.kind][move.free % ticks] -= tensor.size_bytes
        else:
            change[tensor.kind][move.trigger % ticks] += tensor.size_bytes
            if move.ready % ticks < move.trigger % ticks:  # in flight at the end: counts from the start
                away.discard(tensor.name)
    for tensor in profile.tensors:
        uses = (*tensor.reads, *tensor.writes)
        if tensor.persistent:
            change[tensor.kind][0] += 0 if tensor.name in away else tensor.size_bytes
        elif uses:
            change[tensor.kind][0 if tensor.kind == "input" else min(uses)] += tensor.size_bytes
            change[tensor.kind][max(uses) + 1] -= tensor.size_bytes
    rows: dict[str, list[int]] = {"workspace": [kernel.workspace_bytes for kernel in profile.kernels]}
    for kind, changes in change.items():
        total, rows[kind] = 0, []
        for delta in changes[:ticks]:
            total += delta
            rows[kind].append(total)
    return rows
