"""Log lines of the logger `teraio`, and files in torch's own trace.

    nothing set            lines on stderr, from INFO
    TERAIO_LOG=warning     lines from this level (debug, info, warning, error, off); debug has a line per step
    TORCH_LOGS=teraio      torch writes the lines, with torch's prefix; +teraio from DEBUG
    logging.basicConfig    this call, or any other handler: only the user's program decides where lines go

In a distributed training, all processes (ranks) write warnings and errors. Only rank 0 writes the other
lines.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

import torch

from teraio.errors import OptionError
from teraio.formats.fields import suggest_nearest_name
from teraio.formats.plan import Evict, Plan
from teraio.formats.profile import Profile
from teraio.passes.planner.simulate.simulate import device_bytes_by_kind
from teraio.progress import line_erased
from teraio.terminal import bars_cleared, terminal_of
from teraio.units import fmt_bytes, fmt_count, fmt_ns, printable_line

log = logging.getLogger("teraio")

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}


def set_up_logging(environ: Mapping[str, str] | None = None) -> None:
    """Write log lines to stderr, unless the user's program has set up logging. `TERAIO_LOG` sets the
    level.
    """
    level = (os.environ if environ is None else environ).get("TERAIO_LOG", "").strip().lower()
    if level and level not in LEVELS:
        raise OptionError(
            f"TERAIO_LOG: '{printable_line(level)}' is not one of {', '.join(LEVELS)}"
            f"{suggest_nearest_name(level, list(LEVELS))}"
        )
    if FIRST_RANK not in log.filters:
        log.addFilter(FIRST_RANK)
    if not log.handlers and not logging.getLogger().handlers and log.level == logging.NOTSET:
        lines = _LinesOnStderr()
        lines.setFormatter(_PaintedWarnings("%(message)s"))
        log.addHandler(lines)
        log.setLevel(LEVELS[level or "info"])
    elif level:
        log.setLevel(LEVELS[level])


class _LinesOnStderr(logging.StreamHandler[TextIO]):
    """A handler that writes whole lines, above a progress line of teraio and above bars of tqdm.

    It looks up `sys.stderr` for each line, because rich replaces `sys.stderr` while it shows a bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        with line_erased(), bars_cleared(self.stream):
            super().emit(record)


class _PaintedWarnings(logging.Formatter):
    """A formatter that paints warnings and errors, if stderr shows colours."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return terminal_of(sys.stderr).paint(text, "red" if record.levelno >= logging.ERROR else "yellow")


class _FirstRank(logging.Filter):
    """A filter that passes warnings and errors of all ranks, but other lines only of rank 0."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or rank() == 0


FIRST_RANK = _FirstRank()


def rank() -> int:
    """Return the rank of this process. If torch.distributed is not initialized, read it from torchrun's
    variable RANK.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def describe_plan(plan: Plan, profile: Profile) -> str:
    """Return a log line about a plan: evicted bytes, number of moves, and predicted times."""
    if not plan.moves:
        budget = fmt_bytes(plan.budget_bytes)
        return f"planned by {plan.planner}: the step fits into {budget} whole: nothing moves"
    plain, kept = (
        [sum(column) for column in zip(*device_bytes_by_kind(each, profile).values())]
        for each in (Plan("", "", 0), plan)
    )
    evicted_bytes = max((one - other for one, other in zip(plain, kept)), default=0)
    tiers = sorted({move.to if isinstance(move, Evict) else move.source for move in plan.moves})
    where = " and ".join({"ssd": "the SSD", "host": "the host"}.get(tier, tier) for tier in tiers)
    compute_ns = sum(kernel.duration_ns for kernel in profile.kernels)
    step_ns, bound_ns = plan.predicted.step_ns, plan.predicted.bound_ns
    text = (
        f"planned by {plan.planner}: up to {fmt_bytes(max(evicted_bytes, 0))} of "
        f"{fmt_bytes(max(plain, default=0))} live on {where}, {fmt_count(len(plan.moves), 'move')}"
    )
    if step_ns and compute_ns:
        text += f"; a step of {fmt_ns(step_ns)}, {step_ns / compute_ns:.2f}x of unlimited"
    if step_ns and bound_ns:
        text += f", {step_ns / bound_ns - 1:.0%} above the bound"
    return text


def add_trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a file to the trace that the variable TORCH_TRACE turns on. The tool tlparse then shows the file.

    The torch function that adds files is private. If it differs in this version of torch, log that the file
    is missing.
    """
    try:
        from torch._logging import trace_structured

        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "json"},
            payload_fn=text,
            expect_trace_id=False,
        )
    except (ImportError, AttributeError, TypeError) as error:
        log.debug("teraio: no artifact %s in torch's trace: %s", name, error)
