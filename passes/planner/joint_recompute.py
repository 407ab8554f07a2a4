"""The choice of tensors to recompute, made together with the moves.

In: a problem. Out: the names of these tensors, and a bound.

The relaxation is the linear program that gives the bound. It finds the fraction of each tensor that is
recomputed (recompute_terms.py). Nearly all fractions are 0 or 1: on steps of Llama 8B, only 1 to 6 of 450
fractions were in between. This module makes several candidate sets of tensors from the fractions:

- It cuts chains. If tensor B is recomputed from tensor A, then A is recomputed long before its own use. The
  relaxation ignores this. So a chain through all layers would be recomputed as a whole at the start of the
  backward. For each tensor A that is recomputed too early, the module can save one tensor instead. It
  considers A, and the tensors on every path from A to a use in time, and takes the smallest. Four candidate
  sets save all, every second, every third or every fourth of these smallest tensors.
- It completes sets. Many equal tensors, one in each layer, are equally good. The relaxation often leaves out
  a few of them. Another candidate set has all of the equal tensors.
- It trims sets. Recomputed tensors that wait for their use may take more memory than the budget has. The
  module then saves the tensors with the most bytes x waiting time.

Greedy makes a few plans for each set. Among the sets with nearly the fastest plan, the set with the lowest
bound wins, because the final plan is within a percent of its bound.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from time import monotonic

from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.formats.recompute import (
    fold_copies_into_workspace,
    profile_with_recomputation,
    replay_with_copies,
)
from teraio.progress import tell_progress

from .bound.bound import Bound, lower_bound
from .bound.recompute_terms import find_recompute_options
from .greedy.greedy import greedy_plans_with_periods
from .problem.problem import Problem, build_problem

THRESHOLDS = (0.5, 0.05, 0.95)  # for each value, one set: the tensors whose fraction is at least this value
# Some tensors would be recomputed long before their use, only as sources of others. If all tensors of
# `_tensors_that_cut_chains` are saved, there are none. For each n, one set saves every n-th of these tensors.
SAVED = (1, 2, 3, 4)
ROUNDS = 4
# A tensor is recomputed early if its new bytes wait too long for their first use. The limit is this part of
# the time between the last use of the original bytes and the first use of the new bytes.
EARLY = 0.1
FIRST = 4  # number of plans that greedy makes for each set
SHARE = 0.4  # the relaxation's share of the time limit; on steps of Llama 8B it takes 4 to 7 s
TRIES_SHARE = 0.3  # share of the time limit for the plans of all sets except the first
NEAR = 1.02  # sets up to this factor slower count as equally fast; greedy is not more precise
LOOK_S = 5.0  # time limit for the bound of a set; on steps of Llama 8B the bound takes 0.3 s
NUMBER = re.compile(r"(?<![A-Za-z])\d+")  # without numbers, layers.17.add1.out equals layers.3.add1.out


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The names of the tensors to recompute, and a lower bound on the step time. The bound holds for plans
    that recompute any tensors.
    """

    names: tuple[str, ...]
    bound_ns: int


def bound_with_recompute(
    problem: Problem, machine: Machine, budget_bytes: int, time_limit_s: float
) -> Bound | None:
    """Return a lower bound on the step time that holds for plans that recompute any tensors.

    Return None if no tensor can be recomputed, or if all tensors fit into the budget.
    """
    tell_progress("choosing tensors to recompute")
    again = find_recompute_options(problem)
    if not again or int(problem.live.max()) <= budget_bytes:
        return None
    return lower_bound(problem, machine, budget_bytes, time_limit_s=SHARE * time_limit_s, again=again)


def choose_tensors_to_recompute(
    problem: Problem,
    machine: Machine,
    budget_bytes: int,
    keep: Collection[str],
    time_limit_s: float,
    spare: float = 0.0,
) -> RecomputeChoice | None:
    """Return the tensors to recompute.

    Return None if no tensor can be recomputed, or if all tensors fit into the budget. `spare` is the part of
    the budget that kernels must leave free. When the step is compiled with recomputation, its kernels will
    differ slightly from the kernels of this problem.
    """
    begun = monotonic()
    lower = bound_with_recompute(problem, machine, budget_bytes, time_limit_s)
    if lower is None:
        return None
    names_of = [tensor.name for tensor in problem.profile.tensors]
    # If no relaxation was solved, every fraction is 1. Then all sets come from all tensors that can be
    # recomputed, without regard to the cost.
    fractions = lower.again or tuple((each.tensor, 1.0) for each in find_recompute_options(problem))
    taken = [tuple(names_of[i] for i, part in fractions if part >= least) for least in THRESHOLDS]
    whole = _add_alike_tensors(taken[0], [names_of[i] for i, _ in fractions])
    sets = [
        each
        for names in (taken[0], whole, *taken[1:])
        for each in _recompute_sets_with_chains_cut(problem.profile, names)
    ]
    stop = begun + (SHARE + TRIES_SHARE) * time_limit_s
    tried: set[tuple[str, ...]] = set()
    found: dict[tuple[str, ...], tuple[int, Problem]] = {}
    for each in [*sets, ()]:
        if found and monotonic() > stop:
            break
        fits = _trim_set_to_memory(problem.profile, each, int(budget_bytes * (1 - spare)))
        if fits in tried:
            continue
        tried.add(fits)
        step = build_problem(profile_with_recomputation(problem.profile, fits), machine, keep)
        step_ns = _best_greedy_step_ns(step, machine, budget_bytes, lower.step_ns)
        if step_ns is not None:
            found[fits] = step_ns, step
    fastest = sorted((step_ns, names) for names, (step_ns, _) in found.items())
    near = {names: found[names][1] for step_ns, names in fastest if step_ns <= fastest[0][0] * NEAR}
    return RecomputeChoice(_recompute_set_with_lowest_bound(near, machine, budget_bytes, stop), lower.step_ns)


def _recompute_set_with_lowest_bound(
    steps: Mapping[tuple[str, ...], Problem], machine: Machine, budget_bytes: int, stop: float
) -> tuple[str, ...]:
    """Return the set of recomputed tensors whose step has the lowest bound.

    `steps` maps each set to the problem of its step. The set with the fastest plan is first. When the time is
    up, return the best set so far.
    """
    best: tuple[int, tuple[str, ...]] | None = None
    for names, step in steps.items() if len(steps) > 1 else ():
        if best is not None and monotonic() > stop:
            break
        found = lower_bound(step, machine, budget_bytes, time_limit_s=LOOK_S, refined=False)
        if best is None or found.step_ns < best[0]:
            best = found.step_ns, names
    return best[1] if best is not None else next(iter(steps), ())


def _add_alike_tensors(names: Sequence[str], possible: Sequence[str]) -> tuple[str, ...]:
    """Return the set with similar tensors added.

    Tensors are similar if their names differ only in numbers. If the set has more than half of a group of
    similar tensors, add all tensors of the group.
    """
    alike = {name: NUMBER.sub("", name) for name in possible}
    among, taken = Counter(alike.values()), Counter(alike[name] for name in names)
    chosen = set(names)
    return tuple(name for name in possible if name in chosen or 2 * taken[alike[name]] > among[alike[name]])


def _recompute_sets_with_chains_cut(profile: Profile, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the set itself, and smaller sets.

    A smaller set saves tensors so that no tensor, or fewer tensors, are recomputed long before their use.
    """
    yield names
    for each in SAVED if _tensors_that_cut_chains(profile, names) else ():
        left = names
        for _ in range(ROUNDS):
            saved = set(_tensors_that_cut_chains(profile, left)[::each])
            left = tuple(name for name in left if name not in saved)
            if each > 1 or not saved or not left:
                break
        yield left


def _tensors_that_cut_chains(profile: Profile, names: tuple[str, ...]) -> list[str]:
    """Return the tensors to save so that no tensor is recomputed long before its use, in the order of the
    step.
    """
    import networkx as nx

    if not names:
        return []
    step, replay = replay_with_copies(profile, names)
    tensors, sink = profile.tensors, -1
    again = {tensor.name for tensor in step.kernels} - {kernel.name for kernel in profile.kernels}
    begins = [0, *accumulate(kernel.duration_ns for kernel in step.kernels)]
    early: list[int] = []
    ways = nx.DiGraph()
    ways.add_edges_from((made, source) for source, made in replay.made_from.edges if made in replay.again)
    ways.add_node(sink)
    for index, row in replay.again.items():
        made = begins[step.tensors[row].writes[0] + 1]
        uses = [tick for tick in step.tensors[row].reads if step.kernels[tick].name not in again]
        if index not in replay.chosen or not uses:
            continue
        last = max((*step.tensors[index].reads, *step.tensors[index].writes))
        if begins[uses[0]] - made > EARLY * (begins[uses[0]] - begins[last + 1]):
            early.append(index)
        else:
            ways.add_edge(sink, index)
    through = nx.immediate_dominators(ways, sink)
    picked: set[int] = set()
    for index in early:
        way, at = [index], index
        while through.get(at, sink) not in (sink, at):
            at = through[at]
            way += [at] if at in replay.chosen else []
        picked.add(min(way, key=lambda i: tensors[i].size_bytes))
    return [tensors[index].name for index in sorted(picked, key=lambda index: tensors[index].writes[0])]


def _trim_set_to_memory(profile: Profile, names: tuple[str, ...], most_bytes: int) -> tuple[str, ...]:
    """Remove tensors from the set until each kernel needs at most `most_bytes`. Return the smaller set.

    At the kernel that needs the most bytes, some recomputed tensors only wait for a later use. Remove the
    waiting tensor with the most bytes x ticks first. If no tensor waits, return an empty set.
    """
    while names:
        step, replay = replay_with_copies(profile, names)
        floor = build_problem(fold_copies_into_workspace(step, len(profile.tensors))).floor
        worst = int(floor.argmax())
        over = int(floor[worst]) - most_bytes
        if over <= 0:
            break
        waiting: list[tuple[int, int]] = []
        for index, row in replay.again.items():
            uses = (*step.tensors[row].reads, *step.tensors[row].writes)
            if index in replay.chosen and min(uses) <= worst <= max(uses) and worst not in uses:
                waiting.append((step.tensors[row].size_bytes * (max(uses) - min(uses)), index))
        saved: set[str] = set()
        for _, index in sorted(waiting, reverse=True):
            if over > 0:
                saved.add(profile.tensors[index].name)
                over -= profile.tensors[index].size_bytes
        if not saved:
            return ()
        names = tuple(name for name in names if name not in saved)
    return names


def _best_greedy_step_ns(step: Problem, machine: Machine, budget_bytes: int, bound_ns: int) -> int | None:
    """Return the shortest step time of greedy's first plans, or None if greedy finds no plan."""
    try:
        plans = islice(greedy_plans_with_periods(step, machine, budget_bytes, bound_ns), FIRST)
        return min((period_ns for _, period_ns in plans), default=None)
    except PlanError:
        return None
