"""Warnings about probable mistakes: unknown environment variables, a budget above the memory, patterns
without a match.

Each function returns the lines to log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase

from teraio.formats.fields import suggest_nearest_name
from teraio.formats.schedule import Step
from teraio.options import VARIABLES, Settings, env_name
from teraio.units import fmt_bytes, printable_line

SHOWN = 3  # number of tensor names that a line lists as examples


def unknown_variable_lines(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each environment variable that begins with TERAIO_ but is unknown.

    The line makes a user notice a mistyped name.
    """
    known = [*VARIABLES, *(env_name(field.name) for field in fields(Settings))]
    return [
        f"the environment variable {printable_line(name)} is no option and has no "
        f"effect{suggest_nearest_name(name, known)}"
        for name, value in sorted(environ.items())
        if name.startswith("TERAIO_") and name not in known and value.strip()
    ]


def oversized_budget_lines(budget_bytes: int, capacity_bytes: int) -> list[str]:
    """Return a line if the budget exceeds the machine's memory.

    With such a budget, the memory is full before the budget is reached, so tensors are evicted too late.
    """
    if budget_bytes <= capacity_bytes:
        return []
    budget, capacity = fmt_bytes(budget_bytes, up=True), fmt_bytes(capacity_bytes)
    if budget == capacity:
        budget, capacity = f"{budget_bytes} bytes", f"{capacity_bytes} bytes"
    return [
        f"memory is {budget}, but the machine or this process's control group has only {capacity}: tensors "
        f"are evicted too late, and the system may kill the process. Give less, or leave memory out"
    ]


def unmatched_keep_lines(globs: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return a line for each pattern of the option `keep` that matches no tensor.

    As examples, the line lists names of tensors. Names of weights come first, because users know them from
    their model. Plain sorting would not do this, because names of other tensors begin with a digit.
    """
    names = sorted(names, key=lambda name: (name[:1].isdigit(), name))
    parts = sorted({part for name in names for part in name.split(".")})
    examples = ", ".join([*names[:SHOWN], *["..."] * (len(names) > SHOWN)])
    lines = []
    for glob in dict.fromkeys(globs):
        if not any(fnmatchcase(name, glob) for name in names):
            meant = suggest_nearest_name(max(re.split(r"[][.*?!]+", glob), key=len), parts)
            lines.append(
                f"option 'keep': '{printable_line(glob)}' matches none of the {len(names)} tensors of "
                "4 KiB and more "
                f"that steps used{meant}; such tensors are {examples}"
            )
    return lines


def tensor_names_in(step: Step) -> set[str]:
    return {name for call in step.calls for name in call.tensors if name}


def describe_step(step: Step) -> str:
    """Describe a step by its calls and activations: `forward, backward, optimizer (310 MiB of activations)`.

    The size of the activations distinguishes steps whose batches have different shapes.
    """
    kinds = Counter(call.schedule.kind for call in step.calls)
    words = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
    saved = sum(size for _, kind, size, _ in step.kinds if kind == "activation")
    return f"{words} ({fmt_bytes(saved)} of activations)" if saved else words
