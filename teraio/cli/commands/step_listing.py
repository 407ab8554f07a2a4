"""The listing of `teraio explain --graph`: the kernels of a step, each after the plan's acts for that kernel.

An act begins an evict or a fetch, waits for a transfer, or drops a tensor. The graphs of the step contain the
same acts in the same order, because passes/fx/materialize.py inserts them.
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
    """A kernel, with the plan's acts before this kernel. `reads` and `writes` name the evictable tensors that
    the kernel uses.
    """

    tick: int
    kernel: str
    before: tuple[Act, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListedCall:
    """A call: one run of a compiled program or of an optimizer's step.

    `optimizer` is True if the call updates weights or reads optimizer states, and uses no activation and no
    input.
    """

    call: int
    optimizer: bool
    lines: tuple[ListedKernel, ...]


def list_calls(plan: Plan, profile: Profile) -> Iterator[ListedCall]:
    """Yield the calls of a step in order. The plan must belong to this profile."""
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
    """Return the listing as text for people."""
    width = len(str(len(profile.kernels)))
    lines = ["evict and fetch begin a transfer, wait ends it; each acts before the kernel below it"]
    for part in list_calls(plan, profile):
        first, last = part.lines[0].tick, part.lines[-1].tick
        count = fmt_count(sum(len(line.before) for line in part.lines), "line")
        whose = (
            ", of the optimizer, without a graph: followed from the plan's table" if part.optimizer else ""
        )
        lines.append(f"call {part.call}, ticks {first} to {last}, {count} of the plan{whose}")
        for line in part.lines:
            lines += [f"  {'':{width}}    {act.as_text()}" for act in line.before]
            lines.append(f"  {line.tick:{width}}  {line.kernel}{_describe_reads_and_writes(line)}")
    return "\n".join(lines)


def _describe_reads_and_writes(line: ListedKernel) -> str:
    uses = (("reads", line.reads), ("writes", line.writes))
    text = "; ".join(f"{verb} {', '.join(names)}" for verb, names in uses if names)
    return f"  [{text}]" if text else ""


def step_listing_as_dict(plan: Plan, profile: Profile) -> dict[str, object]:
    return {"calls": [asdict(part) for part in list_calls(plan, profile)]}
