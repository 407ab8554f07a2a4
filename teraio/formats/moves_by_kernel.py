"""A plan spelled out: what is begun and what is waited for, before which kernel.

    evict, trigger and free     evict x -> ssd    ...    wait x (evict)     its bytes are gone from here on
    fetch, trigger and ready    fetch x <- ssd    ...    wait x (fetch)     its bytes are there from here on
    evict without a trigger     drop x                                      the ssd has the same bytes

Before a kernel what frees memory comes first and what takes it last; the waits for what the kernel needs
come when everything is under way. Moves of one sort keep the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from teraio.formats.plan import Evict, Fetch, Move, Plan
from teraio.units import fmt_count

# In the order in which a slot takes them.
_FREES, _EVICTS, _FETCHES, _WAITS = range(4)


@dataclass(frozen=True, slots=True)
class Act:
    """`of`: the tier that is written to or read from; of a wait, what it waits for."""

    verb: Literal["evict", "drop", "fetch", "wait"]
    tensor: str
    of: str

    def as_text(self) -> str:
        arrow = {"evict": f" -> {self.of}", "fetch": f" <- {self.of}", "wait": f" ({self.of})"}
        return f"{self.verb} {self.tensor}{arrow.get(self.verb, '')}"


def acts_by_tick(plan: Plan, length: int) -> dict[int, tuple[Act, ...]]:
    """By tick, for a step of so many ticks. A tick of the next step is the same one of every step."""
    found: dict[int, list[tuple[int, Act]]] = {}
    for move in plan.moves:
        for tick, order, act in _acts_of_move(move):
            found.setdefault(tick % length, []).append((order, act))
    return {
        tick: tuple(act for _, act in sorted(there, key=lambda each: each[0]))
        for tick, there in sorted(found.items())
    }


def plan_listing(plan: Plan, kernels: Sequence[str]) -> str:
    """Return a plan as lines for people: before which of the step's kernels what is begun and waited for."""
    told = [
        f"plan of {plan.planner}: {fmt_count(len(plan.moves), 'move')} in {fmt_count(len(kernels), 'tick')}"
    ]
    for tick, before in acts_by_tick(plan, max(len(kernels), 1)).items():
        told.append(f"  {tick:4}  before {kernels[tick]}: {'; '.join(act.as_text() for act in before)}")
    return "\n".join(told)


def _acts_of_move(move: Move) -> Iterator[tuple[int, int, Act]]:
    """(tick, order before its kernel, act)"""
    match move:
        case Evict(tensor, to, free, None):
            yield free, _FREES, Act("drop", tensor, to)
        case Evict(tensor, to, free, int(trigger)):
            yield trigger, _EVICTS if trigger < free else _FREES, Act("evict", tensor, to)
            yield free, _FREES, Act("wait", tensor, "evict")
        case Fetch(tensor, source, trigger, ready):
            yield trigger, _FETCHES, Act("fetch", tensor, source)
            yield ready, _WAITS, Act("wait", tensor, "fetch")
