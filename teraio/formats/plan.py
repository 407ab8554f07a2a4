"""A plan: the moves of one step, and the home of each tensor (its tier between steps).

A tick is the index of a kernel. A move acts *before* the kernel of its tick:

    tick          a     ...   trigger          free  ...  trigger        ready
    kernel   [last use]  ...  [k]   ...        [k]   ...  [k]   ...      [next use]
    evict                      | write issued   | bytes free; this kernel waits for the write
    fetch                                                  | read issued  | this kernel waits for the read

If a tick is not smaller than the number of kernels, it lies in the next step. A drop is an evict without a
trigger. A drop writes nothing, because a slower tier has the same bytes already.

`recompute` names the tensors to recompute. A step with recomputation has more kernels (recompute.py), and the
ticks of the moves count the kernels of this longer step. `late` has the weights whose updates run in the next
step, and `backward` the weights whose updates run in the backward (updates.py). Files of such plans have
version 2. `remade` names graph nodes that the compiled programs recompute already. The fingerprint and the
moves of a plan with `remade` are for the step of these programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
from teraio.formats.files import FileContent
from teraio.formats.notebook_view import ShownInNotebooks

if TYPE_CHECKING:
    from teraio.formats.profile import Profile


@dataclass(frozen=True, slots=True)
class Home:
    """The tier that holds a tensor's bytes between steps."""

    tensor: str
    tier: str


@dataclass(frozen=True, slots=True)
class Evict:
    tensor: str
    to: str
    free: int
    trigger: int | None = None  # if None, this move is a drop


@dataclass(frozen=True, slots=True)
class Fetch:
    tensor: str
    source: str  # the key in the file is "from"
    trigger: int
    ready: int


Move = Evict | Fetch


def moved_bytes_by_kind(plan: Plan, profile: Profile, tier: str, *, evict: bool) -> dict[str, int]:
    """Return how many bytes of each tensor kind a step evicts to the tiers whose names begin with `tier`.

    If `evict` is False, return how many bytes a step fetches from these tiers. A drop moves no bytes.
    """
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    sums: dict[str, int] = {}
    for move in plan.moves:
        slow_tier = move.to if isinstance(move, Evict) else move.source
        if isinstance(move, Evict) == evict and slow_tier.startswith(tier) and move.trigger is not None:
            tensor = tensors[move.tensor]
            sums[tensor.kind] = sums.get(tensor.kind, 0) + tensor.size_bytes
    return sums


@dataclass(frozen=True, slots=True)
class RecomputedNode:
    """A graph node whose value the compiled programs recompute in the backward instead of saving it.

    `graph` is the hash of the joint graph (forward and backward together) that contains the node.
    """

    graph: str
    node: str


@dataclass(frozen=True, slots=True)
class Predicted:
    step_ns: int = 0
    bound_ns: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan(ShownInNotebooks, FileContent):
    bundle_function: ClassVar[str] = "bundle_of_plan"
    fingerprint: str
    planner: str
    budget_bytes: int
    homes: tuple[Home, ...] = ()
    moves: tuple[Move, ...] = ()
    recompute: tuple[str, ...] = ()
    predicted: Predicted = Predicted()
    remade: tuple[RecomputedNode, ...] = ()
    late: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


def _check_across_fields(plan: Plan) -> None:
    """Refuse duplicates, moves that end before they begin, and moves that name the device as their slower
    tier.

    This check uses only the plan. `plan_check` checks a plan against a profile.
    """
    refuse_duplicates("homes", (home.tensor for home in plan.homes), ".tensor")
    refuse_duplicates("recompute", iter(plan.recompute))
    refuse_duplicates("late", iter(plan.late))
    refuse_duplicates("backward", iter(plan.backward))
    for index, move in enumerate(plan.moves):
        end_key, end = ("free", move.free) if isinstance(move, Evict) else ("ready", move.ready)
        if move.trigger is not None and move.trigger > end:
            raise Fault(f"moves[{index}].trigger", f"is {move.trigger}, after {end_key} at {end}")
        tier_key, tier = ("to", move.to) if isinstance(move, Evict) else ("from", move.source)
        if tier == "device":
            raise Fault(f"moves[{index}].{tier_key}", "is device; expected a slower tier")


def _version_of(plan: Plan) -> int:
    return 2 if plan.late or plan.backward else 1


def _tag_of_move(move: Move) -> str:
    return "evict" if isinstance(move, Evict) else "fetch"


_TIER = make_safe_text_check(chars_max=64)
_TICK = make_integer_check(end=2 * TICKS_END)  # a tick (index of a kernel) of this step, or of the next step
_EVICT = (Field("tensor", make_safe_text_check()), Field("to", _TIER), Field("free", _TICK))

Plan.file_format = Format(
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
                    # A file may also write an Evict without a trigger as a move "drop".
                    "drop": ObjectFormat(Evict, _EVICT),
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
        TopLevelKey("late", "names", check=make_safe_text_check(), default=(), since=2),
        TopLevelKey("backward", "names", check=make_safe_text_check(), default=(), since=2),
    ),
    law=_check_across_fields,
    version=2,
    version_of=_version_of,
)
