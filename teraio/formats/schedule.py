"""A schedule: one compiled program as the engine sees it, with a slot before each kernel.

A slot is a numbered point at which the program calls the engine. It lies before the *allocations* for a
kernel. A point between the allocations and the launch would be too late, because the kernel's memory would
already be allocated. A slot lists the storages that the previous kernel made, and the storages that the next
kernel reads or writes. It also has the number of bytes that are alive during the next kernel but cannot be
evicted. A slot contains no decision about moves. The first slot is `enter`, the last is `exit`.

The generated program contains the schedule as text. So a program that comes from a compiler cache still has
its schedule. A hash of this text identifies the program.
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

# Flags for the use of a buffer at a slot. MADE: a kernel before this slot made the buffer. RETURNED: the
# program returns this argument to its caller. IN_FLIGHT: a collective (communication between ranks) uses the
# buffer beside this slot's kernel, or begins or ends at this kernel.
READ, WRITE, MADE, RETURNED, IN_FLIGHT = 1, 2, 4, 8, 16
WORDS = {
    MADE: "made",
    READ: "reads",
    WRITE: "writes",
    RETURNED: "returned",
    IN_FLIGHT: "in flight for a collective",
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage that the program passes to the engine: an argument or an output.

    `role` is `argument`, `saved` or `result`. User code cannot access a `saved` output, so the engine may
    evict it. The engine may evict a `result` after another program has received it as an argument.

    If `held` is True, the program returns a view of this argument, so the argument is resident when the
    program returns. `edge` belongs to a gradient. It is the index of the gradient among the edges of the
    autograd node that runs this backward, without edges that have no target. `again` lists the slots whose
    kernels can recompute a saved output from arguments and other saved outputs. `nodes` has the output's
    names in the joint graph. A plan names these nodes to recompute the output.
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
    """One slot of a program. `buffers` has indices into `Schedule.buffers`, in the order of the tensors that
    the program passes at this slot.

    `older_bytes` is the part of `live_bytes` that is allocated before the slot. The rest is allocated for the
    slot's kernel.
    """

    kernel: str
    buffers: tuple[int, ...]
    flags: tuple[int, ...]
    live_bytes: int
    older_bytes: int = 0

    @property
    def made_buffers(self) -> list[int]:
        """Return the indices of the buffers that the kernel before this slot made."""
        return [buffer for buffer, flags in zip(self.buffers, self.flags) if flags & MADE]


@dataclass(frozen=True)
class Schedule:
    """The buffers and slots of one compiled program. The slots are in order."""

    kind: ProgramKind
    buffers: tuple[Buffer, ...]
    slots: tuple[Slot, ...]
    symbolic: bool = False  # True: sizes depend on the batch; slots get live bytes as an argument
    edges: int = 0  # for a backward: the number of inputs of its forward that require a gradient
    graph: str = ""  # for a forward or a backward: hash of the joint graph that it was cut from
    # In order: operators, arguments that are no tensors, and sizes of results. Equal on all ranks.
    collectives: tuple[str, ...] = ()

    @cached_property
    def as_json_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def identity_hash(self) -> str:
        return hashlib.sha256(self.as_json_text.encode()).hexdigest()[:16]

    @staticmethod
    def parse(text: str) -> Schedule:
        """Parse the schedule in a generated program. teraio itself has written this text, so it is not
        checked.
        """
        fields: dict[str, Any] = json.loads(text)
        return Schedule(
            kind=fields["kind"],
            buffers=tuple(
                Buffer(**{**b, "again": tuple(b["again"]), "nodes": tuple(b["nodes"])})
                for b in fields["buffers"]
            ),
            slots=tuple(
                Slot(**{**slot, "buffers": tuple(slot["buffers"]), "flags": tuple(slot["flags"])})
                for slot in fields["slots"]
            ),
            symbolic=fields["symbolic"],
            edges=fields["edges"],
            graph=fields["graph"],
            collectives=tuple(fields["collectives"]),
        )


def schedule_listing(schedule: Schedule) -> str:
    """Return a schedule as readable text, with one line per slot. The line names the slot's buffers and their
    flags.
    """
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
    """One measured call of a program.

    It has the names of the tensors in the program's buffers. For each slot, it has the time, the bytes that
    cannot move, and the stall (the wait for transfers).
    """

    schedule: Schedule
    tensors: tuple[str, ...]  # one name per buffer; "" if the engine has no record of the buffer
    at_ns: tuple[int, ...]  # the time at each slot
    live_bytes: tuple[int, ...]  # for each slot: all bytes that cannot move
    stall_ns: tuple[int, ...]  # per slot: wait for transfers, not in the previous kernel's time


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step: its calls in order, and the tensors that can move.

    All other bytes that programs use count in the `live_bytes` of the calls. For each call, `outside` has the
    bytes that user code allocated after the call.
    """

    calls: tuple[Call, ...]
    end_ns: int
    kinds: tuple[tuple[str, str, int, bool], ...]  # (name, kind, size_bytes, persistent)
    exposed: frozenset[tuple[int, str]]  # (call, tensor) if user code held the tensor at the call's end
    outside: tuple[int, ...] = ()  # per call; an empty tuple means 0 for all calls
    # Names of the gradients that a late update of this step reads before the backward makes new ones.
    around: frozenset[str] = frozenset()
