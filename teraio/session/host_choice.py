"""The choice between device and host for optimizer steps, with `optimizer_step="auto"`.

A bucket is a group of parameters that the optimizer steps together. The choice compares the predictions of
two plans:

measured step -> plan                 if this plan fetches no state, the device keeps all buckets
the same step with buckets on host    the buckets take the time of the host, and use no device memory
              -> plan                 if this plan is at least 5 % faster, the host takes these buckets,
                                      and the step is measured again
measured step with host buckets
              -> plan                 if this plan is slower than the device's plan, the device takes the
                                      buckets back
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from teraio.errors import TeraioError
from teraio.formats.machine import Machine
from teraio.formats.plan import Fetch, Plan
from teraio.formats.profile import Profile, Tensor
from teraio.formats.schedule import Step
from teraio.formats.updates import ON_HOST
from teraio.runtime.engine.engine import Engine
from teraio.runtime.optimizer import host_step
from teraio.session.course import Order
from teraio.session.plan_choice import Ask, Work
from teraio.units import fmt_count, fmt_ns

log = logging.getLogger("teraio")

WORTH_PERCENT = 5  # least gain, in percent of the step time; predictions are too inexact for smaller gains
TIMED_ELEMENTS = 2**22  # number of elements of the parameter that is updated in the measurement

Make = Callable[[Profile], Ask]


@dataclass(frozen=True, slots=True)
class BucketEstimate:
    """One bucket of an optimizer's step. `moved_ns` is its transfer time if the device steps it. `host_ns` is
    the time of its step on the host.
    """

    kernel: str
    tick: int
    tensors: tuple[Tensor, ...]
    moved_ns: int  # duration of the bucket's fetches, or of its evictions if they take longer
    host_ns: int

    @property
    def host_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors if t.kind != "grad")


class HostChoice:
    """The choice between device and host for the optimizer steps of one engine.

    The session makes this choice once, and may undo it once.
    """

    def __init__(self, engine: Engine, machine: Machine, is_open: bool) -> None:
        self.engine, self.machine, self.is_open = engine, machine, is_open
        self.device_ns = 0  # predicted step time with all buckets on the device; 0 if there is no prediction
        self.device_order: Order = ()  # the programs of the step before buckets went to the host

    def switch_if_faster(self, profile: Profile, step: Step, plan: Plan, make: Make) -> Work[bool]:
        """Give buckets to the host, or back to the device, if the predicted step is then faster. Ask for a
        plan with these buckets on the host.

        Return True if this changed the step, which must then be measured again.
        """
        order = tuple(call.schedule.identity_hash for call in step.calls)
        if self.device_ns and order != self.device_order and _has_bucket_on_host(step):
            return self._undo_if_slower(plan)
        if not self.is_open or host_step.host_step_of(self.engine) is None or not _optimizer_ticks(step):
            return False
        buckets = self._buckets_faster_on_host(profile, step, plan)
        if not buckets:
            self.is_open = False
            return False
        try:
            host_plan = yield make(profile_with_host_buckets(profile, buckets))
        except TeraioError as error:
            self.is_open = False
            log.warning("teraio: no plan with optimizer steps on the host: %s", error)
            return False
        self.is_open = False
        device_ns, host_ns = plan.predicted.step_ns, host_plan.predicted.step_ns
        if not 0 < host_ns < device_ns * (100 - WORTH_PERCENT) // 100:
            return False
        log.info(
            "teraio: the host steps %s of the optimizer from now on: the plan predicts %s a step, and %s "
            "with all buckets on the device; the step is measured again",
            fmt_count(len(buckets), "bucket"),
            fmt_ns(host_ns),
            fmt_ns(device_ns),
        )
        self.device_ns, self.device_order = device_ns, order
        host_step.set_host_buckets(self.engine, {bucket.kernel for bucket in buckets})
        return True

    def _undo_if_slower(self, plan: Plan) -> bool:
        """Give all buckets back to the device, and return True, if the plan with host buckets predicts a
        slower step.

        Otherwise, keep the buckets on the host and return False.
        """
        device_ns, self.device_ns = self.device_ns, 0
        if plan.predicted.step_ns <= device_ns:
            return False
        log.info(
            "teraio: the optimizer steps on the device again: with the host, the plan predicts %s a step, "
            "without it %s",
            fmt_ns(plan.predicted.step_ns),
            fmt_ns(device_ns),
        )
        host_step.set_host_buckets(self.engine, ())
        self.engine.tracker.request_measuring(self.device_order)
        return True

    def _buckets_faster_on_host(self, profile: Profile, step: Step, plan: Plan) -> list[BucketEstimate]:
        """Return the buckets that the host steps in less time than their transfers take if the device steps
        them.

        Take the buckets with the largest gain first, as long as they fit into host memory.
        """
        ticks = len(profile.kernels)
        fetched = {(m.tensor, m.ready % ticks): m.source for m in plan.moves if isinstance(m, Fetch)}
        kinds = {tensor.name: tensor.kind for tensor in profile.tensors}
        if not any(kinds[name] == "state" for name, _ in fetched):
            return []
        host = host_step.host_step_of(self.engine)
        assert host is not None
        could = host.could
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
            tiers = {t.name: fetched[t.name, tick] for t in tensors if (t.name, tick) in fetched}
            written = [t for t in tensors if t.name in tiers and t.kind != "grad"]
            fetch_ns = sum(
                self._transfer_ns(t.size_bytes, tiers[t.name], "device") for t in tensors if t.name in tiers
            )
            evict_ns = sum(self._transfer_ns(t.size_bytes, "device", tiers[t.name]) for t in written)
            resident = [t for t in tensors if t.name not in tiers]
            down = sum(
                self._transfer_ns(t.size_bytes, "device", "host") for t in resident if t.kind == "grad"
            )
            up = sum(
                self._transfer_ns(t.size_bytes, "host", "device") for t in resident if t.kind == "weight"
            )
            touched_bytes = sum(t.size_bytes * (1 if t.kind == "grad" else 2) for t in tensors)
            host_ns = max(down, up, touched_bytes * 10**9 // rate)  # copies and updates of buckets overlap
            buckets.append(BucketEstimate(kernel, tick, tuple(tensors), max(fetch_ns, evict_ns), host_ns))
        return buckets

    def _transfer_ns(self, size_bytes: int, source: str, target: str) -> int:
        links = [link for link in self.machine.links if (link.source, link.target) == (source, target)]
        return sum(size_bytes * 10**9 // link.bandwidth_bytes_per_s for link in links)


def profile_with_host_buckets(profile: Profile, buckets: Sequence[BucketEstimate]) -> Profile:
    """Return the profile that the step is expected to have if the host steps these buckets."""
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
            is_around = tensor.born in writes and min((*reads, *writes)) != tensor.born
            born = tensor.born if is_around else None
            tensors.append(replace(tensor, reads=reads, writes=writes, born=born))
    step_ns = sum(kernel.duration_ns for kernel in kernels)
    return replace(profile, step_ns=step_ns, kernels=tuple(kernels), tensors=tuple(tensors))


def _optimizer_ticks(step: Step) -> list[tuple[str, int]]:
    """Return (kernel, tick) for each bucket of an optimizer call.

    The slots of an optimizer call are its buckets, except the first and the last slot.
    """
    found, tick = [], 0
    for call in step.calls:
        slots = call.schedule.slots
        if call.schedule.kind == "optimizer":
            found += [(slot.kernel, tick + at) for at, slot in enumerate(slots) if 0 < at < len(slots) - 1]
        tick += len(slots)
    return found


def _has_bucket_on_host(step: Step) -> bool:
    return any(kernel.endswith(ON_HOST) for kernel, _ in _optimizer_ticks(step))


def measure_update_bytes_per_s() -> int:
    """Measure how many bytes per second torch's fused AdamW reads and writes on the CPU, with all of torch's
    threads.
    """
    parameter = torch.nn.Parameter(torch.zeros(TIMED_ELEMENTS, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    step: Any = torch.optim.AdamW.step
    took = []
    for _ in range(4):
        began_ns = time.perf_counter_ns()
        step.__wrapped__(optimizer)  # AdamW's own step, without the hooks of torch
        took.append(time.perf_counter_ns() - began_ns)
    return int(7 * parameter.nbytes * 10**9 / median(took[1:]))
