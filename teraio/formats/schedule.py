"""A schedule: one compiled program as the engine sees it. Kernels in order, with a slot before each.

A slot is a numbered point before a kernel's *allocations* (not before its launch: by then the memory is
taken). It knows which storages the kernel before it made, which the next kernel reads or writes, and how many
bytes that no one registers are alive while that kernel runs. It holds no decision. The first slot is `enter`,
the last `exit`.

The text form travels inside the generated program, so that it survives the compiler's caches; its hash is
the program's identity.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from teraio.units import fmt_bytes, fmt_count

ProgramKind = Literal["forward", "backward", "inference", "optimizer"]
Role = Literal["argument", "saved", "result"]

# What a slot says of a buffer. MADE: by a kernel before this slot. RETURNED: the caller gets this argument.
READ, WRITE, MADE, RETURNED = 1, 2, 4, 8
WORDS = {MADE: "made", READ: "reads", WRITE: "writes", RETURNED: "returned"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage that the engine is told of: an argument, or an output of the program.

    `saved` outputs never reach the user and may be evicted; a `result` is counted only. A `held` argument is
    the base of a view that the caller gets back: it is resident when the program returns. A gradient's `edge`
    counts those edges of the backward's autograd node that lead anywhere. `again`: the slots whose kernels
    would make a saved output again, from arguments and other saved outputs; `nodes`: what it is called in the
    joint graph, in order to say so.
    """

    name: str
    role: Role
    size_bytes: int
    held: bool = False
    edge: int = -1
    again: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """One point. `buffers` index `Schedule.buffers` in the order in which the program hands over its
    tensors."""

    kernel: str
    buffers: tuple[int, ...]
    flags: tuple[int, ...]
    live_bytes: int


@dataclass(frozen=True)
class Schedule:
    """The slots of one compiled program, in order."""

    kind: ProgramKind
    buffers: tuple[Buffer, ...]
    slots: tuple[Slot, ...]
    symbolic: bool = False  # sizes depend on the batch: slots carry the live bytes as an argument
    edges: int = 0  # of a backward: how many inputs of its forward want a gradient
    graph: str = ""  # of a forward: the joint graph that it was cut from

    @cached_property
    def as_json_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def identity_hash(self) -> str:
        return hashlib.sha256(self.as_json_text.encode()).hexdigest()[:16]

    @staticmethod
    def parse(text: str) -> Schedule:
        """Our own text, from our own generated program: trusted, hence no checks."""
        fields: dict[str, Any] = json.loads(text)
        return Schedule(
            kind=fields["kind"],
            buffers=tuple(
                Buffer(**{**b, "again": tuple(b["again"]), "nodes": tuple(b["nodes"])})
                for b in fields["buffers"]
            ),
            slots=tuple(
                Slot(slot["kernel"], tuple(slot["buffers"]), tuple(slot["flags"]), slot["live_bytes"])
                for slot in fields["slots"]
            ),
            symbolic=fields["symbolic"],
            edges=fields["edges"],
            graph=fields["graph"],
        )


def schedule_listing(schedule: Schedule) -> str:
    """Return a schedule as lines for people: at each slot, what it gets and what the next kernel uses."""
    names = [f"{buffer.name} ({fmt_bytes(buffer.size_bytes)}, {buffer.role})" for buffer in schedule.buffers]
    told = [
        f"schedule {schedule.identity_hash} of a {schedule.kind} program: "
        f"{fmt_count(len(schedule.slots), 'slot')}, {fmt_count(len(schedule.buffers), 'buffer')}"
        f"{', sizes depend on the batch' * schedule.symbolic}"
    ]
    for number, slot in enumerate(schedule.slots):
        uses: dict[str, list[str]] = {}
        for buffer, flags in zip(slot.buffers, slot.flags):
            for flag, word in WORDS.items():
                if flags & flag:
                    uses.setdefault(word, []).append(names[buffer])
        about = "".join(f"; {word} {', '.join(used)}" for word, used in uses.items())
        told.append(f"  {number:4}  {slot.kernel}  {fmt_bytes(slot.live_bytes)} that cannot move{about}")
    return "\n".join(told)


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a program within a step, as measured: who its buffers were, when it stood at each slot."""

    schedule: Schedule
    tensors: tuple[str, ...]  # per buffer; "" where the engine keeps no record of it
    at_ns: tuple[int, ...]  # per slot
    live_bytes: tuple[int, ...]  # per slot: all bytes that no one can move
    stall_ns: tuple[int, ...]  # per slot: time that went into waiting there, not into the kernel before


@dataclass(frozen=True, slots=True)
class Step:
    """One measured training iteration: its calls in order, and the tensors that can move.

    All other bytes are in the calls' `live_bytes`, and in `outside`, by call: what user code took after it.
    """

    calls: tuple[Call, ...]
    end_ns: int
    kinds: tuple[tuple[str, str, int, bool], ...]  # (name, kind, size_bytes, persistent)
    exposed: frozenset[tuple[int, str]]  # (call, tensor): user code held it when the call returned
    outside: tuple[int, ...] = ()  # none is as good as zeros
