"""Events of a program, in order. All inner programs use the same kinds of events.

Inductor's wrapper lines and FX graphs are both read as events of four kinds:

    Make(name, bytes)      a new storage with a name
    Alias(new, old)        another name for the same storage
    Forget(name)           a name ends; the storage is freed together with its last name
    Launch(kernel, ...)    a kernel runs

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
    size_bytes: int  # an estimate if the size depends on symbols
    size: Any = None  # expression of the size if it depends on symbols; otherwise None

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
    at: int
    kernel: str
    reads: frozenset[str]
    writes: frozenset[str]


Event = Make | Alias | Forget | Launch


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and outputs of a program."""

    kind: ProgramKind
    arguments: tuple[tuple[str, int], ...]  # (name, size_bytes) of each argument
    outputs: tuple[str | None, ...]
    saved: frozenset[int]  # positions of outputs that are only saved for the backward
    held: frozenset[str] = frozenset()  # arguments that AOTAutograd touches after the program has returned
    gradients: tuple[int, ...] = ()  # per output: its edge of the autograd node of the backward, or -1
    graph: str = ""  # for a forward: the hash of the joint graph from which it was cut
    nodes: tuple[str, ...] = ()  # per output: the name of its node in the joint graph
    possible: frozenset[str] = frozenset()  # names of nodes that could be recomputed instead of saved
