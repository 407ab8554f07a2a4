"""The table of metrics that all loggers share: one row per key of `teraio.stats()`.

In: a dict of `teraio.stats()`. Out: names with units, kinds, and values in base units. This module is the
only source of names: docs/reports.md shows its table, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from teraio.runtime.step.stats import Phase

Kind = Literal["gauge", "counter", "state"]

# The phases in the order of their numbers, for loggers that accept only numbers.
PHASES: tuple[str, ...] = get_args(Phase)
NS_PER_S = 10**9
NS_PER_DAY = 86_400 * NS_PER_S
PER_DAY = "written_per_day_bytes"  # computed here, from `step_written_bytes` and `step_ns`


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: its key in `teraio.stats()`, its kind, and a sentence that explains it.

    A gauge can fall, a counter only rises, and a state is one of PHASES. The suffix of the key gives the
    unit.
    """

    key: str
    kind: Kind
    help: str
    brief: bool = False  # True: also in the log of a trainer

    @property
    def unit(self) -> str:
        """Return the unit as a word, or an empty text for a plain number."""
        if self.key.endswith("_ns"):
            return "seconds"
        if self.key.endswith("_bytes"):
            return "bytes"
        return "ratio" if self.key == "above_bound" else ""

    @property
    def base(self) -> str:
        """Return the name without a unit."""
        return "steps" if self.key == "step" else self.key.removesuffix("_ns").removesuffix("_bytes")

    @property
    def name(self) -> str:
        """Return the name with its unit, as in `step_seconds`."""
        return f"{self.base}_{self.unit}" if self.unit else self.base

    @property
    def prometheus_name(self) -> str:
        return f"teraio_{self.name}_total" if self.kind == "counter" else f"teraio_{self.name}"

    def number_in(self, stats: Mapping[str, Any]) -> int | float | None:
        """Return the value in the base unit, or None if `stats` has no such value. A state gives its number
        in PHASES."""
        if self.key == PER_DAY:
            return _written_per_day(stats)
        value = stats.get(self.key)
        if value is None:
            return None
        if self.kind == "state":
            return PHASES.index(value)
        return value / NS_PER_S if self.unit == "seconds" else value + 0


def _written_per_day(stats: Mapping[str, Any]) -> int | None:
    """Return the bytes that a day of steps like the last one would write."""
    took_ns, written = stats.get("step_ns"), stats.get("step_written_bytes")
    return round(written * NS_PER_DAY / took_ns) if took_ns and written is not None else None


METRICS = (
    Metric("step", "counter", "training steps taken since teraio started"),
    Metric("evaluations", "counter", "steps of inference taken since teraio started"),
    Metric("phase", "state", "how the next step runs", brief=True),
    Metric("steady", "gauge", "1 if no such step is measured, tried or compared from now on"),
    Metric(
        "step_ns", "gauge", "time of the last step, from its first kernel to its optimizer's end", brief=True
    ),
    Metric(
        "step_stall_ns",
        "gauge",
        "part of the last step in which the host waited for transfers",
        brief=True,
    ),
    Metric("step_misses", "gauge", "fetches of the last step that were in no plan"),
    Metric("step_written_bytes", "gauge", "bytes that the last step wrote to SSDs", brief=True),
    Metric("step_read_bytes", "gauge", "bytes that the last step read from SSDs", brief=True),
    Metric(
        PER_DAY,
        "gauge",
        "bytes that a day of steps like the last one would write; compare it with a drive's rating",
        brief=True,
    ),
    Metric("step_peak_bytes", "gauge", "peak of tensors in the last step, plus the reserve", brief=True),
    Metric("step_overrun_bytes", "gauge", "bytes beyond the budget in the last step"),
    Metric("predicted_step_ns", "gauge", "time of a step that the plan predicts; only with a plan"),
    Metric("bound_ns", "gauge", "a lower bound of the step time for every plan; only with a plan"),
    Metric("above_bound", "gauge", "step time divided by the bound, minus 1; only with a plan"),
    Metric("budget_bytes", "gauge", "the budget, which limits the peak", brief=True),
    Metric("reserve_bytes", "gauge", "part of the budget for memory that teraio does not count"),
    Metric("user_code_bytes", "gauge", "the most bytes that user code allocates between compiled programs"),
    Metric("resident_bytes", "gauge", "bytes of resident tensors, without the reserve"),
    Metric("peak_bytes", "gauge", "the highest peak of all steps"),
    Metric("device_peak_bytes", "gauge", "the most GPU memory that torch's allocator had allocated at once"),
    Metric(
        "device_reserved_peak_bytes",
        "gauge",
        "the most GPU memory that torch's allocator had taken from the driver, free blocks included",
    ),
    Metric("stall_ns", "counter", "time in which the host waited for transfers"),
    Metric("misses", "counter", "fetches that were in no plan"),
    Metric("written_bytes", "counter", "bytes written to SSDs", brief=True),
    Metric("read_bytes", "counter", "bytes read from SSDs"),
    Metric("to_host_bytes", "counter", "bytes of a GPU's tensors that were copied to host memory"),
    Metric("from_host_bytes", "counter", "bytes of a GPU's tensors that were copied from host memory"),
    Metric("evictions", "counter", "evictions that copied bytes"),
    Metric("drops", "counter", "copies that were freed, because the same bytes exist elsewhere"),
    Metric("fetches", "counter", "fetches of evicted tensors"),
    Metric("slots", "counter", "slots that ran; a slot is the point before a kernel"),
    Metric("planned_moves", "counter", "moves that a plan asked for"),
    Metric("skipped_moves", "counter", "moves of a plan that were not possible or not necessary"),
    Metric("failed_moves", "counter", "moves that failed"),
    Metric("touches", "counter", "reads of evicted tensors by user code"),
    Metric("ahead", "counter", "fetches that began before user code read the tensor"),
    Metric("overrun_bytes", "gauge", "the most bytes beyond the budget in a step so far"),
    Metric("owed_updates", "counter", "updates of weights that `step()` has put off"),
    Metric("late_updates", "counter", "owed updates that ran in a forward"),
    Metric("settled_updates", "counter", "owed updates that ran earlier, because code needed their tensors"),
    Metric("backward_updates", "counter", "updates of weights that ran in a backward"),
    Metric("owed_scalings", "counter", "scalings of evicted gradients that ran after a later fetch"),
    Metric("remembered_norms", "counter", "norms of evicted gradients that needed no fetch"),
)


def scalars(stats: Mapping[str, Any]) -> dict[str, int | float]:
    """Return all numbers under the names of loggers, as in `teraio/step_seconds`."""
    found = {f"teraio/{metric.name}": metric.number_in(stats) for metric in METRICS}
    return {name: value for name, value in found.items() if value is not None}


def brief_figures(stats: Mapping[str, Any], words: bool) -> dict[str, int | float | str]:
    """Return the figures for the log of a trainer. With `words` the phase is a word, otherwise a number."""
    figures: dict[str, int | float | str] = {}
    for metric in METRICS:
        value = metric.number_in(stats) if metric.brief else None
        if value is not None:
            is_word = words and metric.kind == "state"
            figures[f"teraio/{metric.name}"] = stats[metric.key] if is_word else value
    return figures


def table_for_docs() -> str:
    """Return the table of docs/reports.md, as Markdown."""
    rows = ["| key | name in loggers | kind | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        key = "" if metric.key == PER_DAY else f"`{metric.key}`"
        rows.append(f"| {key} | `{metric.name}` | {metric.kind} | {metric.help} |")
    return "\n".join(rows) + "\n"
