"""Figures of the last step, for loggers: `teraio.stats()`.

A step counts as soon as its optimizer has stepped. Another optimizer may still step in the same step. So a
loop that logs after `optimizer.step()` gets the figures of the step that it has just taken.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, TypedDict

from teraio.units import fmt_bytes, fmt_ns

from ..ledger.mover import Mover
from .tracker import Expectation

log = logging.getLogger("teraio")

Phase = Literal["measuring", "planned", "on demand"]


class Stats(TypedDict, total=False):
    """The result of `teraio.stats()`. It is empty while no program has been compiled.

    A value whose name begins with `step_` is for the last step alone. All other sums count from the engine's
    start. Unknown values are left out.
    """

    step: int  # number of training steps taken
    evaluations: int  # number of steps of inference taken, in which nothing was trained
    phase: Phase  # phase of the next step
    steady: bool  # True if no such step is measured, tried or compared from now on
    step_ns: int  # time from the step's first kernel to the end of its optimizer
    step_stall_ns: int  # part of `step_ns` in which the host waited for transfers
    step_misses: int  # fetches that were in no plan
    step_written_bytes: int  # bytes written from the device to the SSD
    step_read_bytes: int  # bytes read from the SSD to the device
    step_peak_bytes: int  # peak of tensors and the reserve; at most the budget
    step_overrun_bytes: int  # bytes beyond the budget, for user code or a library's kernel
    predicted_step_ns: int  # prediction of `step_ns` by the plan
    bound_ns: int  # a lower bound of `step_ns` for every plan
    above_bound: float  # `step_ns / bound_ns - 1`
    budget_bytes: int
    reserve_bytes: int  # part of the budget for bytes of no known tensor
    # The peak of the bytes that user code takes for tensors that the engine does not know. The budget has
    # room for these bytes.
    user_code_bytes: int
    resident_bytes: int  # bytes of resident tensors, without the reserve
    peak_bytes: int  # the highest `step_peak_bytes`
    device_peak_bytes: int  # peak of a GPU's bytes in use, by its allocator; libraries are included
    device_reserved_peak_bytes: int  # peak of bytes in use and free blocks that the GPU's allocator keeps
    stall_ns: int
    misses: int
    written_bytes: int
    read_bytes: int
    to_host_bytes: int  # bytes of a GPU's tensors, copied to host memory
    from_host_bytes: int
    evictions: int
    drops: int
    fetches: int
    slots: int
    planned_moves: int
    skipped_moves: int
    failed_moves: int
    touches: int
    ahead: int
    overrun_bytes: int
    owed_updates: int  # updates that `step()` has put off
    late_updates: int  # such updates that ran in a forward
    settled_updates: int  # such updates that ran earlier, because code needed their tensors
    backward_updates: int  # updates that ran in a backward
    owed_scalings: int  # scalings of evicted gradients, such as clipping, that ran after a later fetch
    remembered_norms: int  # norms of evicted gradients that needed no fetch


class ShownStats(dict[str, Any]):
    """A dict of figures that shows itself in a notebook. It is pickled as a dict of Python's library."""

    def _repr_html_(self) -> str:
        """Return HTML. Notebooks call this method by its name."""
        from teraio.report.notebook import view_of_stats

        return view_of_stats(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


class EndedStep(NamedTuple):
    """The figures of a step that has ended, and its moments of begin and end.

    Other threads read both. One assignment replaces them, so that they belong to the same step.
    """

    figures: Stats
    took: tuple[Any, Any]


class StepMeter:
    """The figures of the last step, and the sums since the start.

    Any thread may call `stats` while a step runs. `stats` takes no lock.
    """

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.begun = 0
        self.trained = 0  # number of training steps
        self.trained_at = 0  # the value of `begun` in the last training step
        moment = mover.device.moment_after_kernels()
        self.began = moment
        self.ended_ns = 0  # the last step's end by the host's clock; 0 while a step runs
        self.at_begin: tuple[int, ...] = self._totals_since_start()
        self.peak_bytes = 0  # the highest peak before this step
        self.last = EndedStep({}, (moment, moment))

    def _totals_since_start(self) -> tuple[int, ...]:
        mover, counts = self.mover, self.mover.counts
        return counts.stall_ns, counts.misses, mover.store.total_written_bytes, mover.bytes_read_from_ssd

    def begin_step(self) -> None:
        """Begin a step, whose first program runs next."""
        self.begun += 1
        self.began, self.ended_ns = self.mover.device.moment_after_kernels(), 0
        self.at_begin = self._totals_since_start()
        counts = self.mover.counts
        self.peak_bytes = max(self.peak_bytes, counts.peak_bytes)
        figures = self.last.figures
        if figures:  # also count overruns between the optimizer's step and the end of the step
            figures["step_overrun_bytes"] = counts.step_overrun_bytes
        counts.begin_step()

    def end_step(self, reserve_bytes: int, trained: bool) -> Any:
        """End the step, and return the moment of the end. `trained` is True if weights were updated.

        After a step of an optimizer, a second one may step in the same training step. Then this method is
        called again, and the end is later.
        """
        if trained and self.trained_at != self.begun:
            self.trained, self.trained_at = self.trained + 1, self.begun
        stall_ns, misses, written, read = (n - b for n, b in zip(self._totals_since_start(), self.at_begin))
        took, self.ended_ns = (
            (self.began, self.mover.device.moment_after_kernels()),
            time.perf_counter_ns(),
        )
        figures: Stats = {
            "step": self.trained,
            "evaluations": self.begun - self.trained,
            "step_stall_ns": stall_ns,
            "step_misses": misses,
            "step_written_bytes": written,
            "step_read_bytes": read,
            "step_peak_bytes": self.mover.counts.peak_bytes + reserve_bytes,
        }
        self.last = EndedStep(figures, took)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "teraio: step %d: %s, of it %s of waiting; misses: %d; written %s, read %s; "
                "peak %s, overrun %s",
                self.begun,
                fmt_ns(self.step_ns()),
                fmt_ns(stall_ns),
                misses,
                fmt_bytes(written),
                fmt_bytes(read),
                fmt_bytes(figures["step_peak_bytes"]),
                fmt_bytes(self.mover.counts.step_overrun_bytes),
            )

        return took[1]

    def step_ns(self) -> int:
        """Return the duration of the last step, from its first kernel to the end of its optimizer."""
        return self._duration_ns(self.last)

    def _duration_ns(self, step: EndedStep) -> int:
        began_ns, ended_ns = self.mover.device.moments_in_ns(step.took)
        return ended_ns - began_ns

    def stats(self, expected: Expectation, budget_bytes: int, reserve_bytes: int) -> Stats:
        mover, last, has_ended = self.mover, self.last, self.ended_ns > 0
        sums: Stats = {**asdict(mover.counts)}  # type: ignore[typeddict-item]
        sums["peak_bytes"] = max(self.peak_bytes, mover.counts.peak_bytes) + reserve_bytes
        sums["resident_bytes"], sums["budget_bytes"] = mover.resident_bytes, budget_bytes
        sums["reserve_bytes"] = reserve_bytes
        sums["user_code_bytes"] = max((*expected.outside.values(), *expected.kept.values()), default=0)
        overrun = sums.pop("step_overrun_bytes")
        sums["written_bytes"], sums["read_bytes"] = mover.store.total_written_bytes, mover.bytes_read_from_ssd
        if mover.device.counts_all:
            sums["device_peak_bytes"] = mover.device.highest_used_bytes()
            sums["device_reserved_peak_bytes"] = mover.device.highest_reserved_bytes()
        sums["phase"] = expected.phase
        sums["step"] = sums["evaluations"] = 0
        sums.update(last.figures)
        if last.figures:
            sums["step_ns"] = self._duration_ns(last)
            if has_ended:
                sums["step_overrun_bytes"] = overrun
        predicted = expected.predicted
        if predicted is not None and predicted.step_ns:
            sums["predicted_step_ns"] = predicted.step_ns
        if predicted is not None and predicted.bound_ns:
            sums["bound_ns"] = predicted.bound_ns
            if "step_ns" in sums:
                sums["above_bound"] = sums["step_ns"] / predicted.bound_ns - 1
        return sums
