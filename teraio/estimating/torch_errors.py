"""Short reasons for errors inside torch, one line each."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

EXPLANATION = re.compile(r"Explanation: ([^\n]+)")
GOT = re.compile(r"got (\w+\('[^\n]*'\))")
PLACE = re.compile(r'File "([^"]+)", line (\d+), in \w+\n +(?! |File)([^\n]+)')
INSTEAD = (
    "Estimate a part without it, or train within the budget and plan from what "
    "options={'profile': 'run.profile.json'} measures"
)
NOISY_LOGGER = "torch._subclasses.fake_tensor"  # this logger prints each failing operator with a traceback


def reason_of_error(error: BaseException) -> str:
    """Return the first line of the error's message. If the backend raised the error, use the backend's own
    exception.

    For an error of Dynamo, add the line of the model's code that caused it.
    """
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        error = error.inner_exception
    text = str(error).strip()
    first = next(iter(text.splitlines()), "").strip().rstrip(".")
    if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return f"{type(error).__name__}: {first}".rstrip(": ")
    detail = GOT.search(text) or EXPLANATION.search(text)
    return (
        f"{first}{': ' + detail[1].rstrip('.') if detail else ''}"
        f"{last_line_of_stack(text.partition('from user code')[2])}"
    )


def last_line_of_stack(stack: str) -> str:
    """Return the last line of a printed stack, with its file and line number, in parentheses."""
    where = PLACE.findall(stack)
    return f" ({where[-1][0]}:{where[-1][1]}: {where[-1][2].strip()})" if where else ""


@contextmanager
def silence_operator_errors() -> Iterator[None]:
    """Stop torch's log of failing operators while the block runs. The estimate raises its own error for such
    a failure.
    """
    logger = logging.getLogger(NOISY_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
