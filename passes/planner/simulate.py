"""How long does a step take with this plan? In: plan, profile, machine. Out: a predicted timeline.

Event by event, at tick k, which is entered when kernel k-1 ends:

    issue the evictions triggered at k -> wait for those that are free at k
    -> issue the fetches triggered at k -> wait for those that are ready at k -> run kernel k

Each link is one lane that serves its transfers in the order they were issued, one at a time, latency
included. Links are independent here: one that `shares` a bandwidth runs at its own rate, so where links
share, the result is optimistic. Steps follow each other until they look alike; the timeline is one such step,
and it starts at 0. A plan without moves is simulated as it stands: what an engine fetches on demand is not in
it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from teraio.machine import Link, Machine
from teraio.plan import Evict, Fetch, Move, Plan
from teraio.profile import Profile
from teraio.timeline import Counter, Span, Stall, Timeline

from .problem import DEVICE, transfer_ns

MOST_STEPS = 12  # steps until we stop waiting for three alike


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
    run, _ = _settle(plan, profile, machine)
    spans = [
        Span(s.track, s.name, s.start_ns - run.begun_ns, s.end_ns - run.begun_ns, s.bytes, s.tensor)
        for s in run.spans
    ]
    counters: list[Counter] = []
    for kind, rows in sorted(device_bytes(plan, profile).items()):
        for tick, size in enumerate(rows):
            if tick == 0 or size != rows[tick - 1]:
                counters.append(Counter(DEVICE, kind, run.slots_ns[tick] - run.begun_ns, size))
    counters.sort(key=lambda counter: counter.at_ns)
    return Timeline("predicted", tuple(spans), tuple(counters), tuple(run.stalls))


def step_ns(plan: Plan, profile: Profile, machine: Machine) -> int:
    """The period: time from the start of one step to the start of the next, once steps look alike."""
    return _settle(plan, profile, machine)[1]


def entered_ns(plan: Plan, profile: Profile, machine: Machine) -> tuple[list[int], int]:
    """When each tick of a settled step is entered (before its waits), and the period."""
    run, period = _settle(plan, profile, machine)
    entered = [0]
    for slot_ns, kernel in zip(run.slots_ns[:-1], profile.kernels, strict=False):
        entered.append(slot_ns + kernel.duration_ns - run.begun_ns)
    return entered, period


def _settle(plan: Plan, profile: Profile, machine: Machine) -> tuple[_Run, int]:
    """Run steps until three in a row took the same time.

    The recurrence may also settle on a cycle of several steps; then the mean of the later half counts,
    rounded up. No period is shorter than the kernels together or than what one lane carries per step, so the
    result is not either.
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
        link = links[_route(move)]
        busy[link] += transfer_ns(link, sizes[move.tensor])
    run, took = _Run(), [-1, -2, -3]
    while len(took) < MOST_STEPS + 3 and len(set(took[-3:])) > 1:
        run.begun_ns = run.now_ns
        _step(run, at, profile, links, sizes)
        took.append(run.now_ns - run.begun_ns)
    later = took[-MOST_STEPS // 2 :]
    period = took[-1] if took[-1] == took[-2] else -(-sum(later) // len(later))
    return run, max(period, sum(kernel.duration_ns for kernel in profile.kernels), *busy.values(), 0)


def _step(
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
            _issue(run, move, links[_route(move)], sizes[move.tensor])
        for move in at[1][tick]:
            _wait(run, move, tick)
        for move in at[2][tick]:
            _issue(run, move, links[_route(move)], sizes[move.tensor])
        for move in at[3][tick]:
            _wait(run, move, tick)
        run.slots_ns.append(run.now_ns)
        run.spans.append(Span("compute", kernel.name, run.now_ns, run.now_ns + kernel.duration_ns))
        run.now_ns += kernel.duration_ns


def _issue(run: _Run, move: Move, link: Link, size_bytes: int) -> None:
    """Put a transfer at the end of its lane's queue."""
    start = max(run.now_ns, run.lanes[link])
    end = start + transfer_ns(link, size_bytes)
    run.tickets[move] = _Ticket(move, start, end, start > run.now_ns)
    run.lanes[link] = end
    track = f"evict:{link.target}" if isinstance(move, Evict) else f"fetch:{link.source}"
    run.spans.append(Span(track, move.tensor, start, end, size_bytes, move.tensor))


def _wait(run: _Run, move: Move, tick: int) -> None:
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


def _route(move: Move) -> tuple[str, str]:
    return (DEVICE, move.to) if isinstance(move, Evict) else (move.source, DEVICE)


def device_bytes(plan: Plan, profile: Profile) -> dict[str, list[int]]:
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
