"""The result of an estimate: figures for code, and text for people.

It also contains the profile, which the commands that plan can read.
"""

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
    """An estimate of one training step on one machine within one budget.

    If no plan fits, `plan` is None and `why` is the reason. With at least `peak_bytes` of memory, no tensor
    has to move. With less than `smallest_bytes`, no plan exists.

    The durations are computed, not measured. A roofline model gives the duration of each kernel, and the
    kernels run one after another. Simulated links give the durations of transfers. `origin` names the source
    of the machine's figures, which may be a measurement.
    """

    profile: Profile = field(repr=False)
    plan: Plan | None = field(repr=False)
    machine: Machine = field(repr=False)
    memory_bytes: int
    smallest_bytes: int
    peak_bytes: int
    why: str
    notes: tuple[str, ...]  # the assumptions
    origin: str  # the source of the machine's figures: data sheets, a file or a measurement

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def compute_ns(self) -> int:
        """Return the duration of the step with unlimited memory."""
        return self.profile.compute_ns

    @property
    def step_ns(self) -> int | None:
        """Return the predicted duration of a step within the budget. Return None if there is no plan, or if
        the plan has no prediction.
        """
        return (self.plan.predicted.step_ns or None) if self.plan is not None else None

    @property
    def bound_ns(self) -> int | None:
        """Return the time that no plan within the budget can beat. Return None if no plan exists."""
        return self.plan.predicted.bound_ns if self.plan is not None else None

    def bytes_of_kind(self, kind: Kind) -> int:
        """Return the sum of the sizes of all movable tensors of a kind.

        Tensors smaller than 4 KiB cannot move. The profile counts them in the reserve instead.
        """
        return sum(tensor.size_bytes for tensor in self.profile.tensors if tensor.kind == kind)

    def moved_bytes_by_kind(self, tier: str, *, evict: bool) -> dict[str, int]:
        """Return how many bytes of each tensor kind a step evicts to `tier`.

        If `evict` is False, return how many bytes it fetches from `tier`.
        """
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
            if self.plan.late:
                rows.append(("updated in the next forward", fmt_count(len(self.plan.late), "weight")))
            if self.plan.backward:
                rows.append(("updated in the backward", fmt_count(len(self.plan.backward), "weight")))
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
        """Return a table with one row per tensor kind: the number of tensors, their bytes, and the bytes that
        move to and from each tier.
        """
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
