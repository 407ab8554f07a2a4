"""What to make again, decided together with what moves. In: a problem. Out: names, and a bound.

The relaxation says which fraction of each tensor it would make again, if all of this were a fluid (again.py).
That is nearly a decision: on steps of Llama 8B all but 1 to 6 of 450 fractions were 0 or 1. So there are few
sets worth a look: what is at least so much made again, for a few thresholds, and nothing. The step of each is
planned by greedy for a moment; the one with the fastest plan wins.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from teraio.errors import PlanError
from teraio.machine import Machine
from teraio.recompute import recomputed

from .again import candidates
from .bound import lower_bound
from .greedy import portfolio
from .problem import Problem, build

THRESHOLDS = (0.5, 0.05, 0.95)
FIRST = 4  # plans of greedy's portfolio that a set is judged by
SHARE = 0.4  # of the time limit, at most, for the relaxation; steps of Llama 8B take 4 to 7 s
TRIES_SHARE = 0.3  # likewise for plans of other sets than the first


@dataclass(frozen=True, slots=True)
class Choice:
    """`bound_ns` holds for every plan that makes again any of what the profile says can be."""

    names: tuple[str, ...]
    bound_ns: int


def choose(
    problem: Problem, machine: Machine, budget_bytes: int, keep: Collection[str], time_limit_s: float
) -> Choice | None:
    """None: nothing is to be decided, because nothing can be made again or all of it fits."""
    begun = monotonic()
    again = candidates(problem)
    if not again or int(problem.live.max()) <= budget_bytes:
        return None
    lower = lower_bound(problem, machine, budget_bytes, time_limit_s=SHARE * time_limit_s, again=again)
    names = [tensor.name for tensor in problem.profile.tensors]
    # Without a relaxation all of it, cheap or not, and none of it are the only sets there are.
    fractions = lower.again or tuple((each.tensor, 1.0) for each in again)
    sets = [tuple(names[i] for i, part in fractions if part >= least) for least in THRESHOLDS]
    stop = begun + (SHARE + TRIES_SHARE) * time_limit_s
    best: tuple[int, tuple[str, ...]] | None = None
    for tried in dict.fromkeys([*sets, ()]):
        if best is not None and monotonic() > stop:
            break
        step_ns = _judged(problem, machine, budget_bytes, keep, tried, lower.step_ns)
        if step_ns is not None and (best is None or step_ns < best[0]):
            best = step_ns, tried
    return Choice(best[1] if best else (), lower.step_ns)


def _judged(
    problem: Problem,
    machine: Machine,
    budget_bytes: int,
    keep: Collection[str],
    names: tuple[str, ...],
    bound_ns: int,
) -> int | None:
    """The step of the best of greedy's first plans with these made again; None if there is none."""
    step = build(recomputed(problem.profile, names), machine, keep)
    if int(step.floor.max()) > budget_bytes:
        return None
    try:
        plans = islice(portfolio(step, machine, budget_bytes, bound_ns), FIRST)
        return min((period_ns for _, period_ns in plans), default=None)
    except PlanError:
        return None
