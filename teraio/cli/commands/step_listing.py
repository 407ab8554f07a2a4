"""`teraio explain --graph`: the step as a listing, kernel after kernel, with what the plan does before each.

The lines are the nodes that passes/fx/materialize.py writes into the graphs of these calls, in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby

from teraio.formats.moves_by_kernel import Act, acts_by_tick
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.units import fmt_count


@dataclass(frozen=True, slots=True)
class ListedKernel:
    """A kernel, what is done before it, and the tensors it touches that can move."""

    tick: int
    kernel: str
    before: tuple[Act, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListedCall:
    """A call. `optimizer`: by what it touches; its step is the optimizer's own code and has no graph."""

    call: int
    optimizer: bool
    lines: tuple[ListedKernel, ...]


def list_calls(plan: Plan, profile: Profile) -> Iterator[ListedCall]:
    """The calls of a step in order, of a plan for just this step."""
    before = acts_by_tick(plan, max(len(profile.kernels), 1))
    reads: list[list[str]] = [[] for _ in profile.kernels]
    writes: list[list[str]] = [[] for _ in profile.kernels]
    kinds: list[set[str]] = [set() for _ in profile.kernels]
    for tensor in profile.tensors:
        for tick in tensor.reads:
            reads[tick].append(tensor.name)
        for tick in tensor.writes:
            writes[tick].append(tensor.name)
            kinds[tick].add(f"writes {tensor.kind}")
        for tick in (*tensor.reads, *tensor.writes):
            kinds[tick].add(tensor.kind)
    for call, found in groupby(enumerate(profile.kernels), key=lambda each: each[1].call):
        lines = [
            ListedKernel(tick, kernel.name, before.get(tick, ()), tuple(reads[tick]), tuple(writes[tick]))
            for tick, kernel in found
        ]
        touched = set().union(*(kinds[line.tick] for line in lines))
        updates = bool(touched & {"writes weight", "state"}) and not touched & {"activation", "input"}
        yield ListedCall(call, updates, tuple(lines))


def step_listing_as_text(plan: Plan, profile: Profile) -> str:
    """For people."""
    width = len(str(len(profile.kernels)))
    told = ["evict and fetch begin a transfer, wait ends it: before the kernel that follows"]
    for part in list_calls(plan, profile):
        first, last = part.lines[0].tick, part.lines[-1].tick
        count = fmt_count(sum(len(line.before) for line in part.lines), "line")
        whose = ", the optimizer's, which has no graph: followed from the table" if part.optimizer else ""
        told.append(f"call {part.call}, ticks {first} to {last}, {count} of the plan{whose}")
        for line in part.lines:
            told += [f"  {'':{width}}    {act.as_text()}" for act in line.before]
            told.append(f"  {line.tick:{width}}  {line.kernel}{_describe_reads_and_writes(line)}")
    return "\n".join(told)


def _describe_reads_and_writes(line: ListedKernel) -> str:
    uses = (("reads", line.reads), ("writes", line.writes))
    told = "; ".join(f"{verb} {', '.join(names)}" for verb, names in uses if names)
    return f"  [{told}]" if told else ""


def step_listing_as_dict(plan: Plan, profile: Profile) -> dict[str, object]:
    return {"calls": [asdict(part) for part in list_calls(plan, profile)]}
