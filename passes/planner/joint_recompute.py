"""What to make again, decided together with what moves. In: a problem. Out: names, and a bound.

The relaxation says which fraction of each tensor it would make again, if all of this were a fluid
(recompute_terms.py). That is nearly a decision: on steps of Llama 8B all but 1 to 6 of 450 fractions were 0
or 1. What it does not know is that a tensor may have to be made again long before it is used, because another
is made from it. A chain of such tensors goes through all layers: then all of it is made again at the
beginning of the backward. So where tensors come early, some are saved that all ways from them lead through,
the smallest on the way: all of these, every second, third or fourth. A solution of the relaxation also leaves
out a few of many that are alike, one per layer, where others would do as well: the set with those is tried,
too. And where what was made again would need more memory than there is until it is used, some of it is saved.

Each set is planned by greedy for a moment. Of those that are as fast within a little, the one whose own bound
is the lowest wins: a plan comes within a percent of that.
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

THRESHOLDS = (0.5, 0.05, 0.95)
SAVED = (1, 2, 3, 4)  # of those that would come early: all, every second, ...
ROUNDS = 4
EARLY = 0.1  # of the time for which a tensor would be away otherwise: that is early
FIRST = 4  # plans of greedy's portfolio that a set is judged by
SHARE = 0.4  # of the time limit, at most, for the relaxation; steps of Llama 8B take 4 to 7 s
TRIES_SHARE = 0.3  # likewise for plans of other sets than the first
NEAR = 1.02  # of what greedy reaches: it is not surer than that
LOOK_S = 5.0  # at the bound of a set; steps of Llama 8B take 0.3 s
NUMBER = re.compile(r"(?<![A-Za-z])\d+")  # layers.17.add1.out is like layers.3.add1.out


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """`bound_ns` holds for every plan that makes again any of what the profile says can be."""

    names: tuple[str, ...]
    bound_ns: int


def bound_with_recompute(
    problem: Problem, machine: Machine, budget_bytes: int, time_limit_s: float
) -> Bound | None:
    """Finds what no plan beats, whatever it makes again; None as for `choose_tensors_to_recompute`."""
    tell_progress("what to make again")
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
    """None: nothing is to be decided, because nothing can be made again or all of it fits. `spare`: the part
    of the budget that no kernel needs, because the kernels that then run will not be quite these."""
    begun = monotonic()
    lower = bound_with_recompute(problem, machine, budget_bytes, time_limit_s)
    if lower is None:
        return None
    names_of = [tensor.name for tensor in problem.profile.tensors]
    # Without a relaxation all of it, cheap or not, and none of it are the only sets there are.
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
    """Of these sets, fastest first, the one with the lowest bound, as far as there is time to look."""
    best: tuple[int, tuple[str, ...]] | None = None
    for names, step in steps.items() if len(steps) > 1 else ():
        if best is not None and monotonic() > stop:
            break
        found = lower_bound(step, machine, budget_bytes, time_limit_s=LOOK_S, refined=False)
        if best is None or found.step_ns < best[0]:
            best = found.step_ns, names
    return best[1] if best is not None else next(iter(steps), ())


def _add_alike_tensors(names: Sequence[str], possible: Sequence[str]) -> tuple[str, ...]:
    """With all of those that are alike but for a number, if more than half of them are made again."""
    alike = {name: NUMBER.sub("", name) for name in possible}
    among, taken = Counter(alike.values()), Counter(alike[name] for name in names)
    chosen = set(names)
    return tuple(name for name in possible if name in chosen or 2 * taken[alike[name]] > among[alike[name]])


def _recompute_sets_with_chains_cut(profile: Profile, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The set as it is, and, if anything of it comes early, with some of it saved."""
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
    """What would end the chains, in the order of the step."""
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
    """Of these, what no kernel needs more memory for: of what is there before it is used, the largest for
    longest is saved."""
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
    """The step of the best of greedy's first plans; None if there is none."""
    try:
        plans = islice(greedy_plans_with_periods(step, machine, budget_bytes, bound_ns), FIRST)
        return min((period_ns for _, period_ns in plans), default=None)
    except PlanError:
        return None
