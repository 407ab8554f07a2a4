"""The result of an estimate: figures for code, and text for people.

It also contains the profile, which the commands that plan can read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Kind, Profile
from teraio.formats.timeline import Timeline
from teraio.text_table import aligned_text_table
from teraio.units import fmt_bytes, fmt_count, fmt_ns

WORDS = {"weight": "weights", "grad": "gradients", "state": "optimizer states", "activation": "activations"}


class _SummaryRow(NamedTuple):
    """One figure of an estimate. `form` joins the value and its note in plain text."""

    name: str
    value: str
    note: str = ""
    form: str = "{value}, {note}"

    @property
    def text(self) -> str:
        return self.form.format(value=self.value, note=self.note) if self.note else self.value


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

    @property
    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of the step within the budget. Return None if there is no plan, or if
        the plan has no prediction.
        """
        from teraio.passes.planner.simulate.simulate import simulate

        if self.plan is None or not self.plan.predicted.step_ns:
            return None
        return simulate(*apply_plan_changes(self.plan, self.profile), self.machine)

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
        rows = [(f"{row.name}:", row.text) for row in self._summary_rows()]
        wide = max(len(name) for name, _ in rows)
        lines = [self._title(), *(f"  {name:{wide}}  {value}" for name, value in rows)]
        return "\n".join([*lines, aligned_text_table(self._rows_of_bytes_by_kind()), self._assumptions()])

    def _title(self) -> str:
        what = f"{self.profile.name} within {fmt_bytes(self.memory_bytes)}"
        return f"{what} on {self.machine.name} ({self.origin})"

    def _assumptions(self) -> str:
        return f"Times are a roofline, not measured. Assumed: {'; '.join(self.notes)}."

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return HTML and text, by MIME type. Notebooks call this method by its name."""
        from teraio.report.notebook import View, view_as_html

        return {"text/plain": str(self), "text/html": view_as_html(View(**self._parts_of_view()))}

    def _summary_rows(self) -> list[_SummaryRow]:
        rows = [self._fit_row(), _SummaryRow("step, unlimited memory", fmt_ns(self.compute_ns))]
        if self.plan is not None and self.step_ns:
            slower = f"{self.step_ns / max(self.compute_ns, 1):.2f}x"
            late, backward = (fmt_count(len(each), "weight") for each in (self.plan.late, self.plan.backward))
            rows.append(
                _SummaryRow("step, within the budget", fmt_ns(self.step_ns), slower, "{value} ({note})")
            )
            rows.append(_SummaryRow("no plan takes less than", fmt_ns(self.plan.predicted.bound_ns)))
            if self.plan.late:
                rows.append(_SummaryRow("updated in the next forward", late))
            if self.plan.backward:
                rows.append(_SummaryRow("updated in the backward", backward))
        rows.append(_SummaryRow("memory, if nothing moves", fmt_bytes(self.peak_bytes, up=True)))
        smallest = fmt_bytes(self.smallest_bytes, up=True)
        return [*rows, _SummaryRow("smallest memory there is a plan for", smallest)]

    def _fit_row(self) -> _SummaryRow:
        if self.plan is None:
            return _SummaryRow("fits", "no", self.why, "{value}: {note}")
        if not self.plan.moves:
            note = "and nothing has to move" if self.step_ns else "everything moves on demand"
            return _SummaryRow("fits", "yes", note)
        moves = fmt_count(len(self.plan.moves), "move")
        return _SummaryRow("fits", "yes", f"with {moves} in a step by {self.plan.planner}")

    def _rows_of_bytes_by_kind(self) -> list[list[str]]:
        """Return the rows of a table, with one row per tensor kind: the number of tensors, their bytes, and
        the bytes that move to and from each tier.
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
        return rows

    def _parts_of_view(self) -> dict[str, Any]:
        """Return the parts of the view in a notebook.

        If no plan fits, the picture shows the memory of the step if nothing moves, above the budget.
        """
        from teraio.report.content import Fact, Sources, Table, assemble_content
        from teraio.report.notebook import tables_of_moves
        from teraio.report.notebook_picture import picture_of_timeline

        head, *rows = self._rows_of_bytes_by_kind()
        tables = [Table("Bytes of each kind of tensor", tuple(head), tuple(map(tuple, rows)))]
        line, sentences = self.timeline, list[str]()
        if line is not None:
            report = assemble_content(Sources(line, "estimate", plan=self.plan, machine=self.machine))
            sentences, tables = list(report.sentences), [*tables, *tables_of_moves(report)]
        else:
            sentences.append("The picture shows the step if nothing moves.")
        return {
            "title": self._title(),
            "facts": [Fact(row.name, row.value, row.note) for row in self._summary_rows()],
            "sentences": sentences,
            "picture": picture_of_timeline(line or self._timeline_without_moves()),
            "tables": tables,
            "notes": [self._assumptions()],
        }

    def _timeline_without_moves(self) -> Timeline:
        """Return the timeline of the step with unlimited memory, and the budget of the estimate."""
        from teraio.passes.planner.simulate.simulate import simulate

        unlimited = Plan("", "", self.peak_bytes)
        return replace(simulate(unlimited, self.profile, self.machine), budget_bytes=self.memory_bytes)
