"""Which tensors can be made again, and what a step is with some of them made again. Profile in, profile out.

A tensor that is made again is not there between two of its uses, where the step goes from the call that
makes it to a later one (or, if all uses are in one call, in its longest gap). Just before the use that ends
this, the kernels that make it run once more:

    tick        w    ..  last          first                                w    ..  last        first
    a          [make] .. [use]  ....   [use]      a is made again:   a     [make] .. [use]
    b  (dies)  [use]                              ---------------->  a.again                [w.again][use]

What such a kernel reads is there, or has been made again, or is made again with it: then its kernels run,
too. What the later call reads anyway stays until it is read for this. Kernels of a chain that make no tensor
of the profile (a measured one knows only what can move) run again with it. No kernel runs again twice for the
same tensor. What was made again lives inside the program that makes it, until its last use there: it cannot
move, so it counts as workspace of the kernels meanwhile.

`profile_with_recomputation` returns an ordinary profile. Planners, simulators and the check know nothing
else, so the ticks in the moves of a plan with `recompute` are those of this longer step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from teraio.errors import PlanError
from teraio.formats.plan import Plan
from teraio.formats.profile import Kernel, Profile, Tensor


@dataclass(frozen=True, slots=True)
class RecomputeGap:
    """For a tensor, by index: the kernel that makes it, and between which uses it is not there if it is made
    again."""

    tensor: int
    made: int
    last: int
    first: int


@dataclass(slots=True)
class KernelAccesses:
    """Who touches what: tensors by kernel, and the kernels that may run again."""

    profile: Profile
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reads = [[] for _ in self.profile.kernels]
        self.writes = [[] for _ in self.profile.kernels]
        for index, tensor in enumerate(self.profile.tensors):
            for tick in tensor.reads:
                self.reads[tick].append(index)
            for tick in tensor.writes:
                self.writes[tick].append(index)

    def can_rerun_kernel(self, tick: int) -> bool:
        """A kernel that writes into what was there before would do so twice."""
        return all(
            t.kind == "activation" and not t.persistent and t.writes == (tick,)
            for t in (self.profile.tensors[index] for index in self.writes[tick])
        )


def find_recompute_gaps(profile: Profile, touched: KernelAccesses | None = None) -> dict[int, RecomputeGap]:
    """By tensor, where it is not there if it is made again, for all that can be.

    Out are those whose kernels would find other bytes than at first: what they read is dead by then and they
    do not make it, or was written since.
    """
    touched = touched or KernelAccesses(profile)
    found: dict[int, RecomputeGap] = {}
    for index, tensor in enumerate(profile.tensors):
        chain = set(tensor.recompute_from)
        if not chain or tensor.size_bytes == 0 or len(tensor.writes) != 1 or tensor.writes[0] not in chain:
            continue
        cut = _find_recompute_gap(profile, index)
        if cut is None or not all(touched.can_rerun_kernel(tick) for tick in chain):
            continue
        sources = {source for tick in chain for source in touched.reads[tick]}
        if max(chain) <= cut.last and all(
            _is_source_readable(profile, profile.tensors[s], chain, cut.first) for s in sources
        ):
            found[index] = cut
    return found


def _find_recompute_gap(profile: Profile, index: int) -> RecomputeGap | None:
    tensor, kernels = profile.tensors[index], profile.kernels
    uses = sorted({*tensor.reads, *tensor.writes})
    gaps = [(a, b) for a, b in pairwise(uses) if b - a > 1]
    across = [(a, b) for a, b in gaps if kernels[a].call == kernels[uses[0]].call != kernels[b].call]
    if not gaps or (not across and kernels[uses[-1]].call != kernels[uses[0]].call):
        return None
    last, first = across[0] if across else max(gaps, key=lambda gap: _gap_length(kernels, gap))
    return RecomputeGap(index, uses[0], last, first)


def _gap_length(kernels: Sequence[Kernel], gap: tuple[int, int]) -> tuple[int, int]:
    first, end = gap
    return sum(kernel.duration_ns for kernel in kernels[first + 1 : end]), end - first


def _is_source_readable(profile: Profile, source: Tensor, chain: set[int], first: int) -> bool:
    """Whether the bytes that were read are there again: made by the chain, or alive and unchanged, or read by
    this later call before: then they are kept."""
    if not source.persistent and source.kind != "input":
        if source.writes[0] in chain:
            return True
        dies = max((*source.reads, *source.writes))
        if dies < first and not profile.kernels[source.writes[0]].call < profile.kernels[dies].call:
            return False
    return not any(min(chain) < tick < first for tick in source.writes)


def profile_with_recomputation(profile: Profile, names: Collection[str]) -> Profile:
    """The step in which these tensors are made again. PlanError names the first that cannot be."""
    if not names:
        return profile
    step, _ = replay_with_copies(profile, names)
    return fold_copies_into_workspace(step, len(profile.tensors))


def fold_copies_into_workspace(step: Profile, known: int) -> Profile:
    """Tensors behind the first `known` count as workspace of the kernels for which they are there."""
    change = [0] * (len(step.kernels) + 1)
    for tensor in step.tensors[known:]:
        change[tensor.writes[0]] += tensor.size_bytes
        change[max((*tensor.reads, *tensor.writes)) + 1] -= tensor.size_bytes
    kernels = tuple(
        replace(kernel, workspace_bytes=kernel.workspace_bytes + inside)
        for kernel, inside in zip(step.kernels, accumulate(change))
    )
    return replace(step, kernels=kernels, tensors=step.tensors[:known])


def replay_with_copies(profile: Profile, names: Collection[str]) -> tuple[Profile, Replay]:
    """The same, with what is made again as tensors of their own behind the others; and how it came about."""
    touched = KernelAccesses(profile)
    possible = find_recompute_gaps(profile, touched)
    by_name = {tensor.name: index for index, tensor in enumerate(profile.tensors)}
    for name in names:
        if name not in by_name:
            raise PlanError(f"recompute of {name!r}: no tensor of that name in profile {profile.name!r}")
        if by_name[name] not in possible:
            why = "it names no kernels that make it again (recompute_from)"
            if profile.tensors[by_name[name]].recompute_from:
                why = "the kernels that made it would not find what they read, or it is never idle"
            raise PlanError(f"recompute of {name!r} is not possible in profile {profile.name!r}: {why}")
    chosen = {by_name[name]: possible[by_name[name]] for name in names}
    replay = Replay(profile, touched, chosen)
    return replay.build_profile(), replay


def apply_plan_recompute(plan: Plan, profile: Profile) -> tuple[Plan, Profile]:
    """The plan and the step its moves are for: with what it makes again made again."""
    return replace(plan, recompute=()), profile_with_recomputation(profile, plan.recompute)


@dataclass(slots=True)
class _TensorUses:
    """A tensor of the new step."""

    tensor: Tensor
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


class Replay:
    """Goes through the step once and runs kernels again where a use asks for it."""

    def __init__(self, profile: Profile, touched: KernelAccesses, chosen: dict[int, RecomputeGap]) -> None:
        import networkx as nx  # here: a third of a second that most commands do not need

        self.profile, self.touched, self.chosen = profile, touched, chosen
        self.kernels: list[Kernel] = []
        self.rows = [_TensorUses(tensor) for tensor in profile.tensors]
        self.again: dict[int, int] = {}  # tensor -> row of its second copy
        self.dies = [max((*t.reads, *t.writes), default=-1) for t in profile.tensors]
        self.names = {tensor.name for tensor in profile.tensors}
        self.made_from = nx.DiGraph()  # source -> what the kernel that reads it makes
        self.unseen: dict[int, set[int]] = {}  # tensor -> kernels of its chain that make no known tensor
        self.ran: set[int] = set()  # of those, what has run again
        chains = {index: profile.tensors[index].recompute_from for index in chosen}
        self.makers = {tick for chain in chains.values() for tick in chain}
        for index, chain in chains.items():
            self.unseen[index] = {tick for tick in chain if not touched.writes[tick]}
            self.made_from.add_node(index)
            for tick in chain:
                for made in touched.writes[tick] or [index]:
                    self.made_from.add_edges_from(
                        (s, made) for s in touched.reads[tick] if s != made and self._is_short_lived(s)
                    )

    def build_profile(self) -> Profile:
        for tick in range(len(self.profile.kernels)):
            wanted = [index for index in self.touched.reads[tick] if self._is_recompute_due(index, tick)]
            if wanted:
                self._append_reruns_of_makers(wanted, tick)
            self._append_kernel(
                self.profile.kernels[tick], self.touched.reads[tick], self.touched.writes[tick], tick
            )
        tensors = tuple(
            replace(row.tensor, reads=tuple(row.reads), writes=tuple(row.writes), recompute_from=())
            for row in self.rows
        )
        step_ns = self.profile.step_ns + sum(k.duration_ns for k in self.kernels) - self.profile.compute_ns
        return Profile(self.profile.name, step_ns, tuple(self.kernels), tensors)

    def _is_short_lived(self, index: int) -> bool:
        tensor = self.profile.tensors[index]
        return not tensor.persistent and tensor.kind != "input"

    def _is_recompute_due(self, index: int, tick: int) -> bool:
        return index in self.chosen and self.chosen[index].first <= tick and index not in self.again

    def _is_missing_at(self, index: int, tick: int) -> bool:
        """Whether it is not there before the kernel at `tick`, neither as it was nor made again."""
        if index in self.again or not self._is_short_lived(index):
            return False
        if self.profile.tensors[index].writes[0] not in self.makers:
            return False  # it is kept
        cut = self.chosen.get(index)
        return self.dies[index] < tick or (cut is not None and cut.last < tick)

    def _append_reruns_of_makers(self, wanted: Iterable[int], tick: int) -> None:
        """What the kernel at `tick` wants, from what is there; each kernel once, in their order."""
        import networkx as nx

        gone = nx.subgraph_view(self.made_from, filter_node=lambda index: self._is_missing_at(index, tick))
        needed = set(wanted)
        for index in wanted:
            needed |= nx.ancestors(gone, index)
        makers = {self.profile.tensors[index].writes[0] for index in needed}
        unseen = {at for index in needed for at in self.unseen.get(index, ())} - self.ran
        self.ran |= unseen
        for again in sorted(makers | unseen):
            self._append_rerun_of_kernel(again, needed, tick)

    def _append_rerun_of_kernel(self, again: int, needed: set[int], tick: int) -> None:
        tensors, writes = self.profile.tensors, self.touched.writes[again]
        made = [i for i in writes if i in needed or self._is_recomputed_alongside(i, tick)]
        scratch = sum(tensors[i].size_bytes for i in writes if i not in made)
        kernel = self.profile.kernels[again]
        for index in made:
            self.again[index] = len(self.rows)
            self.rows.append(
                _TensorUses(replace(tensors[index], name=self._make_unique_name(tensors[index].name)))
            )
        kernel = replace(
            kernel,
            name=f"{kernel.name}.again",
            call=self.profile.kernels[tick].call,
            workspace_bytes=kernel.workspace_bytes + scratch,
        )
        self._append_kernel(kernel, self.touched.reads[again], made, tick)

    def _is_recomputed_alongside(self, index: int, tick: int) -> bool:
        """What the same kernel makes beside, and is made again as well."""
        return index in self.chosen and self._is_missing_at(index, tick)

    def _make_unique_name(self, name: str) -> str:
        while name in self.names:
            name += ".again"
        self.names.add(name)
        return name

    def _append_kernel(self, kernel: Kernel, reads: Iterable[int], writes: Iterable[int], tick: int) -> None:
        at = len(self.kernels)
        self.kernels.append(kernel)
        for index in reads:
            self.rows[self._copy_touched_at(index, tick)].reads.append(at)
        for index in writes:
            self.rows[self._copy_touched_at(index, tick)].writes.append(at)

    def _copy_touched_at(self, index: int, tick: int) -> int:
        """Which copy the kernel at `tick` touches: the first until the cut, the second from then on."""
        if index not in self.again:
            return index
        cut = self.chosen.get(index)
        return index if cut is not None and tick <= cut.last else self.again[index]
