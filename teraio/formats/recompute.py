"""Recomputation. In: a profile, names of tensors. Out: the profile of the step that recomputes these tensors.

A recomputed tensor has no bytes during one gap between two of its uses. If its uses are in several calls, the
gap lies between the call that makes the tensor and a later call. If all uses are in one call, it is the
longest gap. Just before the use that ends the gap, the step reruns the kernels that make the tensor:

    tick        w    ..  last          first                                w    ..  last        first
    a          [make] .. [use]  ....   [use]      a is recomputed:   a     [make] .. [use]
    b  (dies)  [use]                              ---------------->  a.again                [w.again][use]

A rerun kernel needs its inputs. If an input is no longer alive and not yet recomputed, the step also reruns
the kernels that make this input. If the call with the rerun itself reads an input, the step keeps this input
alive for the rerun.

The chain of a tensor is the set of kernels that rerun for it. Some of these kernels write no tensor of the
profile, because a measured profile lists only tensors that can move. They rerun, too. For one tensor, a
kernel reruns at most once.

The recomputed copy of a tensor exists only inside one program, until the copy's last use there. The copy
cannot move. So its bytes count as workspace of the kernels that run while it exists.

`profile_with_recomputation` returns an ordinary profile. Planners, simulators and the check use only this
profile. If a plan has `recompute`, the ticks of its moves therefore count the kernels of the longer step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from teraio.errors import PlanError
from teraio.formats.profile import Kernel, Profile, Tensor


@dataclass(frozen=True, slots=True)
class RecomputeGap:
    """The gap in which a recomputed tensor has no bytes. `tensor` is the tensor's index.

    The kernel at tick `made` makes the tensor. The last use before the gap is at tick `last`, and the first
    use after the gap is at tick `first`.
    """

    tensor: int
    made: int
    last: int
    first: int


@dataclass(slots=True)
class KernelAccesses:
    """Lists of tensors that the kernel at each tick reads, and that it writes."""

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
        """Return True if the kernel writes only activations, each of which no other kernel writes.

        A rerun of any other kernel would wrongly repeat a write.
        """
        return all(
            t.kind == "activation" and not t.outlives_step and t.writes == (tick,)
            for t in (self.profile.tensors[index] for index in self.writes[tick])
        )


def find_recompute_gaps(profile: Profile, touched: KernelAccesses | None = None) -> dict[int, RecomputeGap]:
    """Return the gap of each tensor that can be recomputed, by the index of the tensor.

    The kernels that make the tensor must read the same bytes in the rerun as in the first run. Otherwise,
    exclude the tensor. There are two such cases. (1) Since the first run, a kernel has written an input of
    these kernels. (2) An input is freed before the rerun, and none of these kernels makes this input.
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
    """Return True if a rerun before tick `first` reads the same bytes of `source` as the first run did.

    This holds if a kernel in `chain` makes the source. It also holds if the source is alive and unchanged at
    the rerun. A source counts as alive if its last use is in a later call than its first write, because the
    step then keeps the source for the rerun.
    """
    if source.born is not None:
        return False
    if not source.persistent and source.kind != "input":
        if source.writes[0] in chain:
            return True
        dies = max((*source.reads, *source.writes))
        if dies < first and not profile.kernels[source.writes[0]].call < profile.kernels[dies].call:
            return False
    return not any(min(chain) < tick < first for tick in source.writes)


def profile_with_recomputation(profile: Profile, names: Collection[str]) -> Profile:
    """Return the profile of the step that recomputes these tensors. Raise PlanError if a tensor cannot be
    recomputed.
    """
    if not names:
        return profile
    step, _ = replay_with_copies(profile, names)
    return fold_copies_into_workspace(step, len(profile.tensors))


def fold_copies_into_workspace(step: Profile, known: int) -> Profile:
    """Return a profile without the recomputed copies, which are the tensors from index `known` on.

    Count the bytes of a copy as workspace of the kernels that run while it exists.
    """
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
    """Return the profile of the step that recomputes these tensors, and the `Replay` that built it.

    In this profile, the recomputed copies are tensors, and come after all tensors of `profile`.
    """
    touched = KernelAccesses(profile)
    possible = find_recompute_gaps(profile, touched)
    by_name = {tensor.name: index for index, tensor in enumerate(profile.tensors)}
    for name in names:
        if name not in by_name:
            raise PlanError(f"recompute of {name!r}: no tensor of that name in profile {profile.name!r}")
        if by_name[name] not in possible:
            why = "its recompute_from names no kernels"
            if profile.tensors[by_name[name]].recompute_from:
                why = "a rerun of its kernels would read other bytes, or its uses leave no gap"
            raise PlanError(f"recompute of {name!r} is not possible in profile {profile.name!r}: {why}")
    chosen = {by_name[name]: possible[by_name[name]] for name in names}
    replay = Replay(profile, touched, chosen)
    return replay.build_profile(), replay


@dataclass(slots=True)
class _TensorUses:
    """A tensor with the ticks of its uses, counted in the longer step."""

    tensor: Tensor
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)

    def tick_of_birth(self) -> int | None:
        """Return the tick of the kernel at `Tensor.born`. No kernel that writes such a tensor runs again."""
        born = self.tensor.born
        return None if born is None else self.writes[self.tensor.writes.index(born)]


class Replay:
    """A builder of the longer step. It goes through the step, and reruns kernels before uses of recomputed
    tensors.
    """

    def __init__(self, profile: Profile, touched: KernelAccesses, chosen: dict[int, RecomputeGap]) -> None:
        # Import networkx only here: the import takes a third of a second, and most commands do not need it.
        import networkx as nx

        self.profile, self.touched, self.chosen = profile, touched, chosen
        self.kernels: list[Kernel] = []
        self.rows = [_TensorUses(tensor) for tensor in profile.tensors]
        self.again: dict[int, int] = {}  # tensor -> row of its recomputed copy
        self.dies = [max((*t.reads, *t.writes), default=-1) for t in profile.tensors]
        self.names = {tensor.name for tensor in profile.tensors}
        self.made_from = nx.DiGraph()  # edges: input of a kernel -> tensor that the kernel makes
        self.unseen: dict[int, set[int]] = {}  # tensor -> kernels of its chain that write no listed tensor
        self.ran: set[int] = set()  # kernels in `unseen` that have already rerun
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
            replace(
                row.tensor,
                reads=tuple(row.reads),
                writes=tuple(row.writes),
                recompute_from=(),
                born=row.tick_of_birth(),
            )
            for row in self.rows
        )
        step_ns = self.profile.step_ns + sum(k.duration_ns for k in self.kernels) - self.profile.compute_ns
        return Profile(self.profile.name, step_ns, tuple(self.kernels), tensors)

    def _is_short_lived(self, index: int) -> bool:
        tensor = self.profile.tensors[index]
        return not tensor.outlives_step and tensor.kind != "input"

    def _is_recompute_due(self, index: int, tick: int) -> bool:
        return index in self.chosen and self.chosen[index].first <= tick and index not in self.again

    def _is_missing_at(self, index: int, tick: int) -> bool:
        """Return True if the tensor has no bytes before the kernel at `tick`, and no recomputed copy
        either.
        """
        if index in self.again or not self._is_short_lived(index):
            return False
        if self.profile.tensors[index].writes[0] not in self.makers:
            return False  # no kernel in a chain makes it, so its bytes are kept for the rerun
        cut = self.chosen.get(index)
        return self.dies[index] < tick or (cut is not None and cut.last < tick)

    def _append_reruns_of_makers(self, wanted: Iterable[int], tick: int) -> None:
        """Append reruns of the kernels that make the tensors `wanted`. The reruns come before the kernel at
        `tick`.

        Each kernel reruns once, in the order of the step.
        """
        import networkx as nx

        missing = nx.subgraph_view(self.made_from, filter_node=lambda index: self._is_missing_at(index, tick))
        needed = set(wanted)
        for index in wanted:
            needed |= nx.ancestors(missing, index)
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
        """Return True if this tensor is missing at `tick` and is itself chosen for recomputation.

        The tensor is an output of a kernel that reruns for another tensor. The rerun then recomputes this
        output, too.
        """
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
        """Return the row of the tensor that the kernel at `tick` uses: the original or its recomputed copy.

        The copy is used after the gap.
        """
        if index not in self.again:
            return index
        cut = self.chosen.get(index)
        return index if cut is not None and tick <= cut.last else self.again[index]
