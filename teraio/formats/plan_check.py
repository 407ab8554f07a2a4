"""Does this plan keep its promises? In: plan, profile, machine. Out: a verdict with every problem found.

It knows nothing of any planner. Each tensor is followed once around the step through four states

    device --evict issued--> leaving --free--> away --fetch issued--> arriving --ready--> device

(a drop goes from device to away at once), and its bytes enter a ledger with one row per tick. Bytes count in
full from the trigger of a fetch and until the `free` of an eviction. At one tick things happen in this order:
evictions are issued, bytes become free, fetches are issued, fetches are ready, the kernel runs. So a tensor
may be read while it leaves, never written.

What stands around the end of the step: ticks at or beyond the number of kernels lie in the next step, so a
move may be in flight at the end, and the state at the end must be the state at the start. The home of a
tensor is where its good bytes are at that moment: `device` while it is there or leaving, the slow tier while
it is away or arriving.

Clean and dirty follow from `writes`: a copy in a slow tier is good from the `free` of the eviction that wrote
it until a kernel writes the tensor. A tensor that no kernel writes is always clean: its copy is made once,
before the first planned step, and not in every step. A slow tier holds a persistent tensor's copy for the
whole step, and that of any other tensor from its first eviction until its last fetch is ready.

Where a plan makes tensors again, the step that is followed is the longer one (recompute.py), and the ticks of
its moves are that step's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Fetch, Move, Plan
from teraio.formats.profile import Profile, Tensor
from teraio.formats.recompute import apply_plan_recompute

DEVICE = "device"
_State = Literal["on the device", "leaving", "away", "arriving", "not yet made"]
# Events, numbered in their order at one tick (see above), and the state each takes a tensor from and to.
_ISSUE_OUT, _FREE, _DROP, _ISSUE_IN, _READY, _USE = range(6)
_STEPS: dict[int, tuple[_State, _State]] = {
    _ISSUE_OUT: ("on the device", "leaving"),
    _FREE: ("leaving", "away"),
    _DROP: ("on the device", "away"),
    _ISSUE_IN: ("away", "arriving"),
    _READY: ("arriving", "on the device"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check found. `peak_tick` is where the ledger is highest (0 for a step without kernels)."""

    feasible: bool
    peak_bytes: int
    peak_tick: int
    problems: tuple[str, ...]


def check_plan_against_profile(plan: Plan, profile: Profile, machine: Machine | None = None) -> Verdict:
    """Follow every tensor through the step. Without a machine, links and capacities are not looked at."""
    problems: list[str] = []
    try:
        plan, profile = apply_plan_recompute(plan, profile)
    except PlanError as error:
        problems.append(str(error))
    moves, homes = _moves_and_homes_by_tensor(plan, profile, problems)
    if machine is not None:
        problems += _problems_of_missing_links(plan, machine)
    ticks = max(len(profile.kernels), 1)
    change = [0] * (ticks + 1)
    held: dict[str, list[int]] = defaultdict(lambda: [0] * (ticks + 1))
    for tensor in profile.tensors:
        walk = _TensorWalk(tensor, profile, homes.get(tensor.name, DEVICE), moves.get(tensor.name, ()))
        problem = walk.find_problem()
        if problem:
            problems.append(problem)
        for tick, delta_bytes in (
            walk.resident_byte_changes() if not problem else walk.byte_changes_if_never_moved()
        ):
            change[tick] += delta_bytes
        for tier, first, end in walk.copy_spans_by_tier() if not problem else ():
            held[tier][first] += tensor.size_bytes
            held[tier][end] -= tensor.size_bytes
    ledger = list(accumulate(change))[:ticks]
    for tick, kernel in enumerate(profile.kernels):
        ledger[tick] += kernel.workspace_bytes
    peak = max(ledger)
    where = ledger.index(peak)
    if peak > plan.budget_bytes:
        problems.append(
            f"{_describe_tick(profile, where)}: {peak} bytes are on the device, the plan's budget is"
            f" {plan.budget_bytes} ({peak - plan.budget_bytes} too many)"
        )
    if machine is not None:
        problems += _problems_of_overfull_tiers(machine, peak, held)
    return Verdict(not problems, peak, where, tuple(problems))


@dataclass(slots=True)
class _TensorWalk:
    """One tensor's way around the step."""

    tensor: Tensor
    profile: Profile
    home: str
    moves: tuple[Move, ...] | list[Move]
    state: _State = "on the device"
    pending: Move | None = None  # the move in flight while leaving or arriving
    copies: set[str] = field(default_factory=set)  # slow tiers whose copy is good
    written: set[int] = field(default_factory=set)

    def find_problem(self) -> str:
        """Walk once; twice if persistent, because the first lap finds which copies the step before left good.

        Out: the first problem, or an empty string.
        """
        problem = self._find_malformed_move() or self._set_start_state()
        if problem:
            return problem
        start = (self.state, self.pending)
        events = self._sorted_moves_and_uses()
        for judged in (False, True) if self.tensor.persistent else (True,):
            for tick, order, move in events:
                problem = self._apply_event(tick, order, move, judged)
                if problem:
                    return f"{_describe_tick(self.profile, tick)}: {problem}"
            if self.tensor.persistent and (self.state, self.pending) != start:
                return (
                    f"end of the step: {self.tensor.name!r} is {self.state}, but at its start it is"
                    f" {start[0]} (home {self.home!r})"
                )
        return ""

    def _lifetime_ticks(self) -> tuple[int, int]:
        """First and last tick at which the tensor exists; (0, -1) if it is short-lived and never used."""
        uses = (*self.tensor.reads, *self.tensor.writes)
        if self.tensor.persistent:
            return 0, max(len(self.profile.kernels), 1) - 1
        if not uses:
            return 0, -1
        return 0 if self.tensor.kind == "input" else min(uses), max(uses)

    def _find_malformed_move(self) -> str:
        """Ticks that mean nothing, whatever the state is."""
        name, ticks = self.tensor.name, len(self.profile.kernels)
        first, last = self._lifetime_ticks()
        for move in self.moves:
            start, end = _tick_span(move)
            if DEVICE in _slow_tiers_of((move,)):
                return f"{_describe_move(move)}: the device is not a tier to move to or from"
            if not 0 <= start <= end < start + ticks or start >= 2 * ticks:
                return f"{_describe_move(move)}: ticks {start} to {end} are no span within {ticks} kernels"
            born = first if self.tensor.kind == "input" else first + 1
            if not self.tensor.persistent and not born <= start <= end <= last:
                return (
                    f"{_describe_move(move)}: ticks {start} to {end} lie outside the life of {name!r}, "
                    "which is"
                    f" made at tick {first} and last used at {last}"
                )
        if not self.tensor.persistent and self.home != DEVICE:
            return f"home of {name!r} is {self.home!r}, but it does not live beyond the end of the step"
        return ""

    def _set_start_state(self) -> str:
        """The state at the start of the step, from the home and from the move that is in flight there."""
        ticks = len(self.profile.kernels)
        self.written = set(self.tensor.writes)
        if not self.tensor.persistent:
            self.state = "on the device" if self.tensor.kind == "input" else "not yet made"
            return ""
        flying = [move for move in self.moves if _tick_span(move)[1] % ticks < _tick_span(move)[0] % ticks]
        if len(flying) > 1:
            return (
                f"{_describe_move(flying[0])} and {_describe_move(flying[1])}: both are in flight "
                "at the end of the step"
            )
        self.state = "on the device" if self.home == DEVICE else "away"
        for move in flying:
            self.pending = move
            self.state = "leaving" if isinstance(move, Evict) else "arriving"
            expected = DEVICE if isinstance(move, Evict) else move.source
            if self.home != expected:
                return (
                    f"{_describe_move(move)}: in flight at the end of the step, so the home is {expected!r},"
                    f" not {self.home!r}"
                )
        self.copies = {self.home}
        if not self.written:
            self.copies |= {move.to for move in self.moves if isinstance(move, Evict)}
        return ""

    def _sorted_moves_and_uses(self) -> list[tuple[int, int, Move | None]]:
        """(tick within the step, order within the tick, move); uses have no move."""
        ticks = len(self.profile.kernels)
        events: list[tuple[int, int, Move | None]] = [
            (tick, _USE, None) for tick in sorted({*self.tensor.reads, *self.tensor.writes})
        ]
        for move in self.moves:
            start, end = _tick_span(move)
            match move:
                case Fetch():
                    events += [(start % ticks, _ISSUE_IN, move), (end % ticks, _READY, move)]
                case Evict(trigger=None):
                    events.append((end % ticks, _DROP, move))
                case Evict():
                    events += [(start % ticks, _ISSUE_OUT, move), (end % ticks, _FREE, move)]
        return sorted(events, key=lambda event: event[:2])

    def _apply_event(self, tick: int, order: int, move: Move | None, judged: bool) -> str:
        """One event. Out: what is wrong with it, or "". `judged`: it is known which copies are good."""
        if move is None:
            return self._apply_use(tick)
        needed, after = _STEPS[order]
        if self.state != needed:
            return f"{_describe_move(move)}: it is {self.state}, not {needed}"
        if order in (_FREE, _READY) and self.pending is not move:
            return f"{_describe_move(move)}: another move of it is in flight"
        if judged and isinstance(move, Evict) and move.trigger is None and move.to not in self.copies:
            return (
                f"{_describe_move(move)}: there is no good copy in {move.to!r} (good ones: "
                f"{sorted(self.copies)};"
                f" written by the kernels at ticks {sorted(self.written)})"
            )
        if judged and isinstance(move, Fetch) and move.source not in self.copies:
            return (
                f"{_describe_move(move)}: there is no good copy in {move.source!r} (good ones: "
                f"{sorted(self.copies)})"
            )
        if order == _FREE and isinstance(move, Evict):
            self.copies.add(move.to)
        self.state = after
        self.pending = move if order in (_ISSUE_OUT, _ISSUE_IN) else None
        return ""

    def _apply_use(self, tick: int) -> str:
        """A kernel reads or writes the tensor."""
        if self.state in ("away", "arriving"):
            return f"used by the kernel, but {self.tensor.name!r} is {self.state}"
        if tick in self.written:
            if self.state == "leaving":
                return f"written by the kernel while {self.tensor.name!r} is leaving: its copy would be torn"
            self.copies.clear()
        if self.state == "not yet made":
            self.state = "on the device"
        return ""

    def resident_byte_changes(self) -> Iterator[tuple[int, int]]:
        """(tick, change in bytes) of a walk without problems, as rows for the ledger."""
        size, ticks = self.tensor.size_bytes, len(self.profile.kernels)
        first, last = self._lifetime_ticks()
        if self.home == DEVICE or any(
            _tick_span(m)[1] % ticks < _tick_span(m)[0] % ticks for m in self.moves
        ):
            yield first, size  # a fetch in flight at the end of the step counts in full
        for move in self.moves:
            yield (move.trigger % ticks, size) if isinstance(move, Fetch) else (move.free % ticks, -size)
        yield last + 1, -size  # only the row after the last tick of a persistent one

    def byte_changes_if_never_moved(self) -> Iterator[tuple[int, int]]:
        """The same for a walk that failed: counted as never moving, so that the peak is not flattered."""
        first, last = self._lifetime_ticks()
        yield first, self.tensor.size_bytes
        yield last + 1, -self.tensor.size_bytes

    def copy_spans_by_tier(self) -> Iterator[tuple[str, int, int]]:
        """(tier, first tick, tick after the last) for each slow tier that holds a copy."""
        ticks = len(self.profile.kernels)
        for tier in sorted(_slow_tiers_of(self.moves) | ({self.home} - {DEVICE})):
            if self.tensor.persistent:
                yield tier, 0, ticks
            else:
                spans = [_tick_span(m) for m in self.moves if tier in _slow_tiers_of((m,))]
                yield tier, min(start for start, _ in spans), max(end for _, end in spans) + 1


def _moves_and_homes_by_tensor(
    plan: Plan, profile: Profile, problems: list[str]
) -> tuple[dict[str, list[Move]], dict[str, str]]:
    """Moves and homes by tensor name; unknown names and second homes become problems."""
    known = {tensor.name for tensor in profile.tensors}
    moves: dict[str, list[Move]] = defaultdict(list)
    for move in plan.moves:
        if move.tensor not in known:
            problems.append(f"{_describe_move(move)}: no tensor of that name in profile {profile.name!r}")
        elif not profile.kernels:
            problems.append(f"{_describe_move(move)}: the step has no kernels, so nothing can move")
        else:
            moves[move.tensor].append(move)
    homes: dict[str, str] = {}
    for home in plan.homes:
        if home.tensor not in known:
            problems.append(f"home of {home.tensor!r}: no tensor of that name in profile {profile.name!r}")
        elif home.tensor in homes:
            problems.append(f"home of {home.tensor!r}: both {homes[home.tensor]!r} and {home.tier!r}")
        else:
            homes[home.tensor] = home.tier
    return moves, homes


def _problems_of_missing_links(plan: Plan, machine: Machine) -> Iterator[str]:
    """Tiers and links that the plan uses and the machine lacks, each said once."""
    tiers = {tier.name for tier in machine.tiers}
    links = {(link.source, link.target) for link in machine.links}
    wanted: dict[tuple[str, str], str] = {}
    for move in plan.moves:
        route = (DEVICE, move.to) if isinstance(move, Evict) else (move.source, DEVICE)
        wanted.setdefault(route, _describe_move(move))
    for route, who in wanted.items():
        if route not in links:
            yield f"{who}: machine {machine.name!r} has no link from {route[0]!r} to {route[1]!r}"
    for home in plan.homes:
        if home.tier not in tiers:
            yield f"home of {home.tensor!r}: machine {machine.name!r} has no tier {home.tier!r}"


def _problems_of_overfull_tiers(machine: Machine, peak: int, held: dict[str, list[int]]) -> Iterator[str]:
    """Tiers that must hold more than they can."""
    highest = {tier: max(accumulate(change)) for tier, change in held.items()}
    highest[DEVICE] = peak
    for tier in machine.tiers:
        if highest.get(tier.name, 0) > tier.capacity_bytes:
            yield (
                f"tier {tier.name!r}: the plan puts {highest[tier.name]} bytes there, its capacity is"
                f" {tier.capacity_bytes}"
            )


def _tick_span(move: Move) -> tuple[int, int]:
    """First and last tick of a move; a drop has only one."""
    if isinstance(move, Fetch):
        return move.trigger, move.ready
    return (move.free if move.trigger is None else move.trigger), move.free


def _slow_tiers_of(moves: Iterable[Move]) -> set[str]:
    return {move.to if isinstance(move, Evict) else move.source for move in moves}


def _describe_move(move: Move) -> str:
    """A move as people say it."""
    match move:
        case Fetch():
            return f"fetch of {move.tensor!r} from {move.source!r} (ticks {move.trigger} to {move.ready})"
        case Evict(trigger=None):
            return f"drop of {move.tensor!r} to {move.to!r} (tick {move.free})"
        case _:
            return f"evict of {move.tensor!r} to {move.to!r} (ticks {move.trigger} to {move.free})"


def _describe_tick(profile: Profile, tick: int) -> str:
    if not profile.kernels:
        return "a step without kernels"
    return f"tick {tick} (kernel {profile.kernels[tick].name!r})"
