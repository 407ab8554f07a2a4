"""Events: what happens in a program, in order, whichever inner program it comes from.

Inductor's wrapper lines and the FX graph are both written down as these four:

    Make(name, bytes)      a storage appears under a name
    Alias(new, old)        another name for the same storage
    Forget(name)           a name goes; the storage goes with its last name
    Launch(kernel, ...)    a kernel runs

A `Signature` says what of the program its caller hands in and takes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teraio.formats.schedule import ProgramKind


@dataclass(frozen=True, slots=True)
class Make:
    at: int  # position of the line or node in the program
    name: str
    size_bytes: int  # a hint where the size depends on symbols
    size: Any = None  # where it does: an expression that adds up with others and with numbers

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
    """What enters and leaves a program. `saved` are the outputs (by position) that never reach the user."""

    kind: ProgramKind
    arguments: tuple[tuple[str, int], ...]  # (name, size_bytes)
    outputs: tuple[str | None, ...]
    saved: frozenset[int]
    held: frozenset[str] = frozenset()  # arguments whose views the caller gets back
    gradients: tuple[int, ...] = ()  # per output: the edge of the backward's node that it goes to, or -1
    graph: str = ""  # of a forward: the joint graph it was cut from
    nodes: tuple[str, ...] = ()  # per output: its node in that graph
    possible: frozenset[str] = frozenset()  # nodes that could be made again instead of saved
