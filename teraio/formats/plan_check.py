"""The check of a plan. In: plan, profile, machine. Out: a verdict with every problem found.

The check uses no code of the planners. It follows each tensor through the step. The tensor passes through
these states:

    device --evict issued--> leaving --free--> evicted --fetch issued--> arriving --ready--> device

A drop changes the state from `device` to `evicted` at once.

The ledger counts the bytes on the device at each tick, the index of a kernel. A tensor counts in full from
the trigger of its fetch until the `free` of its eviction. At one tick, things happen in this order: evictions
are issued, bytes become free, fetches are issued, fetches become ready, the kernel runs. A kernel may read a
leaving tensor, but must not write it.

A tick that is not smaller than the number of kernels lies in the next step. So a move may be in flight at the
end of the step. The state at the end must equal the state at the start. A tensor's home is the tier that has
its valid bytes at the start of the step. The home of a tensor in state `device` or `leaving` is the device.
The home of an evicted or arriving tensor is the slow tier.

An eviction writes a copy to a slow tier. This copy is good (equal to the tensor) from the eviction's `free`
until a kernel writes the tensor. If no kernel writes a tensor, its copy is written once, before the first
planned step, and is always good. A slow tier needs space for the copy of a persistent tensor during the whole
step. For any other tensor, it needs space from the first eviction until the last fetch is ready.

A tensor that lives around the end of the step (profile.py) also has a home, but the check follows it from its
birth. Its moves lie between its birth and its last use.

If a plan recomputes tensors, the step has more kernels (recompute.py). The ticks of the plan's moves count
the kernels of this longer step.
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
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile, Tensor

DEVICE = "device"
_State = Literal["on the device", "leaving", "evicted", "arriving", "not yet made"]
# Events of a tensor, numbered in their order within one tick. Then, for each event, the states before and
# after it.
_ISSUE_OUT, _FREE, _DROP, _ISSUE_IN, _READY, _USE = range(6)
_STEPS: dict[int, tuple[_State, _State]] = {
    _ISSUE_OUT: ("on the device", "leaving"),
    _FREE: ("leaving", "evicted"),
    _DROP: ("on the device", "evicted"),
    _ISSUE_IN: ("evicted", "arriving"),
    _READY: ("arriving", "on the device"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. The most bytes are on the device at `peak_tick` (0 for a step without
    kernels).
    """

    feasible: bool
    peak_bytes: int
    peak_tick: int
    problems: tuple[str, ...]


def check_plan_against_profile(plan: Plan, profile: Profile, machine: Machine | None = None) -> Verdict:
    """Check a plan: follow each tensor through the step, and return a verdict.

    Without a machine, do not check links and capacities.
    """
    problems: list[str] = []
    try:
        plan, profile = apply_plan_changes(plan, profile)
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
    """A check of one tensor. It applies the tensor's moves and uses in the order of the step."""

    tensor: Tensor
    profile: Profile
    home: str
    moves: tuple[Move, ...] | list[Move]
    state: _State = "on the device"
    pending: Move | None = None  # the move in flight, if the tensor is leaving or arriving
    copies: set[str] = field(default_factory=set)  # slow tiers that have a good copy, which equals the tensor
    written: set[int] = field(default_factory=set)
    counts_at_start: bool = False  # True if the tensor's bytes are on the device when the step begins

    def find_problem(self) -> str:
        """Follow the tensor through the step. Return the first problem, or "".

        Follow a persistent tensor twice. The first pass finds the copies that are good at the end of a step.
        The next step begins with these copies, so only the second pass checks them.
        """
        problem = self._find_malformed_move() or self._set_start_state()
        if problem:
            return problem
        start = (self.state, self.pending)
        events = self._sorted_moves_and_uses()
        if self.tensor.born is not None:
            return self._find_problem_from_birth(events)
        for copies_known in (False, True) if self.tensor.persistent else (True,):
            for tick, order, move in events:
                problem = self._apply_event(tick, order, move, copies_known)
                if problem:
                    return f"{_describe_tick(self.profile, tick)}: {problem}"
            if self.tensor.persistent and (self.state, self.pending) != start:
                return (
                    f"end of the step: {self.tensor.name!r} is {self.state}, but at its start it is"
                    f" {start[0]} (home {self.home!r})"
                )
        return ""

    def _find_problem_from_birth(self, events: list[tuple[int, int, Move | None]]) -> str:
        """Follow a tensor that lives around the end of the step, from its birth to its last use."""
        assert self.tensor.born is not None
        born, is_checked = self.tensor.born, False
        for tick, order, move in sorted(events, key=lambda event: event[0] < born):
            if tick < born and not is_checked:
                is_checked = True
                if problem := self._find_wrong_home():
                    return problem
            if problem := self._apply_event(tick, order, move, copies_known=True):
                return f"{_describe_tick(self.profile, tick)}: {problem}"
        return ""

    def _find_wrong_home(self) -> str:
        """Return a problem if the home does not fit the state at the end of the step, else ""."""
        self.counts_at_start = self.state != "evicted"
        homes = {DEVICE}
        if self.state == "arriving":
            assert isinstance(self.pending, Fetch)
            homes = {self.pending.source}
        elif self.state == "evicted":
            homes = self.copies
        if self.home in homes:
            return ""
        return (
            f"end of the step: {self.tensor.name!r} is {self.state}, so its home is one of {sorted(homes)},"
            f" not {self.home!r}"
        )

    def _lifetime_ticks(self) -> tuple[int, int]:
        """Return the first and last tick at which the tensor exists. A persistent tensor exists at all ticks.

        The last tick may lie in the next step. Return (0, -1) for a tensor that is not persistent and has no
        uses.
        """
        first, end = self.tensor.life(max(len(self.profile.kernels), 1))
        return first, end - 1

    def _span_in_life(self, move: Move) -> tuple[int, int]:
        """Return the first and last tick of a move. For a tensor with `born`, both count from the step of its
        birth.
        """
        start, end = _tick_span(move)
        if self.tensor.born is None:
            return start, end
        first = self.tensor.born + 1
        at = first + (start - first) % len(self.profile.kernels)
        return at, at + end - start

    def _find_malformed_move(self) -> str:
        """Return a problem with the ticks or tier of a move, or with the home. Return "" if there is none.

        These problems do not depend on the tensor's state.
        """
        name, ticks = self.tensor.name, len(self.profile.kernels)
        first, last = self._lifetime_ticks()
        for move in self.moves:
            start, end = _tick_span(move)
            if DEVICE in _slow_tiers_of((move,)):
                return f"{_describe_move(move)}: the device is not a tier to move to or from"
            if not 0 <= start <= end < start + ticks or start >= 2 * ticks:
                return f"{_describe_move(move)}: ticks {start} to {end} are no span within {ticks} kernels"
            born = first if self.tensor.kind == "input" else first + 1
            start, end = self._span_in_life(move)
            if not self.tensor.persistent and not born <= start <= end <= last:
                return (
                    f"{_describe_move(move)}: ticks {start} to {end} lie outside the life of {name!r}, "
                    f"which is made at tick {first} and last used at {last}"
                )
        if not self.tensor.outlives_step and self.home != DEVICE:
            return f"home of {name!r} is {self.home!r}, but the tensor is not persistent"
        return ""

    def _set_start_state(self) -> str:
        """Set the tensor's state at the start of the step. It follows from the home, and from a move in
        flight.

        Return a problem, or "".
        """
        ticks = len(self.profile.kernels)
        self.written = set(self.tensor.writes)
        if not self.tensor.persistent:
            self.state = "on the device" if self.tensor.kind == "input" else "not yet made"
            return ""
        in_flight = [m for m in self.moves if _tick_span(m)[1] % ticks < _tick_span(m)[0] % ticks]
        if len(in_flight) > 1:
            return (
                f"{_describe_move(in_flight[0])} and {_describe_move(in_flight[1])}: both are in flight "
                "at the end of the step"
            )
        self.state = "on the device" if self.home == DEVICE else "evicted"
        for move in in_flight:
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
        """Return the events of the tensor in order, each as (tick within the step, order within the tick,
        move).

        For a use by a kernel, the move is None.
        """
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

    def _apply_event(self, tick: int, order: int, move: Move | None, copies_known: bool) -> str:
        """Apply one event to the tensor's state. Return a problem, or "".

        Check whether copies are good only if `copies_known` is True.
        """
        if move is None:
            return self._apply_use(tick)
        needed, after = _STEPS[order]
        if self.state != needed:
            return f"{_describe_move(move)}: the tensor is {self.state}, not {needed}"
        if order in (_FREE, _READY) and self.pending is not move:
            return f"{_describe_move(move)}: another move of the tensor is in flight"
        if copies_known and isinstance(move, Evict) and move.trigger is None and move.to not in self.copies:
            return (
                f"{_describe_move(move)}: there is no good copy in {move.to!r} (good ones: "
                f"{sorted(self.copies)};"
                f" written by the kernels at ticks {sorted(self.written)})"
            )
        if copies_known and isinstance(move, Fetch) and move.source not in self.copies:
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
        """Apply a kernel's read or write of the tensor. Return a problem, or ""."""
        if self.state in ("evicted", "arriving"):
            return f"used by the kernel, but {self.tensor.name!r} is {self.state}"
        if tick in self.written:
            if self.state == "leaving":
                return f"written by the kernel while {self.tensor.name!r} is leaving: its copy would be torn"
            self.copies.clear()
        if self.state == "not yet made":
            self.state = "on the device"
        return ""

    def resident_byte_changes(self) -> Iterator[tuple[int, int]]:
        """Yield (tick, change in bytes) for each change of the tensor's bytes on the device.

        Call this only if the check found no problem with the tensor.
        """
        size, ticks = self.tensor.size_bytes, len(self.profile.kernels)
        first, last = self._lifetime_ticks()
        if self.tensor.born is not None:
            yield first, size
            yield 0, size * self.counts_at_start
        elif self.home == DEVICE or any(
            _tick_span(m)[1] % ticks < _tick_span(m)[0] % ticks for m in self.moves
        ):
            # A fetch in flight at the end of the step counts in full from the first tick on.
            yield first, size
        for move in self.moves:
            yield (move.trigger % ticks, size) if isinstance(move, Fetch) else (move.free % ticks, -size)
        # A persistent tensor ends in the extra row after the last tick.
        yield last + 1 if last < ticks else last + 1 - ticks, -size

    def byte_changes_if_never_moved(self) -> Iterator[tuple[int, int]]:
        """Yield (tick, change in bytes) as if the tensor never moved.

        The ledger uses these changes for a tensor with a problem. If it left out this tensor, the peak would
        be too low.
        """
        for first, end in self._within_step(*self.tensor.life(max(len(self.profile.kernels), 1))):
            yield first, self.tensor.size_bytes
            yield end, -self.tensor.size_bytes

    def copy_spans_by_tier(self) -> Iterator[tuple[str, int, int]]:
        """Yield (tier, first tick, last tick + 1) for each slow tier that holds a copy of the tensor.

        Yield two entries for a tier that holds the copy around the end of the step.
        """
        ticks = len(self.profile.kernels)
        for tier in sorted(_slow_tiers_of(self.moves) | ({self.home} - {DEVICE})):
            if self.tensor.persistent:
                yield tier, 0, ticks
            else:
                spans = [self._span_in_life(m) for m in self.moves if tier in _slow_tiers_of((m,))]
                held = min(start for start, _ in spans), max(end for _, end in spans) + 1
                for first, end in self._within_step(*held):
                    yield tier, first, end

    def _within_step(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the range, or its two parts if it goes on in the next step."""
        ticks = max(len(self.profile.kernels), 1)
        if first < ticks:
            yield first, min(end, ticks)
        if end > ticks:
            yield max(first - ticks, 0), end - ticks


def _moves_and_homes_by_tensor(
    plan: Plan, profile: Profile, problems: list[str]
) -> tuple[dict[str, list[Move]], dict[str, str]]:
    """Return the moves and the home of each tensor. Append a problem for each unknown name and each second
    home.
    """
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
    """Yield a problem for each move over a link that the machine lacks, and for each home in an unknown
    tier.
    """
    tiers = {tier.name for tier in machine.tiers}
    links = {(link.source, link.target) for link in machine.links}
    first_moves: dict[tuple[str, str], str] = {}
    for move in plan.moves:
        route = (DEVICE, move.to) if isinstance(move, Evict) else (move.source, DEVICE)
        first_moves.setdefault(route, _describe_move(move))
    for route, move_text in first_moves.items():
        if route not in links:
            yield f"{move_text}: machine {machine.name!r} has no link from {route[0]!r} to {route[1]!r}"
    for home in plan.homes:
        if home.tier not in tiers:
            yield f"home of {home.tensor!r}: machine {machine.name!r} has no tier {home.tier!r}"


def _problems_of_overfull_tiers(machine: Machine, peak: int, held: dict[str, list[int]]) -> Iterator[str]:
    """Yield a problem for each tier that would hold more bytes than its capacity."""
    highest = {tier: max(accumulate(change)) for tier, change in held.items()}
    highest[DEVICE] = peak
    for tier in machine.tiers:
        if highest.get(tier.name, 0) > tier.capacity_bytes:
            yield (
                f"tier {tier.name!r}: the plan needs {highest[tier.name]} bytes, the capacity is"
                f" {tier.capacity_bytes}"
            )


def _tick_span(move: Move) -> tuple[int, int]:
    """Return the first and last tick of a move. For a drop, both are the same tick."""
    if isinstance(move, Fetch):
        return move.trigger, move.ready
    return (move.free if move.trigger is None else move.trigger), move.free


def _slow_tiers_of(moves: Iterable[Move]) -> set[str]:
    return {move.to if isinstance(move, Evict) else move.source for move in moves}


def _describe_move(move: Move) -> str:
    """Describe a move for a message."""
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
