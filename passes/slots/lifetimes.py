"""The profile of measured steps.

In: steps, each with its schedules in the order of their calls. Out: a Profile with the uses of every tensor
by tick, and the duration of every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import cast

from teraio.formats.profile import Kernel, Kind, Profile, Tensor
from teraio.formats.schedule import MADE, READ, WRITE, Call, Step


def profile_of_steps(steps: Sequence[Step], name: str) -> Profile:
    """Return a profile of the last step, with median durations.

    The profile has the tensors and the order of kernels of the last step. The duration of a kernel is the
    median over all steps that make the same calls in the same order as the last step.
    """
    last = steps[-1]
    order = [call.schedule.identity_hash for call in last.calls]
    alike = [step for step in steps if [call.schedule.identity_hash for call in step.calls] == order]
    durations = [median_low(values) for values in zip(*(_kernel_durations_ns(step) for step in alike))]
    sizes = {tensor: size_bytes for tensor, _, size_bytes, _ in last.kinds}
    kernels: list[Kernel] = []
    for number, call in enumerate(last.calls):
        for index, (slot, live_bytes) in enumerate(zip(call.schedule.slots, call.live_bytes)):
            workspace = max(0, live_bytes - _bytes_made_by_previous_kernel(call, index + 1, sizes))
            if index == len(call.live_bytes) - 1 and number < len(last.outside):
                workspace += last.outside[number]
            kernels.append(Kernel(slot.kernel, number, durations[len(kernels)], workspace))
    return Profile(name, sum(durations), tuple(kernels), _tensors_with_uses(last))


def _bytes_made_by_previous_kernel(call: Call, index: int, sizes: dict[str, int]) -> int:
    """Return the bytes of tensors that the kernel before slot `index` made.

    The profile lists these tensors, but the live bytes of their kernel include them too. The caller subtracts
    the returned bytes from the live bytes, so that each tensor is counted only once.
    """
    if index == len(call.schedule.slots):
        return 0
    made = {call.tensors[buffer] for buffer in call.schedule.slots[index].made_buffers}
    return sum(sizes.get(tensor, 0) for tensor in made)


def _kernel_durations_ns(step: Step) -> list[int]:
    """Return the duration of each kernel, without the time that slots wait.

    A kernel's time is the time from the end of its slot to the begin of the next slot.
    """
    start = [at for call in step.calls for at in call.at_ns]
    begin = [at - stall for call in step.calls for at, stall in zip(call.at_ns, call.stall_ns)]
    return [max(0, after - at) for at, after in zip(start, [*begin[1:], step.end_ns])]


def _tensors_with_uses(step: Step) -> tuple[Tensor, ...]:
    reads: dict[str, set[int]] = {}
    writes: dict[str, set[int]] = {}
    again: dict[str, tuple[int, ...]] = {}
    tick = 0
    for number, call in enumerate(step.calls):
        for buffer, name in zip(call.schedule.buffers, call.tensors):
            if buffer.again:
                again[name] = tuple(tick + slot for slot in buffer.again)
        for slot in call.schedule.slots:
            for index, flags in zip(slot.buffers, slot.flags):
                tensor = call.tensors[index]
                if flags & MADE:
                    writes.setdefault(tensor, set()).add(tick - 1)
                if flags & READ:
                    reads.setdefault(tensor, set()).add(tick)
                if flags & WRITE:
                    writes.setdefault(tensor, set()).add(tick)
            tick += 1
        for tensor in (name for at, name in step.exposed if at == number):  # user code may read or write it
            reads.setdefault(tensor, set()).add(tick - 1)
            writes.setdefault(tensor, set()).add(tick - 1)
    tensors: list[Tensor] = []
    for name, kind, size_bytes, persistent in step.kinds:
        if name in reads or name in writes:
            born = _birth_around_the_end(name, reads, writes) if name in step.around else None
            lasts = (persistent or name in step.around) and born is None
            if born is None and not lasts and kind != "input":
                _add_write_at_first_use(name, reads, writes)
            uses = tuple(sorted(reads.get(name, ()))), tuple(sorted(writes.get(name, ())))
            chain = again.get(name, ()) if kind == "activation" and not persistent else ()
            tensors.append(Tensor(name, cast(Kind, kind), size_bytes, lasts, *uses, chain, born))
    return tuple(tensors)


def _birth_around_the_end(name: str, reads: dict[str, set[int]], writes: dict[str, set[int]]) -> int | None:
    """Return the tick that makes a gradient which a late update of the next step reads. Return None if this
    step does not make it after its read."""
    first = min(reads.get(name, ()), default=None)
    made = [tick for tick in writes.get(name, ()) if first is not None and tick > first]
    return min(made, default=None)


def _add_write_at_first_use(name: str, reads: dict[str, set[int]], writes: dict[str, set[int]]) -> None:
    """Add a write at the first use of a tensor that is read before any kernel writes it.

    Eager code made such a tensor, so the step has no kernel for this write.
    """
    first = min(reads.get(name, ()), default=None)
    if first is not None and first < min(writes.get(name, ()), default=first + 1):
        writes.setdefault(name, set()).add(first)
