"""Events of a compiled program, in order.

The lines of Inductor's wrapper and the nodes of an FX graph are both translated to events of four kinds:

    Make(name, bytes)      a new storage with a name
    Alias(new, old)        another name for the same storage
    Forget(name)           a name ends; with its last name, the storage is freed
    Launch(kernel, ...)    a kernel runs, or a collective begins or ends

A `Signature` describes the arguments and outputs of a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teraio.formats.schedule import ProgramKind


@dataclass(frozen=True, slots=True)
class Make:
    at: int  # position of the line or node in the program
    name: str
    size_bytes: int  # the size; if it depends on symbols of the program, an estimate
    size: Any = None  # the size as an expression, if it depends on symbols; otherwise None

    @property
    def bytes_or_expression(self) -> Any:
        return self.size_bytes if self.size is None else self.size


@dataclass(frozen=True, slots=True)
class Alias:
    at: int
    new: str
    old: str


@dataclass(frozen=True, slots=True)
class Forget:
    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of a kernel. The kernel may be a collective, or a wait for collectives.

    A collective reads and writes its tensors from its launch to the wait for its results, beside the kernels
    in between. In this time, its tensors are *in flight*.
    """

    at: int
    kernel: str
    reads: frozenset[str]
    writes: frozenset[str]
    begins: frozenset[str] = frozenset()  # for a collective: the tensors that it writes until the waits
    collective: str = ""  # for a collective: its operator and its arguments that are no tensors
    awaits: frozenset[str] = frozenset()  # for a wait: the tensors for whose collectives it waits


Event = Make | Alias | Forget | Launch


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and outputs of a program, with the facts about them that slots need."""

    kind: ProgramKind
    arguments: tuple[tuple[str, int], ...]  # (name, size_bytes) of each argument
    outputs: tuple[str | None, ...]
    saved: frozenset[int]  # indices of outputs that only the backward uses
    held: frozenset[str] = frozenset()  # arguments that AOTAutograd touches after the program has returned
    gradients: tuple[int, ...] = ()  # by output: index of the autograd edge that receives the gradient, or -1
    graph: str = ""  # for a forward or a backward: hash of the joint graph of both
    nodes: tuple[str, ...] = ()  # by output: name of its node in the joint graph
    possible: frozenset[str] = frozenset()  # names of nodes that the backward could recompute
