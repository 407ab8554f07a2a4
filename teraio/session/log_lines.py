"""How a run speaks: lines on the logger `teraio`, and artifacts in torch's own trace.

    nothing set            our lines on stderr, from INFO
    TERAIO_LOG=warning     from there (debug, info, warning, error, off); debug has a line per step
    TORCH_LOGS=teraio      torch writes them, with its prefix; +teraio from DEBUG
    logging.basicConfig    or any other handler: the program decides

What is said of the training as such is said by the first rank alone; warnings by each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch

from teraio.errors import OptionError
from teraio.formats.fields import suggest_nearest_name
from teraio.formats.plan import Evict, Plan
from teraio.formats.profile import Profile
from teraio.passes.planner.simulate.simulate import device_bytes_by_kind
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
    """Shows our lines, unless the program has said where log lines go."""
    asked = (os.environ if environ is None else environ).get("TERAIO_LOG", "").strip().lower()
    if asked and asked not in LEVELS:
        raise OptionError(
            f"TERAIO_LOG: '{printable_line(asked)}' is not one of {', '.join(LEVELS)}"
            f"{suggest_nearest_name(asked, list(LEVELS))}"
        )
    if FIRST_RANK not in log.filters:
        log.addFilter(FIRST_RANK)
    if not log.handlers and not logging.getLogger().handlers and log.level == logging.NOTSET:
        lines = logging.StreamHandler()
        lines.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(lines)
        log.setLevel(LEVELS[asked or "info"])
    elif asked:
        log.setLevel(LEVELS[asked])


class _FirstRank(logging.Filter):
    """Warnings pass in every rank, the rest in the first."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or rank() == 0


FIRST_RANK = _FirstRank()


def rank() -> int:
    """Of this process among those that train together; torchrun sets it before they know each other."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    told = os.environ.get("RANK", "0")
    return int(told) if told.isdecimal() else 0


def describe_plan(plan: Plan, profile: Profile) -> str:
    """What a plan promises, in one line."""
    if not plan.moves:
        budget = fmt_bytes(plan.budget_bytes)
        return f"planned by {plan.planner}: the step fits into {budget} whole: nothing moves"
    plain, kept = (
        [sum(column) for column in zip(*device_bytes_by_kind(each, profile).values())]
        for each in (Plan("", "", 0), plan)
    )
    away = max((one - other for one, other in zip(plain, kept)), default=0)
    tiers = sorted({move.to if isinstance(move, Evict) else move.source for move in plan.moves})
    where = " and ".join({"ssd": "the SSD", "host": "the host"}.get(tier, tier) for tier in tiers)
    compute_ns = sum(kernel.duration_ns for kernel in profile.kernels)
    step_ns, bound_ns = plan.predicted.step_ns, plan.predicted.bound_ns
    told = (
        f"planned by {plan.planner}: up to {fmt_bytes(max(away, 0))} of {fmt_bytes(max(plain, default=0))} "
        f"live on {where}, {fmt_count(len(plan.moves), 'move')}"
    )
    if step_ns and compute_ns:
        told += f"; a step of {fmt_ns(step_ns)}, {step_ns / compute_ns:.2f}x of unlimited"
    if step_ns and bound_ns:
        told += f", {step_ns / bound_ns - 1:.0%} above the bound"
    return told


def add_trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A file of ours in the trace that TORCH_TRACE asks for, where tlparse finds it. Torch promises nothing
    about how, so a torch that does it otherwise gets none."""
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
