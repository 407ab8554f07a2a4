"""ZeRO-Infinity's layer-wise schedule on one device.

In: a problem. Out: a plan that streams weights, gradients and optimizer states. Activations never move.

Source: Rajbhandari et al., SC 2021 (arXiv 2104.07857), and DeepSpeed 0.16. If appendix B of the TERAIO paper
names a setting, its value is from there. All other values are DeepSpeed's defaults.

    weights       section 5.1.1 (infinity offload engine), runtime/zero/partitioned_param_coordinator.py:
                  A weight is fetched before the module that uses it.
                  The next weights of the recorded trace are fetched ahead, up to PREFETCH_BUCKET elements
                  (stage3_prefetch_bucket_size).
                  A weight is released after its module. It is kept if its next use is closer than
                  MAX_REUSE_DISTANCE elements (stage3_max_reuse_distance), and if at most MAX_LIVE elements
                  are resident (stage3_max_live_parameters).
    small         weights below stage3_param_persistence_threshold are kept resident
    unchanged     a weight that was not updated is released without a write, because NVMe has a clean copy
    gradients     section 5.2.1: evicted as soon as the backward has made them
    states        runtime/swap_tensor/pipelined_optimizer_swapper.py: while one sub-group is updated, the next
                  sub-group is read (pipeline_read) and the previous sub-group is written (pipeline_write)
    activations   kept resident; offloading of checkpoints is an option of the model's code, not of ZeRO

A sub-group is one parameter, as in this repository's optimizer kernels. The planner does not model three
parts of DeepSpeed: partitions over devices, Adam on the CPU, and tiling of operators.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan

from ..greedy.choose import no_tier_room_error
from ..problem.problem import Gap, Problem
from .common import Absence, mark_writing_absences, plan_of_absences, tiers_and_ledger_without_unused
from .g10 import routes_in_tier_order

PREFETCH_BUCKET = 50_000_000  # elements; DeepSpeed's default
MAX_REUSE_DISTANCE = 1_000_000_000  # elements; DeepSpeed's default
MAX_LIVE = 1_000_000_000  # elements; DeepSpeed's default
PERSISTENCE_THRESHOLD = 100_000  # elements; the same in appendix B of the TERAIO paper and in DeepSpeed
ELEMENT_BYTES = 2  # weights are in half precision

NVME_FIRST = ("ssd", "host")  # as if offload_param.device and offload_optimizer.device were `nvme`


def zero_infinity(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Return ZeRO-Infinity's plan. The schedule is fixed, so the time limit and `seed` are unused."""
    (tiers, _), tensors = tiers_and_ledger_without_unused(problem), problem.profile.tensors
    trace, states = _Trace(problem), _optimizer_ticks(problem)
    absences: list[Absence] = []
    for index, gap in enumerate(problem.gaps):
        kind = tensors[gap.tensor].kind
        if gap.unused or kind not in {"weight", "grad", "state"}:
            continue
        if kind == "weight" and (
            gap.size_bytes < PERSISTENCE_THRESHOLD * ELEMENT_BYTES or trace.is_reused_soon(gap)
        ):
            continue
        route = next((r for r in routes_in_tier_order(problem, NVME_FIRST) if tiers.has_room(gap, r)), None)
        if route is None:
            raise no_tier_room_error(problem, budget_bytes)
        tiers.assign_tier(gap, route)
        before = _neighbour_optimizer_tick(states, gap.end, -1, problem.ticks_per_step)
        trigger = trace.tick_to_fetch(gap) if kind == "weight" else before
        # The states of a sub-group are written while the next sub-group is updated. The write ends before the
        # update after that, which needs the buffer.
        written = (
            _neighbour_optimizer_tick(states, gap.start, 2, problem.ticks_per_step)
            if kind == "state"
            else gap.start + 1
        )
        trigger = min(max(trigger, gap.start + 1), gap.end)
        absences.append(Absence(index, route, min(max(written, gap.start + 1), gap.end), trigger))
    absences = mark_writing_absences(problem, absences)
    fails = "it never evicts activations, and it keeps all weights of one module resident"
    return plan_of_absences(problem, absences, tiers, budget_bytes, "zero-infinity", fails)


class _Trace:
    """All uses of weights in three consecutive steps, in order. A distance is counted in used elements."""

    def __init__(self, problem: Problem) -> None:
        self.ticks = max(problem.ticks_per_step, 1)
        uses = sorted(
            (tick, tensor.size_bytes // ELEMENT_BYTES)
            for tensor in problem.profile.tensors
            if tensor.kind == "weight"
            for tick in {*tensor.reads, *tensor.writes}
        )
        self.at = [tick + lap * self.ticks for lap in range(3) for tick, _ in uses]
        self.sums = [0]
        for _ in range(3):
            for _, elements in uses:
                self.sums.append(self.sums[-1] + elements)

    def elements_between(self, first: int, end: int) -> int:
        """Return the number of weight elements that kernels use from tick `first` up to tick `end`."""
        return self.sums[bisect_left(self.at, end)] - self.sums[bisect_left(self.at, first)]

    def is_reused_soon(self, gap: Gap) -> bool:
        """Return whether the weight that is idle in this gap is used again soon.

        Count the elements that kernels use within the gap. The use is soon if they are fewer than
        MAX_REUSE_DISTANCE and fewer than MAX_LIVE.
        """
        return self.elements_between(gap.start + 1, gap.end) < min(MAX_REUSE_DISTANCE, MAX_LIVE)

    def tick_to_fetch(self, gap: Gap) -> int:
        """Return the tick at which the fetch of the weight that is idle in this gap begins.

        Go back from the use that ends the gap, until the used elements fill one prefetch bucket. The weight's
        own elements count as well. If the weight alone fills a bucket, return the tick at which the previous
        weight is used.
        """
        place = bisect_left(self.at, gap.end)
        wanted = self.sums[place] - PREFETCH_BUCKET + gap.size_bytes // ELEMENT_BYTES
        first = min(bisect_right(self.sums, wanted) - 1, place - 1)
        return self.at[max(first, 0)] if place else gap.end


def _optimizer_ticks(problem: Problem) -> list[int]:
    """Return the ticks of all kernels that read or write optimizer states, in order."""
    return sorted({t for x in problem.profile.tensors if x.kind == "state" for t in (*x.reads, *x.writes)})


def _neighbour_optimizer_tick(ticks_: list[int], tick: int, offset: int, ticks: int) -> int:
    """Return the tick of the sub-group that is updated `offset` places after the sub-group at `tick`.

    The last sub-group of a step is followed by the first sub-group of the next step.
    """
    lap, inside = divmod(tick, max(ticks, 1))
    place = bisect_left(ticks_, inside) + offset
    if not ticks_:
        return tick
    more, place = divmod(place, len(ticks_))
    return ticks_[place] + (lap + more) * ticks
