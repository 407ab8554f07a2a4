"""Where optimizers step, if the options leave it open: by what the plans for either way predict.

measured step -> plan           states move there and back for each step?  no: the device
the same step, but those buckets take no memory of the device, and as long as the host needs for them
              -> plan           faster by more than a prediction is worth? then the host, and the step is
                                measured anew
that step -> plan               slower after all? the device again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from teraio.formats.machine import Machine
from teraio.formats.plan import Fetch, Plan
from teraio.formats.profile import Profile, Tensor
from teraio.formats.schedule import Step
from teraio.runtime.engine.engine import Engine
from teraio.runtime.optimizer import host_step
from teraio.units import fmt_count, fmt_ns

log = logging.getLogger("teraio")

WORTH_PERCENT = 5  # of a step: less than that is not known beforehand
TRIED_ELEMENTS = 2**22  # of the parameter whose update is timed

Make = Callable[[Profile], Plan]
Order = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BucketEstimate:
    """One slot of an optimizer's step, and what it takes on the host."""

    kernel: str
    tick: int
    tensors: tuple[Tensor, ...]
    moved_ns: int  # what comes for it and leaves after it, by the plan
    host_ns: int

    @property
    def host_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors if t.kind != "grad")


class HostChoice:
    def __init__(self, engine: Engine, machine: Machine, is_open: bool) -> None:
        self.engine, self.machine, self.is_open = engine, machine, is_open
        self.device_ns = 0  # of the step that the host took over from, as it was planned
        self.left: Order = ()

    def switch_if_faster(self, profile: Profile, step: Step, plan: Plan, make: Make) -> bool:
        """Whether the step runs otherwise from now on, and is to be measured anew."""
        order = tuple(call.schedule.identity_hash for call in step.calls)
        if self.device_ns and order != self.left and _has_bucket_on_host(step):
            return self._undo_if_slower(plan)
        if not self.is_open or host_step.host_step_of(self.engine) is None or not _optimizer_ticks(step):
            return False
        self.is_open = False
        buckets = self._buckets_faster_on_host(profile, step, plan)
        if not buckets:
            return False
        there = make(profile_with_host_buckets(profile, buckets))
        here_ns, there_ns = plan.predicted.step_ns, there.predicted.step_ns
        if not 0 < there_ns < here_ns * (100 - WORTH_PERCENT) // 100:
            return False
        log.info(
            "teraio: %s of the optimizer's step on the host from now on: %s a step by the plan, %s on the "
            "device; it is measured again",
            fmt_count(len(buckets), "bucket"),
            fmt_ns(there_ns),
            fmt_ns(here_ns),
        )
        self.device_ns, self.left = here_ns, order
        host_step.set_host_buckets(self.engine, {bucket.kernel for bucket in buckets})
        return True

    def _undo_if_slower(self, plan: Plan) -> bool:
        """Measured, it is what counts."""
        here_ns, self.device_ns = self.device_ns, 0
        if plan.predicted.step_ns <= here_ns:
            return False
        log.info(
            "teraio: the optimizer steps on the device again: a step takes %s by the plan, and took %s there",
            fmt_ns(plan.predicted.step_ns),
            fmt_ns(here_ns),
        )
        host_step.set_host_buckets(self.engine, ())
        self.engine.tracker.request_measuring(self.left)
        return True

    def _buckets_faster_on_host(self, profile: Profile, step: Step, plan: Plan) -> list[BucketEstimate]:
        """The buckets whose tensors take longer to come and go than the host takes to step them, as many as
        host memory has room for."""
        ticks = len(profile.kernels)
        fetched = {(m.tensor, m.ready % ticks): m.source for m in plan.moves if isinstance(m, Fetch)}
        kinds = {tensor.name: tensor.kind for tensor in profile.tensors}
        if not any(kinds[name] == "state" for name, _ in fetched):
            return []
        there = host_step.host_step_of(self.engine)
        assert there is not None
        could = there.could
        buckets = self._estimate_buckets(profile, step, fetched, measure_update_bytes_per_s())
        faster = [b for b in buckets if b.kernel in could and b.host_ns < b.moved_ns]
        room = next((tier.capacity_bytes for tier in self.machine.tiers if tier.name == "host"), 0)
        taken = []
        for bucket in sorted(faster, key=lambda bucket: bucket.host_ns / bucket.moved_ns):
            room -= bucket.host_bytes
            if room >= 0:
                taken.append(bucket)
        return taken

    def _estimate_buckets(
        self, profile: Profile, step: Step, fetched: Mapping[tuple[str, int], str], rate: int
    ) -> list[BucketEstimate]:
        touched: dict[int, list[Tensor]] = {}
        for tensor in profile.tensors:
            for tick in {*tensor.reads, *tensor.writes}:
                touched.setdefault(tick, []).append(tensor)
        buckets = []
        for kernel, tick in _optimizer_ticks(step):
            tensors = touched.get(tick, [])
            away = {t.name: fetched[t.name, tick] for t in tensors if (t.name, tick) in fetched}
            written = [t for t in tensors if t.name in away and t.kind != "grad"]
            come = sum(
                self._transfer_ns(t.size_bytes, away[t.name], "device") for t in tensors if t.name in away
            )
            go = sum(self._transfer_ns(t.size_bytes, "device", away[t.name]) for t in written)
            here = [t for t in tensors if t.name not in away]
            down = sum(self._transfer_ns(t.size_bytes, "device", "host") for t in here if t.kind == "grad")
            up = sum(self._transfer_ns(t.size_bytes, "host", "device") for t in here if t.kind == "weight")
            touched_bytes = sum(t.size_bytes * (1 if t.kind == "grad" else 2) for t in tensors)
            host_ns = max(down, up, touched_bytes * 10**9 // rate)  # beside those of its neighbours
            buckets.append(BucketEstimate(kernel, tick, tuple(tensors), max(come, go), host_ns))
        return buckets

    def _transfer_ns(self, size_bytes: int, source: str, target: str) -> int:
        ways = [link for link in self.machine.links if (link.source, link.target) == (source, target)]
        return sum(size_bytes * 10**9 // link.bandwidth_bytes_per_s for link in ways)


def profile_with_host_buckets(profile: Profile, buckets: Sequence[BucketEstimate]) -> Profile:
    """The step as it would be measured if the host took these buckets."""
    taken = {bucket.tick: bucket for bucket in buckets}
    kernels = [
        replace(kernel, duration_ns=taken[tick].host_ns, workspace_bytes=0) if tick in taken else kernel
        for tick, kernel in enumerate(profile.kernels)
    ]
    tensors = []
    for tensor in profile.tensors:
        reads = tuple(tick for tick in tensor.reads if tick not in taken)
        writes = tuple(tick for tick in tensor.writes if tick not in taken)
        if reads or writes:
            tensors.append(replace(tensor, reads=reads, writes=writes))
    step_ns = sum(kernel.duration_ns for kernel in kernels)
    return replace(profile, step_ns=step_ns, kernels=tuple(kernels), tensors=tuple(tensors))


def _optimizer_ticks(step: Step) -> list[tuple[str, int]]:
    """The slots of buckets, between the first and the last of each optimizer's step."""
    found, tick = [], 0
    for call in step.calls:
        slots = call.schedule.slots
        if call.schedule.kind == "optimizer":
            found += [(slot.kernel, tick + at) for at, slot in enumerate(slots) if 0 < at < len(slots) - 1]
        tick += len(slots)
    return found


def _has_bucket_on_host(step: Step) -> bool:
    return any(kernel.endswith(" on the host") for kernel, _ in _optimizer_ticks(step))


def measure_update_bytes_per_s() -> int:
    """What torch's fused update reads and writes in a second, on the threads that torch has."""
    parameter = torch.nn.Parameter(torch.zeros(TRIED_ELEMENTS, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    step: Any = torch.optim.AdamW.step
    took = []
    for _ in range(4):
        began_ns = time.perf_counter_ns()
        step.__wrapped__(optimizer)  # beneath the hooks
        took.append(time.perf_counter_ns() - began_ns)
    return int(7 * parameter.nbytes * 10**9 / median(took[1:]))
