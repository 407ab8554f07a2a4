"""The log lines of `teraio run`: what was compiled, whether numbers differ from the script's own, and figures
at the end.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from teraio.options import Settings, is_disabled
from teraio.units import fmt_bytes, fmt_count, fmt_ns, printable_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger("teraio")

_said: set[str] = set()
_compiled = 0
COMPILED_MOST = 3  # number of lines about compiled modules; a script may call dozens of modules one by one


def _say(text: str) -> None:
    """Log a line. Log the same line only once.

    A library may have set up logging from WARNING on. The user of `teraio run` has not chosen this, so the
    line then goes to stderr directly.
    """
    from teraio.session.log_lines import rank, set_up_logging

    if text in _said:
        return
    _said.add(text)
    set_up_logging()
    if log.isEnabledFor(logging.INFO) or os.environ.get("TERAIO_LOG", "").strip():
        log.info("teraio: %s", text)
    elif rank() == 0:
        sys.stderr.write(f"teraio: {text}\n")


@cache
def register_end_line() -> None:
    """Log a line at the end of this process, which trains. Only the first call has an effect."""
    atexit.register(_say_at_end)


def say_compiled(module: torch.nn.Module) -> None:
    """Log that teraio compiles a model of the script, and whether the compiled numbers are the script's."""
    global _compiled
    _compiled += 1
    if _compiled > COMPILED_MOST:
        return
    settings = Settings.parse()
    count = sum(p.numel() for p in module.parameters())
    given = settings.memory
    amount = given if given is None or given.size_bytes is None else fmt_bytes(given.size_bytes)
    budget = f"memory {amount}" if amount is not None else "all available memory"
    _say(
        f"compiles {type(module).__name__} ({count:,} parameters) at its first call: backend 'teraio', "
        f"inner '{settings.inner}', {budget if not is_disabled() else 'no budget (TERAIO_DISABLE)'}"
    )
    if settings.inner == "eager":
        _say("numbers: operators run as in eager PyTorch, except those that AOTAutograd decomposes")
    else:
        _say(
            "numbers: Inductor's differ from eager PyTorch's in the last bits, as with any torch.compile. "
            "TERAIO_DISABLE=1 runs the same programs without a budget, with the same bits"
        )


def say_no_optimizer() -> None:
    """Log that models are compiled late, because the script updates their weights itself."""
    _say(
        "the first backward ran without an optimizer of torch, so the first step kept no budget; models are "
        "compiled from now on"
    )


def say_moved(module: torch.nn.Module, size_bytes: int, device: str) -> None:
    """Log that a model moves to a GPU within the budget, because it is larger."""
    _say(
        f"{type(module).__name__} ({fmt_bytes(size_bytes)}) does not fit on {device} within the budget: each "
        f"tensor may be evicted as soon as it has moved"
    )


def say_script_compiles(name: str) -> None:
    _say(f"the script's torch.compile of {printable_line(name)} gets backend 'teraio'")


def say_left_out(name: str, what: list[str]) -> None:
    _say(f"the script's torch.compile of {printable_line(name)}: left out {', '.join(what)}")


def say_left_alone(name: str, backend: Any) -> None:
    backend = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
    _say(
        f"the script's torch.compile of {printable_line(name)} keeps its backend {printable_line(backend)}, "
        f"so no budget covers its activations"
    )


def _say_at_end() -> None:
    """Log what the run did, from the sums since its start. Warn if teraio compiled nothing.

    Nothing is imported here: at the exit of Python, an import of torch's compiler may fail.
    """
    session = sys.modules.get("teraio.session.session")
    figures = session.stats() if session is not None else {}
    if figures.get("step") or figures.get("evaluations"):
        steps, peak = fmt_count(figures["step"], "step"), fmt_bytes(figures["peak_bytes"], up=True)
        if figures["evaluations"]:
            steps += f", {fmt_count(figures['evaluations'], 'evaluation')}"
        _say(
            f"the run: {steps}; peak {peak} of {fmt_bytes(figures['budget_bytes'])}; "
            f"wrote {fmt_bytes(figures['written_bytes'])} and read {fmt_bytes(figures['read_bytes'])}; "
            f"waited {fmt_ns(figures['stall_ns'])}"
        )
    elif not figures and not _compiled and not is_disabled():
        log.warning(
            "teraio: no budget was kept, because nothing was compiled. No module that contains a trained "
            "weight was called while gradients were enabled. A script that calls other methods of "
            "its model needs torch.compile(..., backend='teraio') for the functions that it calls"
        )
