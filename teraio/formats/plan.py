"""A plan: what was decided. Moves name the tick *before* whose kernel they act.

    tick          a     ...   trigger          free  ...  trigger        ready
    kernel   [last use]  ...  [k]   ...        [k]   ...  [k]   ...      [next use]
    evict                      | write issued   | bytes gone; this kernel waits for the write
    fetch                                                  | read issued  | this kernel waits for the read

A tick at or beyond the number of kernels lies in the next step. A drop is an evict without a trigger: the
bytes exist elsewhere unchanged, so nothing is written.

`recompute` names tensors that are made again: the moves are then those of the longer step that this makes of
the profile (recompute.py). `remade` says with what programs were compiled: the fingerprint and the moves are
those of the step that runs then, with nothing left to make again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teraio.formats import files
from teraio.formats.fields import (
    TICKS_END,
    Fault,
    Field,
    Format,
    ObjectFormat,
    TaggedObjectFormat,
    TopLevelKey,
    make_integer_check,
    make_safe_text_check,
    refuse_duplicates,
)

if TYPE_CHECKING:
    from teraio.formats.profile import Profile


@dataclass(frozen=True, slots=True)
class Home:
    """Where a tensor lives between steps."""

    tensor: str
    tier: str


@dataclass(frozen=True, slots=True)
class Evict:
    tensor: str
    to: str
    free: int
    trigger: int | None = None  # None: a drop


@dataclass(frozen=True, slots=True)
class Fetch:
    tensor: str
    source: str  # "from" in the file
    trigger: int
    ready: int


Move = Evict | Fetch


def moved_bytes_by_kind(plan: Plan, profile: Profile, tier: str, *, evict: bool) -> dict[str, int]:
    """Bytes per step to (or from) tiers whose name begins like this, by kind of tensor. Drops move none."""
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    sums: dict[str, int] = {}
    for move in plan.moves:
        there = move.to if isinstance(move, Evict) else move.source
        if isinstance(move, Evict) == evict and there.startswith(tier) and move.trigger is not None:
            tensor = tensors[move.tensor]
            sums[tensor.kind] = sums.get(tensor.kind, 0) + tensor.size_bytes
    return sums


@dataclass(frozen=True, slots=True)
class RecomputedNode:
    """A node of a joint graph, by the graph's hash, that the compiled programs make again instead of saving
    it."""

    graph: str
    node: str


@dataclass(frozen=True, slots=True)
class Predicted:
    step_ns: int = 0
    bound_ns: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    fingerprint: str
    planner: str
    budget_bytes: int
    homes: tuple[Home, ...] = ()
    moves: tuple[Move, ...] = ()
    recompute: tuple[str, ...] = ()
    predicted: Predicted = Predicted()
    remade: tuple[RecomputedNode, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """From a file, plain or gzip; FileFormatError names the file, the place and the remedy."""
        value = files.read(FORMAT, path)
        assert isinstance(value, cls)
        return value

    @classmethod
    def loads(cls, data: str | bytes, name: str = "<plan>") -> Plan:
        """From the text of a file; `name` is what errors call it."""
        value = files.loads(FORMAT, data, name)
        assert isinstance(value, cls)
        return value

    def dumps(self) -> str:
        """The text of a file, one entry per line. FileFormatError if it could not be read back."""
        return files.dumps(FORMAT, self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """To a file, whole or not at all; packed if the name ends in `.gz`."""
        files.write(FORMAT, self, path)

    def validate(self) -> None:
        """FileFormatError for the first thing that a plan file may not hold."""
        files.validate(FORMAT, self)


def _check_across_fields(plan: Plan) -> None:
    """What no single field can know. Whether a plan fits a profile is for the check to say."""
    refuse_duplicates("homes", (home.tensor for home in plan.homes), ".tensor")
    refuse_duplicates("recompute", iter(plan.recompute))
    for index, move in enumerate(plan.moves):
        end_key, end = ("free", move.free) if isinstance(move, Evict) else ("ready", move.ready)
        if move.trigger is not None and move.trigger > end:
            raise Fault(f"moves[{index}].trigger", f"is {move.trigger}, after {end_key} at {end}")
        tier_key, tier = ("to", move.to) if isinstance(move, Evict) else ("from", move.source)
        if tier == "device":
            raise Fault(f"moves[{index}].{tier_key}", "is device; expected a slower tier")


def _tag_of_move(move: Move) -> str:
    return "evict" if isinstance(move, Evict) else "fetch"


_TIER = make_safe_text_check(chars_max=64)
_TICK = make_integer_check(end=2 * TICKS_END)  # a tick of this step or the next
_EVICT = (Field("tensor", make_safe_text_check()), Field("to", _TIER), Field("free", _TICK))

FORMAT = Format(
    name="teraio-plan",
    size_max_bytes=16 * 2**20,
    build=Plan,
    parts=(
        TopLevelKey("fingerprint", "value", check=make_safe_text_check(0)),
        TopLevelKey("planner", "value", check=make_safe_text_check(0, 64)),
        TopLevelKey("budget_bytes", "value", check=make_integer_check()),
        TopLevelKey(
            "homes",
            "records",
            ObjectFormat(Home, (Field("tensor", make_safe_text_check()), Field("tier", _TIER))),
            default=(),
        ),
        TopLevelKey(
            "moves",
            "records",
            TaggedObjectFormat(
                "move",
                {
                    "evict": ObjectFormat(Evict, (*_EVICT, Field("trigger", _TICK, None))),
                    "fetch": ObjectFormat(
                        Fetch,
                        (
                            Field("tensor", make_safe_text_check()),
                            Field("from", _TIER, attribute="source"),
                            Field("trigger", _TICK),
                            Field("ready", _TICK),
                        ),
                    ),
                    "drop": ObjectFormat(Evict, _EVICT),  # another spelling of an evict without a trigger
                },
                _tag_of_move,
            ),
        ),
        TopLevelKey("recompute", "names", check=make_safe_text_check(), default=()),
        TopLevelKey(
            "predicted",
            "record",
            ObjectFormat(
                Predicted,
                (
                    Field("step_ns", make_integer_check(), 0),
                    Field("bound_ns", make_integer_check(), 0),
                    Field("peak_bytes", make_integer_check(), 0),
                ),
            ),
            default=Predicted(),
        ),
        TopLevelKey(
            "remade",
            "records",
            ObjectFormat(
                RecomputedNode,
                (Field("graph", make_safe_text_check(chars_max=64)), Field("node", make_safe_text_check())),
            ),
            default=(),
        ),
    ),
    law=_check_across_fields,
)
