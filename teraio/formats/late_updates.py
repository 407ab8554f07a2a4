"""Late updates. In: a profile, names of weights. Out: the profile of the step that updates them late.

An update is a kernel of the optimizer. It reads gradients, and writes weights and optimizer states. Nobody
reads the weight before the next forward. So the update can run there, just before the first kernel that uses
one of its tensors:

    step      forward  backward  update  |  forward  backward  update
    late      [update] forward  backward |  [update] forward  backward
                         makes the gradient  reads the gradient

The gradient then lives around the end of the step (profile.py). Within one step, the update comes first: it
belongs to the gradients of the step before.

`profile_with_late_updates` returns an ordinary profile. Planners, simulators and the check use only this
profile. If a plan has `late`, the ticks of its moves therefore count the kernels in this order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from teraio.errors import PlanError
from teraio.formats.profile import Kernel, Profile, Tensor

PLACEMENTS = ("step", "late", "auto")  # where a planner may put updates
ON_HOST = " on the host"  # the end of the name of an update that the host computes


@dataclass(frozen=True, slots=True)
class Update:
    """A kernel that updates weights, and that may also run late.

    tick       the kernel
    before     the kernel before which it runs late
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


def profile_with_late_updates(profile: Profile, names: Collection[str]) -> Profile:
    """Return the profile of the step that updates these weights late.

    An update that writes several weights runs late if `names` has all of them. Raise PlanError if one of the
    weights has no update that can run late.
    """
    if not names:
        return profile
    late = _updates_of_weights(profile, set(names))
    order = order_of_kernels(profile, late)
    tick_after = {tick: at for at, tick in enumerate(order)}
    moved = {update.tick for update in late}
    least_bytes = min(kernel.workspace_bytes for kernel in profile.kernels)
    made_bytes = _bytes_made_by_kernels(profile)
    kernels = [profile.kernels[tick] for tick in order]
    for update in late:
        at = tick_after[update.tick]
        kernels[at] = _late_kernel(profile, update, moved, least_bytes, made_bytes[update.before])
    tensors = tuple(_tensor_in_order(tensor, tick_after, moved) for tensor in profile.tensors)
    return replace(profile, kernels=tuple(kernels), tensors=tensors)


def _updates_of_weights(profile: Profile, names: set[str]) -> list[Update]:
    possible = find_updates(profile)
    late = [update for update in possible if names.issuperset(update.weights)]
    if missing := names.difference(weights_of(late)):
        known = {tensor.name for tensor in profile.tensors if tensor.kind == "weight"}
        name = min(missing)
        others = {other for update in possible if name in update.weights for other in update.weights} - names
        why = "its update cannot run in the next step" if name in known else "there is no such weight"
        if others:
            why = f"its update also writes {min(others)!r}, which is not late"
        raise PlanError(f"late update of {name!r} is not possible in profile {profile.name!r}: {why}")
    return late


def order_of_kernels(profile: Profile, late: Collection[Update]) -> list[int]:
    """Return the ticks of the kernels in the order of the step with these late updates."""
    before: dict[int, list[int]] = defaultdict(list)
    for update in late:
        before[update.before].append(update.tick)
    moved = {update.tick for update in late}
    order: list[int] = []
    for tick in range(len(profile.kernels)):
        order += before[tick]
        if tick not in moved:
            order.append(tick)
    return order


def _late_kernel(
    profile: Profile, update: Update, moved: Collection[int], least_bytes: int, made_bytes: int
) -> Kernel:
    """Return the kernel of a late update. It runs within the call of the kernel that it precedes.

    Temporaries of that call are alive at this point. They were alive during the kernel before and are alive
    during the kernel after. So they take at most the workspace of the kernel before. They also take at most
    the workspace of the kernel after and the `made_bytes` of tensors that it makes. Composed programs count
    the same. `moved` has the ticks of all late updates, which are no such kernels. Before the first kernel
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
    """Return the tensor with the ticks of the new order."""

    def ticks(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(tick_after[tick] for tick in old))

    born = None if tensor.born is None else tick_after[tensor.born]
    if not tensor.persistent and moved.intersection((*tensor.reads, *tensor.writes)):
        born = tick_after[tensor.writes[0]]
    return replace(
        tensor,
        reads=ticks(tensor.reads),
        writes=ticks(tensor.writes),
        recompute_from=ticks(tensor.recompute_from),
        born=born,
    )
