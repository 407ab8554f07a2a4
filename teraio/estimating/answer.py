"""What an estimate says: figures for code, a page of text for people, a profile for the other commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.profile import Kind, Profile
from teraio.text_table import aligned_text_table
from teraio.units import fmt_bytes, fmt_count, fmt_ns

WORDS = {"weight": "weights", "grad": "gradients", "state": "optimizer states", "activation": "activations"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one training step on one machine within one budget. `plan` is None where there is none, and `why`
    says why. `peak_bytes`: the memory at which nothing has to move; `smallest_bytes`: below it there is no
    plan. Durations are a roofline of the kernels, run one by one, and simulated links: nothing was measured
    but, where `origin` says so, the machine."""

    profile: Profile = field(repr=False)
    plan: Plan | None = field(repr=False)
    machine: Machine = field(repr=False)
    memory_bytes: int
    smallest_bytes: int
    peak_bytes: int
    why: str
    notes: tuple[str, ...]  # what was assumed
    origin: str  # of the machine's figures

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def compute_ns(self) -> int:
        """A step with unlimited memory."""
        return self.profile.compute_ns

    @property
    def step_ns(self) -> int | None:
        """A step within the budget; None without a plan, or with one that predicts nothing."""
        return (self.plan.predicted.step_ns or None) if self.plan is not None else None

    @property
    def bound_ns(self) -> int | None:
        """What no plan for this profile, machine and budget beats; None where none fits."""
        return self.plan.predicted.bound_ns if self.plan is not None else None

    def bytes_of_kind(self, kind: Kind) -> int:
        """Of all tensors of a kind that can move; those below 4 KiB are in the reserve."""
        return sum(tensor.size_bytes for tensor in self.profile.tensors if tensor.kind == kind)

    def moved_bytes_by_kind(self, tier: str, *, evict: bool) -> dict[str, int]:
        """Per step, to this tier or from it, by kind."""
        return (
            moved_bytes_by_kind(self.plan, self.profile, tier, evict=evict) if self.plan is not None else {}
        )

    def __str__(self) -> str:
        rows = [(f"{name}:", value) for name, value in self._summary_rows()]
        wide = max(len(name) for name, _ in rows)
        what = f"{self.profile.name} within {fmt_bytes(self.memory_bytes)}"
        head = f"{what} on {self.machine.name} ({self.origin})"
        lines = [head, *(f"  {name:{wide}}  {value}" for name, value in rows), self._table_of_bytes_by_kind()]
        return "\n".join([*lines, f"Times are a roofline, not measured. {_assumptions_sentence(self.notes)}"])

    def _summary_rows(self) -> list[tuple[str, str]]:
        rows = [
            ("fits", self._describe_fit()),
            ("step, unlimited memory", fmt_ns(self.compute_ns)),
        ]
        if self.plan is not None and self.step_ns:
            slower = f"{self.step_ns / max(self.compute_ns, 1):.2f}x"
            rows.append(("step, within the budget", f"{fmt_ns(self.step_ns)} ({slower})"))
            rows.append(("no plan takes less than", fmt_ns(self.plan.predicted.bound_ns)))
        rows.append(("memory, if nothing moves", fmt_bytes(self.peak_bytes, up=True)))
        rows.append(("smallest memory there is a plan for", fmt_bytes(self.smallest_bytes, up=True)))
        return rows

    def _describe_fit(self) -> str:
        if self.plan is None:
            return f"no: {self.why}"
        if not self.plan.moves:
            return "yes, and nothing has to move" if self.step_ns else "yes; everything moves on demand"
        return f"yes, with {fmt_count(len(self.plan.moves), 'move')} in a step by {self.plan.planner}"

    def _table_of_bytes_by_kind(self) -> str:
        """What there is, and what a step carries to which tier and back."""
        tiers = [tier.name for tier in self.machine.tiers if tier.name != "device"]
        ways = True, False
        used = [tier for tier in tiers if any(self.moved_bytes_by_kind(tier, evict=way) for way in ways)]
        head = ["kind", "tensors", "bytes"]
        for tier in used:
            head += [f"to {tier}", f"from {tier}"]
        rows = [head]
        for kind in get_args(Kind):
            count = sum(tensor.kind == kind for tensor in self.profile.tensors)
            row = [WORDS.get(kind, kind), str(count), fmt_bytes(self.bytes_of_kind(kind))]
            for tier in used:
                moved = [self.moved_bytes_by_kind(tier, evict=way).get(kind, 0) for way in ways]
                row += [fmt_bytes(size_bytes) if size_bytes else "-" for size_bytes in moved]
            if count:
                rows.append(row)
        return aligned_text_table(rows)


def _assumptions_sentence(notes: tuple[str, ...]) -> str:
    return "Assumed: " + "; ".join(notes) + "."
