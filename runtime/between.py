"""What Dynamo tells the engine before programs run, and what a signal's handler is told between the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _EnableTorchFunction

from . import engine as _engine


def weights_off_guard() -> None:
    """A program may run next: to it they are plain tensors."""
    if (engine := _engine.ENGINE) is not None:
        engine.user.forget_others()
        engine.tracker.grad_mode = torch.is_grad_enabled()
        engine.guard.take_off()


def weights_on_guard() -> None:
    """It does not: user code goes on."""
    if (engine := _engine.ENGINE) is not None:
        engine.guard.put_on()


@contextmanager
def user_code() -> Iterator[None]:
    """It runs before what may be a program, or where torch asks no class about its tensors. If it raises, no
    program runs."""
    was_off = (engine := _engine.ENGINE) is not None and engine.guard.taken_off
    weights_on_guard()
    with _EnableTorchFunction():
        yield
    if was_off:
        weights_off_guard()


def foreign_program(backward: bool) -> None:
    """Another backend compiled something that may read weights where no guard sees it; if it is a whole
    backward, what forwards saved as well."""
    if (engine := _engine.ENGINE) is not None:
        what = "weights, and what forwards saved," if backward else "weights"
        engine.user.expose_all(f"another compiler's program may read {what}", backward)
