"""Random valid plans. Gaps and ticks are drawn at random, and `teraio.formats.plan_check` must accept each
plan.

    tick    start      out ...... free ........ trigger ...... ready     end
    kernel  [last use]  | write    | evicted      | read        | resident [next use]

A gap is an idle interval of a tensor between two uses. A tick is the index of a kernel. Ticks count from the
start of the step in which the gap begins. Ticks at or beyond the step's length are in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

from teraio.formats.plan import Evict, Fetch, Home, Move, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile, Tensor

TIER = "ssd"


@dataclass(frozen=True)
class Gap:
    tensor: Tensor
    start: int
    end: int


@dataclass(frozen=True)
class Absence:
    gap: Gap
    out: int
    free: int
    trigger: int
    ready: int
    drop: bool = False

    def covers(self, tick: int) -> bool:
        return self.free <= tick < self.trigger


def gaps(profile: Profile) -> list[Gap]:
    """Return every gap between two uses of a tensor, if at least one kernel runs in the gap."""
    ticks = len(profile.kernels)
    found = []
    for tensor in profile.tensors:
        uses = tensor.uses_in_order(ticks) if _moves(tensor) else []
        following = [*uses[1:], *([uses[0] + ticks] if tensor.persistent and uses else [])]
        spans = ((start, end, start // ticks * ticks) for start, end in zip(uses, following))
        found += [Gap(tensor, start - lap, end - lap) for start, end, lap in spans if end - start > 1]
    return found


def _moves(tensor: Tensor) -> bool:
    """Return True if a plan may move the tensor. Inputs may not move, because they belong to the user."""
    return tensor.kind != "input" and tensor.size_bytes > 0


def working_set_bytes(profile: Profile) -> list[int]:
    """Return, per tick, the number of bytes that the kernel uses or that cannot move. The largest of these
    numbers is the smallest budget that a plan can have.
    """

    def needed(tensor: Tensor) -> Iterable[int]:
        uses = {*tensor.reads, *tensor.writes}
        return uses if uses and _moves(tensor) else _life(profile, tensor)

    return _ledger(profile, needed)


def resident_bytes(profile: Profile) -> list[int]:
    """Return, per tick, the number of bytes of all living tensors."""
    return _ledger(profile, lambda tensor: _life(profile, tensor))


def _life(profile: Profile, tensor: Tensor) -> Iterable[int]:
    ticks = len(profile.kernels)
    return (tick % ticks for tick in range(*tensor.life(ticks)))


def _ledger(profile: Profile, when: Callable[[Tensor], Iterable[int]]) -> list[int]:
    rows = [kernel.workspace_bytes for kernel in profile.kernels]
    for tensor in profile.tensors:
        for tick in when(tensor):
            rows[tick] += tensor.size_bytes
    return rows


def random_plan(profile: Profile, budget_bytes: int, share: float, seed: int) -> Plan:
    """Return a random valid plan that moves at least `share` of the bytes in gaps. A gap is an idle interval
    of a tensor. The budget must have room for the largest working set.
    """
    draw = Random(seed)
    todo = gaps(profile)
    draw.shuffle(todo)
    wanted = share * sum(gap.tensor.size_bytes for gap in todo)
    chosen: list[Absence] = []
    for gap in todo:
        if wanted <= 0:
            break
        wanted -= gap.tensor.size_bytes
        chosen.append(_absence(gap, draw))
    chosen = _within(profile, budget_bytes, todo, chosen, draw)
    chosen = _with_drops(profile, chosen, draw)
    plan = _plan(profile, budget_bytes, chosen)
    verdict = check_plan_against_profile(plan, profile)
    assert verdict.feasible, verdict.problems
    assert moved_share(profile, plan) >= share
    return plan


def moved_share(profile: Profile, plan: Plan) -> float:
    """Return the number of bytes that the plan fetches in a step, divided by the number of bytes in gaps."""
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    moved = sum(sizes[move.tensor] for move in plan.moves if isinstance(move, Fetch))
    return moved / max(1, sum(gap.tensor.size_bytes for gap in gaps(profile)))


def _absence(gap: Gap, draw: Random) -> Absence:
    """Draw the four ticks of an eviction and a fetch in the gap. Draw many ticks at the gap's ends, because
    the order of moves and kernels matters most at the ends.

    The eviction ends before the tick of the next use, because the engine never evicts a tensor that the next
    kernel needs.
    """
    first, last = gap.start + 1, gap.end
    ends = [draw.choice([first, last, draw.randint(first, last)]) for _ in range(4)]
    out, free, trigger, ready = sorted(ends)
    return Absence(gap, min(out, last - 1), min(free, last - 1), trigger, ready)


def _within(
    profile: Profile, budget_bytes: int, todo: list[Gap], chosen: list[Absence], draw: Random
) -> list[Absence]:
    """Evict more tensors, or evict tensors for longer, until the resident bytes are within the budget at
    every tick.
    """
    ticks = len(profile.kernels)
    absences = {absence.gap: absence for absence in chosen}
    rows = resident_bytes(profile)
    for absence in chosen:
        _count(rows, absence, -1)
    for tick in draw.sample(range(ticks), ticks):
        open_to = [(gap, at) for gap in todo for at in (tick, tick + ticks) if gap.start < at < gap.end]
        draw.shuffle(open_to)
        while rows[tick] > budget_bytes:
            gap, at = open_to.pop()  # if this list is empty, the budget is smaller than the working set
            old = absences.get(gap)
            if old is not None and old.covers(at):
                continue
            free = draw.randint(gap.start + 1, at) if old is None else min(old.free, at)
            trigger = draw.randint(at + 1, gap.end) if old is None else max(old.trigger, at + 1)
            new = Absence(
                gap, draw.randint(gap.start + 1, free), free, trigger, draw.randint(trigger, gap.end)
            )
            if old is not None:
                _count(rows, old, 1)
            _count(rows, new, -1)
            absences[gap] = new
    return list(absences.values())


def _count(rows: list[int], absence: Absence, sign: int) -> None:
    for tick in range(absence.free, absence.trigger):
        rows[tick % len(rows)] += sign * absence.gap.tensor.size_bytes


def _with_drops(profile: Profile, chosen: list[Absence], draw: Random) -> list[Absence]:
    """Turn up to half of the evictions into drops, which free memory without a write. A tensor can be dropped
    only while it has an unchanged copy.
    """
    kernels = tuple(replace(kernel, workspace_bytes=0) for kernel in profile.kernels)
    for index in draw.sample(range(len(chosen)), len(chosen) // 2):
        tensor = chosen[index].gap.tensor
        old, chosen[index] = chosen[index], replace(chosen[index], drop=True)
        alone = replace(profile, kernels=kernels, tensors=(tensor,))
        same = [absence for absence in chosen if absence.gap.tensor is tensor]
        if not check_plan_against_profile(_plan(alone, tensor.size_bytes, same), alone).feasible:
            chosen[index] = old
    return chosen


def _plan(profile: Profile, budget_bytes: int, absences: Iterable[Absence]) -> Plan:
    ticks = len(profile.kernels)
    moves: list[Move] = []
    homes: list[Home] = []
    for absence in absences:
        name = absence.gap.tensor.name
        out = absence.free if absence.drop else absence.out
        shift = out // ticks * ticks
        moves.append(Evict(name, TIER, absence.free - shift, None if absence.drop else out - shift))
        shift = absence.trigger // ticks * ticks
        moves.append(Fetch(name, TIER, absence.trigger - shift, absence.ready - shift))
        # The tensor is evicted or in flight at the end of the step, so the tensor's home is the slower tier.
        if absence.free < ticks <= absence.ready:
            homes.append(Home(name, TIER))
    return Plan("", "random", budget_bytes, tuple(homes), tuple(moves))


# ---- plans that are valid in a file, but that no planner makes

FAR = 2**33 - 1  # the last tick that is valid in a file
TIERS = (TIER, TIER, TIER, "host", "ssd9", "nowhere")


def hostile_plan(profile: Profile, budget_bytes: int, seed: int) -> Plan:
    """Return a senseless plan that is valid in a file. The reader of files accepts the plan, but plan_check
    may refuse it. The seed chooses the kind of plan.
    """
    draw = Random(seed)
    names = list(HOSTILE)
    homes, moves = HOSTILE[names[seed % len(names)]](profile, draw)
    budget = draw.choice((0, 1, budget_bytes, 2**53 - 1))
    plan = Plan("", names[seed % len(names)], budget, tuple(homes), tuple(moves))
    plan.validate()
    return plan


Orders = tuple[list[Home], list[Move]]


def _all_leave(profile: Profile, draw: Random) -> Orders:
    """Evict all tensors together, before any kernel. Fetch each tensor at its first use, or never."""
    ticks = len(profile.kernels)
    moves: list[Move] = []
    for tensor in profile.tensors:
        moves.append(Evict(tensor.name, TIER, draw.randint(0, 1), 0))
        used = min({*tensor.reads, *tensor.writes}, default=ticks)
        moves += [Fetch(tensor.name, TIER, used, used)] * draw.randint(0, 1)
    return [], moves


def _anything(profile: Profile, draw: Random) -> Orders:
    """Move any tensor to any tier, at any tick of this step, of the next step, or far beyond."""
    names = [*(tensor.name for tensor in profile.tensors), "nobody", "0"]
    ticks = [*range(2 * len(profile.kernels)), FAR]
    moves: list[Move] = []
    for _ in range(4 * len(names)):
        first, last = sorted(draw.choices(ticks, k=2))
        name, tier = draw.choice(names), draw.choice(TIERS)
        trigger = None if draw.random() < 0.2 else first
        moves.append(draw.choice((Evict(name, tier, last, trigger), Fetch(name, tier, first, last))))
    return [Home(name, draw.choice(TIERS)) for name in draw.sample(names, len(names) // 2)], moves


def _sensible(profile: Profile, draw: Random) -> list[Move]:
    moves = random_plan(profile, max(working_set_bytes(profile)), 0.5, draw.randrange(2**32)).moves
    return list(moves)


def _too_late(profile: Profile, draw: Random) -> Orders:
    """Delay the fetches of a valid plan until some kernels after the tick at which their tensors should be
    ready.
    """
    late = [
        replace(move, trigger=move.ready + by, ready=move.ready + by) if isinstance(move, Fetch) else move
        for move in _sensible(profile, draw)
        for by in (draw.randint(1, 9),)
    ]
    return [], late


def _too_early(profile: Profile, draw: Random) -> Orders:
    """Begin all fetches of a valid plan at the start of the step, even before the evictions."""
    early = [
        replace(move, trigger=0) if isinstance(move, Fetch) else move for move in _sensible(profile, draw)
    ]
    return [], early


def _out_of_order(profile: Profile, draw: Random) -> Orders:
    """Give each move the ticks of another move, and repeat moves."""
    moves = _sensible(profile, draw)
    ticks = [(m.trigger or 0, m.free if isinstance(m, Evict) else m.ready) for m in moves]
    draw.shuffle(ticks)
    other: list[Move] = [
        replace(move, trigger=first, free=last)
        if isinstance(move, Evict)
        else replace(move, trigger=first, ready=last)
        for move, (first, last) in zip(moves, ticks)
    ]
    both = [*other, *moves, *other]
    draw.shuffle(both)
    return [], both


def _all_dropped(profile: Profile, draw: Random) -> Orders:
    """Drop every tensor after each of its uses without writing a copy, as if the tensor had a clean copy."""
    moves: list[Move] = []
    for tensor in profile.tensors:
        for used in sorted({*tensor.reads, *tensor.writes}):
            moves.append(Evict(tensor.name, draw.choice(TIERS), used + draw.randint(0, 1)))
    return [Home(tensor.name, draw.choice(TIERS)) for tensor in profile.tensors], moves


HOSTILE: dict[str, Callable[[Profile, Random], Orders]] = {
    "all leave": _all_leave,
    "anything": _anything,
    "too late": _too_late,
    "too early": _too_early,
    "out of order": _out_of_order,
    "all dropped": _all_dropped,
}
