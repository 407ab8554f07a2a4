"""The moves of a plan, as acts before each kernel: begin an evict or a fetch, drop a copy, or wait.

    evict, trigger and free     evict x -> ssd    ...    wait x (evict)     then the bytes of x are free
    fetch, trigger and ready    fetch x <- ssd    ...    wait x (fetch)     then x is resident
    evict without a trigger     drop x                                      the ssd has the same bytes

The order before each kernel is: (1) acts that free memory, (2) begins of evicts, (3) begins of fetches, (4)
waits for fetches. So each transfer has begun before compute waits for a fetch. Acts of the same group keep
the order of the plan's moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from teraio.formats.plan import Evict, Fetch, Move, Plan
from teraio.units import fmt_count

# The order of the acts before one kernel.
_FREES, _EVICTS, _FETCHES, _WAITS = range(4)


@dataclass(frozen=True, slots=True)
class Act:
    """One act before a kernel. For a wait, `of` is the move to wait for: `evict` or `fetch`. Otherwise, `of`
    is the slower tier.
    """

    verb: Literal["evict", "drop", "fetch", "wait"]
    tensor: str
    of: str

    def as_text(self) -> str:
        arrow = {"evict": f" -> {self.of}", "fetch": f" <- {self.of}", "wait": f" ({self.of})"}
        return f"{self.verb} {self.tensor}{arrow.get(self.verb, '')}"


def acts_by_tick(plan: Plan, length: int) -> dict[int, tuple[Act, ...]]:
    """Return the acts by tick, for a step of `length` kernels. A tick is the index of a kernel. A tick in the
    next step becomes a tick of this step.
    """
    found: dict[int, list[tuple[int, Act]]] = {}
    for move in plan.moves:
        for tick, order, act in _acts_of_move(move):
            found.setdefault(tick % length, []).append((order, act))
    return {
        tick: tuple(act for _, act in sorted(acts, key=lambda each: each[0]))
        for tick, acts in sorted(found.items())
    }


def plan_listing(plan: Plan, kernels: Sequence[str]) -> str:
    """Return a plan as readable text, with one line for each kernel that has acts before it."""
    lines = [
        f"plan of {plan.planner}: {fmt_count(len(plan.moves), 'move')} in {fmt_count(len(kernels), 'tick')}"
    ]
    for tick, before in acts_by_tick(plan, max(len(kernels), 1)).items():
        lines.append(f"  {tick:4}  before {kernels[tick]}: {'; '.join(act.as_text() for act in before)}")
    return "\n".join(lines)


def _acts_of_move(move: Move) -> Iterator[tuple[int, int, Act]]:
    """Yield (tick, position in the order before the kernel, act) for each act of one move."""
    match move:
        case Evict(tensor, to, free, None):
            yield free, _FREES, Act("drop", tensor, to)
        case Evict(tensor, to, free, int(trigger)):
            yield trigger, _EVICTS if trigger < free else _FREES, Act("evict", tensor, to)
            yield free, _FREES, Act("wait", tensor, "evict")
        case Fetch(tensor, source, trigger, ready):
            yield trigger, _FETCHES, Act("fetch", tensor, source)
            yield ready, _WAITS, Act("wait", tensor, "fetch")
