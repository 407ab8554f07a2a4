"""A schedule: one compiled program as the engine sees it, with a slot before each kernel.

A slot is a numbered point before a kernel's *allocations*. A point between the allocations and the launch
would be too late, because the kernel's memory would already be taken. A slot lists the storages that the
previous kernel made, and the storages that the next kernel reads or writes. A slot also has the number of
unregistered bytes that are alive while the next kernel runs. A slot contains no decision about moves. The
first slot is `enter`, the last `exit`.

The generated program contains the schedule as text, so the schedule survives the compiler's caches. The hash
of this text is the program's identity.
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

# Flags of a buffer at a slot. MADE: a kernel before this slot made the buffer. RETURNED: the program returns
# this argument to its caller.
READ, WRITE, MADE, RETURNED = 1, 2, 4, 8
WORDS = {MADE: "made", READ: "reads", WRITE: "writes", RETURNED: "returned"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage that the program passes to the engine: an argument or an output.

    User code never sees a `saved` output, so the engine may evict it. The engine may evict a `result` as soon
    as another program receives it as an argument. A `held` argument is the base of a view that the program
    returns, so the argument is resident when the program returns. Some edges of the backward's autograd node
    have a target. The `edge` of a gradient is the gradient's index among these edges. `again` lists the slots
    whose kernels can recompute a saved output from arguments and other saved outputs. `nodes` has the saved
    output's names in the joint graph. A plan uses these names to request the recomputation.
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
    """One slot. `buffers` has indices into `Schedule.buffers`, in the order of the slot's tensors."""

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
    symbolic: bool = False  # sizes depend on the batch, so slots receive the live bytes as an argument
    edges: int = 0  # for a backward: the number of inputs of its forward that require a gradient
    graph: str = ""  # for a forward: the joint graph that the forward was cut from

    @cached_property
    def as_json_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def identity_hash(self) -> str:
        return hashlib.sha256(self.as_json_text.encode()).hexdigest()[:16]

    @staticmethod
    def parse(text: str) -> Schedule:
        """Parse the text of a generated program. The text is trusted and therefore not checked."""
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
    """Return a schedule as readable text: one line per slot, with its buffers and their flags."""
    names = [f"{buffer.name} ({fmt_bytes(buffer.size_bytes)}, {buffer.role})" for buffer in schedule.buffers]
    lines = [
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
        lines.append(f"  {number:4}  {slot.kernel}  {fmt_bytes(slot.live_bytes)} that cannot move{about}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Call:
    """One measured call: the tensors in its buffers, and the time, live bytes and stall of each slot."""

    schedule: Schedule
    tensors: tuple[str, ...]  # a name per buffer; "" if the engine has no record of the buffer
    at_ns: tuple[int, ...]  # the time of each slot
    live_bytes: tuple[int, ...]  # per slot: all bytes that cannot move
    stall_ns: tuple[int, ...]  # per slot: the stall at the slot, which the previous kernel's time excludes


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step: its calls in order, and the tensors that can move.

    The calls' `live_bytes` count all other bytes of programs. `outside` has, for each call, the bytes that
    user code allocated after the call.
    """

    calls: tuple[Call, ...]
    end_ns: int
    kinds: tuple[tuple[str, str, int, bool], ...]  # (name, kind, size_bytes, persistent)
    exposed: frozenset[tuple[int, str]]  # (call, tensor): user code held the tensor when the call returned
    outside: tuple[int, ...] = ()  # an empty tuple means zeros
