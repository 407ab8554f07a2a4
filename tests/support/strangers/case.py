"""What a family of strangers is made of: a name, and a training that is handed its compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

# Compiles in place and gives the module back: `model.compile(backend="teraio", options=...)`.
# Keywords are torch.compile's own, as `dynamic=True`.
Compile = Callable[..., nn.Module]


class UnusableError(Exception):
    """A case that cannot be built or fed here: says nothing about teraio."""


@dataclass(frozen=True)
class Case:
    """A training of a stranger's model or loop, told apart by its name within its family."""

    name: str
    # Trains what it compiled by the argument. Gives all whose bits are compared: numbers, tensors, modules,
    # optimizers, or lists, tuples and dicts of those.
    run: Callable[[Compile], Iterable[Any]]
    reason: str = ""  # why it is expected to fail, if it is
