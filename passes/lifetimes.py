"""Schedules and the order of their calls in, a profile out: every tensor's uses by tick, every kernel's
duration."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import cast

from teraio.profile import Kernel, Kind, Profile, Tensor
from teraio.schedule import MADE, READ, WRITE, Step


def profile_of(steps: Sequence[Step], name: str) -> Profile:
    """The last step's tensors and order; durations are medians over all steps of the same order."""
    last = steps[-1]
    order = [call.schedule.identity for call in last.calls]
    alike = [step for step in steps if [call.schedule.identity for call in step.calls] == order]
    durations = [median_low(values) for values in zip(*(_durations(step) for step in alike))]
    kernels: list[Kernel] = []
    for number, call in enumerate(last.calls):
        for slot, live_bytes in zip(call.schedule.slots, call.live_bytes):
            kernels.append(Kernel(slot.kernel, number, durations[len(kernels)], live_bytes))
    return Profile(name, sum(durations), tuple(kernels), _tensors(last))


def _durations(step: Step) -> list[int]:
    """Per tick: from when the kernel could start to when the next slot began. Waiting is not the kernel's."""
    start = [at for call in step.calls for at in call.at_ns]
    begin = [at - stall for call in step.calls for at, stall in zip(call.at_ns, call.stall_ns)]
    return [max(0, after - at) for at, after in zip(start, [*begin[1:], step.end_ns])]


def _tensors(step: Step) -> tuple[Tensor, ...]:
    reads: dict[str, set[int]] = {}
    writes: dict[str, set[int]] = {}
    tick = 0
    for call in step.calls:
        for slot in call.schedule.slots:
            for buffer, flags in zip(slot.buffers, slot.flags):
                tensor = call.tensors[buffer]
                if flags & MADE:
                    writes.setdefault(tensor, set()).add(tick - 1)
                if flags & READ:
                    reads.setdefault(tensor, set()).add(tick)
                if flags & WRITE:
                    writes.setdefault(tensor, set()).add(tick)
            tick += 1
        for tensor in step.reachable:  # user code runs now, and may read or write any of these
            reads.setdefault(tensor, set()).add(tick - 1)
            writes.setdefault(tensor, set()).add(tick - 1)
    tensors: list[Tensor] = []
    for name, kind, size_bytes, persistent in step.kinds:
        if name in reads or name in writes:
            uses = tuple(sorted(reads.get(name, ()))), tuple(sorted(writes.get(name, ())))
            tensors.append(Tensor(name, cast(Kind, kind), size_bytes, persistent, *uses))
    return tuple(tensors)
