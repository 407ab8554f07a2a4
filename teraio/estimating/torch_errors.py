"""What went wrong inside of torch, in one line."""

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
SPEAKS = "torch._subclasses.fake_tensor"  # of each operator that fails, with a traceback


def reason_of_error(error: BaseException) -> str:
    """What the innermost exception says; where Dynamo met it, the line of the model, too."""
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        error = error.inner_exception
    text = str(error).strip()
    first = next(iter(text.splitlines()), "").strip().rstrip(".")
    if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return f"{type(error).__name__}: {first}".rstrip(": ")
    told = GOT.search(text) or EXPLANATION.search(text)
    return (
        f"{first}{': ' + told[1].rstrip('.') if told else ''}"
        f"{last_line_of_stack(text.partition('from user code')[2])}"
    )


def last_line_of_stack(stack: str) -> str:
    """The last line of a printed stack, in brackets."""
    where = PLACE.findall(stack)
    return f" ({where[-1][0]}:{where[-1][1]}: {where[-1][2].strip()})" if where else ""


@contextmanager
def silence_operator_errors() -> Iterator[None]:
    """What fails is said once, by us."""
    logger = logging.getLogger(SPEAKS)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
