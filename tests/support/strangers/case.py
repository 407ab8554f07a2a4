"""The interface of a family, which is a module with models or training loops of other projects (strangers).
Each case of a family has a name, and a training that receives its compiler as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

# A function that compiles a module in place and returns it, as `model.compile(backend="teraio",
# options=...)`. Keywords are torch.compile's own, such as `dynamic=True`.
Compile = Callable[..., nn.Module]


class UnusableError(Exception):
    """An error of a case that cannot be built, or for which no batch can be made. Such a case proves nothing
    about teraio.
    """


@dataclass(frozen=True)
class Case:
    """A training of another project's model or loop, with a name that is unique in its family."""

    name: str
    # A training. It compiles its models by the argument, and yields all values to compare bit by bit:
    # numbers, tensors, modules, optimizers, or lists, tuples and dicts of them.
    run: Callable[[Compile], Iterable[Any]]
    reason: str = ""  # why the case is expected to fail; empty if no failure is expected
