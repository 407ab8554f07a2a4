"""Updates at other places of the step. In: a profile, names of weights. Out: the profile of the other step.

An update is a kernel of the optimizer. It reads gradients, and writes weights and optimizer states. In the
profile of a usual step, it runs at the end. Two other places give each kernel the same bytes:

    step      forward  backward  update  |  forward  backward  update
    late      [update] forward  backward |  [update] forward  backward
    backward  forward  backward [update] backward |  forward  backward [update] backward
                         makes the gradient

*Late*: nobody reads the weight before the next forward. So the update can run there, just before the first
kernel that uses one of its tensors. The gradient then lives around the end of the step (profile.py). Within
one step, the update comes first: it belongs to the gradients of the step before.

*In the backward*: the update runs within the call that makes its gradients, just after the last kernel that
uses one of its tensors. A run must check that nobody uses these tensors between the backward and `step()`.

`profile_with_updates` returns an ordinary profile. Planners, simulators and the check use only this profile.
If a plan has `late` or `backward`, the ticks of its moves therefore count the kernels in this order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from teraio.errors import PlanError
from teraio.formats.profile import Kernel, Profile, Tensor

PLACEMENTS = ("step", "late", "auto", "backward")  # where a planner may put updates
ON_HOST = " on the host"  # the end of the name of an update that the host computes


@dataclass(frozen=True, slots=True)
class Update:
    """A kernel that updates weights, and that may also run at another place.

    tick       the kernel
    before     the kernel before which it runs at the other place
    weights    names of the weights that it writes
    """

    tick: int
    before: int
    weights: tuple[str, ...]


def weights_of(updates: Iterable[Update]) -> tuple[str, ...]:
    """Return the names of the weights that the updates write."""
    return tuple(name for update in updates for name in update.weights)


def find_updates(profile: Profile) -> tuple[Update, ...]:
    """Return the updates that can run late, in the order of the step.

    An update cannot run late in four cases. (1) It uses other tensors than weights, gradients and states.
    (2) A later kernel of the step uses a tensor that it writes, or writes a tensor that it reads. (3) No
    kernel before it uses one of its tensors. (4) The host computes it.
    """
    count = len(profile.kernels)
    first, waits, reads_gradient = [count] * count, [True] * count, [False] * count
    weights: list[list[str]] = [[] for _ in profile.kernels]
    for tensor in profile.tensors:
        uses, writes = {*tensor.reads, *tensor.writes}, {*tensor.writes}
        first_use, last_use, last_write = (
            min(uses, default=-1),
            max(uses, default=-1),
            max(writes, default=-1),
        )
        for tick in uses:
            conflict = last_use if tick in writes else last_write
            waits[tick] = waits[tick] and _may_wait_after(tensor, tick, conflict)
            first[tick] = min(first[tick], first_use)
        if tensor.kind == "grad":
            for tick in tensor.reads:
                reads_gradient[tick] = True
        elif tensor.kind == "weight":
            for tick in writes:
                weights[tick].append(tensor.name)
    return tuple(
        Update(tick, first[tick], tuple(weights[tick]))
        for tick in range(count)
        if not profile.kernels[tick].name.endswith(ON_HOST)
        if weights[tick] and reads_gradient[tick] and waits[tick] and first[tick] < tick
    )


def _may_wait_after(tensor: Tensor, tick: int, conflict: int) -> bool:
    """Return True if the use of the tensor by an update at `tick` may run in the next step instead.

    `conflict` is the last tick whose use of the tensor must not come before the update.
    """
    if tensor.kind == "grad":
        is_known = tensor.born is None and tensor.writes[:1] < (tick,)
    else:
        is_known = tensor.persistent and tensor.kind in ("weight", "state")
    return is_known and conflict <= tick


def find_backward_updates(profile: Profile) -> tuple[Update, ...]:
    """Return the updates that can run in the backward, in the order of the step.

    An update runs there just after the last kernel before it that uses one of its tensors. It cannot run
    there in five cases. (1) It uses other tensors than weights, gradients and states. (2) A gradient is
    persistent. (3) Several calls use a gradient, apart from the update. (4) The call ends before the update
    could run. (5) The host computes it.
    """
    used: list[list[Tensor]] = [[] for _ in profile.kernels]
    for tensor in profile.tensors:
        for tick in {*tensor.reads, *tensor.writes}:
            used[tick].append(tensor)
    found = []
    for tick, tensors in enumerate(used):
        written = (tensor for tensor in tensors if tick in tensor.writes)
        weights = tuple(tensor.name for tensor in written if tensor.kind == "weight")
        if weights and not profile.kernels[tick].name.endswith(ON_HOST):
            before = 1 + max(_last_use_before(tensor, tick) for tensor in tensors)
            if _may_run_within_call(profile, tensors, tick, before):
                found.append(Update(tick, before, weights))
    return tuple(found)


def _last_use_before(tensor: Tensor, tick: int) -> int:
    return max((each for each in (*tensor.reads, *tensor.writes) if each < tick), default=-1)


def _may_run_within_call(profile: Profile, tensors: Sequence[Tensor], tick: int, before: int) -> bool:
    """Return True if the update at `tick`, which uses these tensors, may run before the kernel `before`."""
    kernels = profile.kernels
    call = kernels[before].call
    if before == 0 or kernels[before - 1].call != call or call >= kernels[tick].call:
        return False
    gradients = [tensor for tensor in tensors if tensor.kind == "grad"]
    others = [tensor for tensor in tensors if tensor.kind != "grad"]
    if not all(tensor.persistent and tensor.kind in ("weight", "state") for tensor in others):
        return False
    for tensor in gradients:
        own = {kernels[each].call for each in {*tensor.reads, *tensor.writes} - {tick}}
        if tensor.persistent or tensor.born is not None or tick in tensor.writes or own != {call}:
            return False
    return bool(gradients)


def profile_with_updates(
    profile: Profile, late: Collection[str] = (), backward: Collection[str] = ()
) -> Profile:
    """Return the profile of the step that updates these weights late, and those weights in the backward.

    An update that writes several weights moves if one of the two lists has all of them. Raise PlanError if
    the update of a weight cannot run there, or if both lists have the weight.
    """
    if both := {*late} & {*backward}:
        raise PlanError(
            f"{min(both)!r} cannot have both a late update and an update in the backward, "
            f"in profile {profile.name!r}"
        )
    step, moved = profile, set[int]()
    if backward:
        updates = _updates_of_weights(profile, {*backward}, "backward")
        step = _profile_with_moved_updates(profile, updates, set())
        moved = _ticks_after(order_of_kernels(profile, updates), updates)
    if late:
        step = _profile_with_moved_updates(step, _updates_of_weights(step, {*late}, "late"), moved)
    return step


# By place: the updates that can run there, the words for it, and the words for a weight that is not there.
_Words = tuple[Callable[[Profile], tuple[Update, ...]], str, str, str]
_PLACES: dict[str, _Words] = {
    "late": (find_updates, "late update of {!r}", "in the next step", "late"),
    "backward": (
        find_backward_updates,
        "update of {!r} in the backward",
        "in the backward",
        "in the backward",
    ),
}


def _updates_of_weights(profile: Profile, names: set[str], place: str) -> list[Update]:
    find, action, where, there = _PLACES[place]
    possible = find(profile)
    chosen = [update for update in possible if names.issuperset(update.weights)]
    if missing := names.difference(weights_of(chosen)):
        known = {tensor.name for tensor in profile.tensors if tensor.kind == "weight"}
        name = min(missing)
        others = {other for update in possible if name in update.weights for other in update.weights} - names
        why = f"its update cannot run {where}" if name in known else "there is no such weight"
        if others:
            why = f"its update also writes {min(others)!r}, which is not {there}"
        raise PlanError(f"{action.format(name)} is not possible in profile {profile.name!r}: {why}")
    return chosen


def order_of_kernels(profile: Profile, updates: Collection[Update]) -> list[int]:
    """Return the ticks of the kernels in the order of the step with these updates at their other places."""
    before: dict[int, list[int]] = defaultdict(list)
    for update in updates:
        before[update.before].append(update.tick)
    moved = {update.tick for update in updates}
    order: list[int] = []
    for tick in range(len(profile.kernels)):
        order += before[tick]
        if tick not in moved:
            order.append(tick)
    return order


def _ticks_after(order: Sequence[int], updates: Collection[Update]) -> set[int]:
    moved = {update.tick for update in updates}
    return {at for at, tick in enumerate(order) if tick in moved}


def _profile_with_moved_updates(
    profile: Profile, updates: Collection[Update], moved_before: Collection[int]
) -> Profile:
    """Return the profile with these updates at their other places.

    `moved_before` has the ticks of updates that are at other places already.
    """
    tick_after = {tick: at for at, tick in enumerate(order_of_kernels(profile, updates))}
    moved = {update.tick for update in updates}
    least_bytes = min(kernel.workspace_bytes for kernel in profile.kernels)
    made_bytes = _bytes_made_by_kernels(profile)
    kernels = [profile.kernels[tick] for tick in tick_after]
    for update in updates:
        kernels[tick_after[update.tick]] = _moved_kernel(
            profile, update, moved.union(moved_before), least_bytes, made_bytes[update.before]
        )
    tensors = tuple(_tensor_in_order(tensor, tick_after, moved) for tensor in profile.tensors)
    return replace(profile, kernels=tuple(kernels), tensors=tensors)


def _moved_kernel(
    profile: Profile, update: Update, moved: Collection[int], least_bytes: int, made_bytes: int
) -> Kernel:
    """Return the kernel of a moved update. It runs within the call of the kernel that it precedes.

    Temporaries of that call are alive at this point. They were alive during the kernel before and are alive
    during the kernel after. So they take at most the workspace of the kernel before. They also take at most
    the workspace of the kernel after and the `made_bytes` of tensors that it makes. Composed programs count
    the same. `moved` has the ticks of all moved updates, which are no such kernels. Before the first kernel
    of a step, the last kernel runs.

    Each workspace in a measured profile includes bytes that are no temporaries, such as the reserve. They
    count once. The smallest workspace of the step, `least_bytes`, has almost no temporaries: it belongs to
    the entry of a program.
    """
    kernel, after = profile.kernels[update.tick], profile.kernels[update.before]
    count = len(profile.kernels)
    before = (tick % count for tick in range(update.before - 1, update.before - 1 - count, -1))
    previous = profile.kernels[next(tick for tick in before if tick not in moved)]
    inside = min(previous.workspace_bytes, after.workspace_bytes + made_bytes) - least_bytes
    return replace(kernel, call=after.call, workspace_bytes=kernel.workspace_bytes + inside)


def _bytes_made_by_kernels(profile: Profile) -> dict[int, int]:
    """Return, by tick, the bytes of the tensors that the kernel makes. Other ticks have 0 bytes."""
    made: dict[int, int] = defaultdict(int)
    for tensor in profile.tensors:
        if tensor.writes and not tensor.persistent and tensor.writes[0] not in tensor.reads:
            made[tensor.writes[0]] += tensor.size_bytes
    return made


def _tensor_in_order(tensor: Tensor, tick_after: dict[int, int], moved: set[int]) -> Tensor:
    """Return the tensor with the ticks of the new order. If an update of the next step now uses the tensor
    before its first write, the tensor is born at this write.
    """

    def ticks(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(tick_after[tick] for tick in old))

    born = None if tensor.born is None else tick_after[tensor.born]
    reads, writes = ticks(tensor.reads), ticks(tensor.writes)
    if not tensor.persistent and moved.intersection((*tensor.reads, *tensor.writes)):
        created = tick_after[tensor.writes[0]]
        born = created if min((*reads, *writes)) < created else born
    return replace(tensor, reads=reads, writes=writes, recompute_from=ticks(tensor.recompute_from), born=born)
