"""Views for notebooks. In: a timeline, a plan, figures of a run, or a `View`. Out: HTML and text.

A notebook shows the HTML. A text console shows the text. The HTML has a style, but no script, and loads
nothing. Names from files are escaped. The size does not grow with the step: tables and pictures have a fixed
number of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from teraio.formats.plan import Evict, Plan
from teraio.formats.timeline import Timeline
from teraio.units import fmt_bytes, fmt_count, fmt_ns, printable_line

from . import content, terminal_text
from .content import Fact, Table
from .notebook_picture import LANES_MAX, picture_of_plan, picture_of_timeline

ROWS = 48  # most rows of a table
CELL_MAX = 120  # most characters of a cell


@dataclass(frozen=True, slots=True)
class View:
    """The parts of a view. `picture` is HTML; every other text is plain and is escaped."""

    title: str
    facts: Sequence[Fact]
    sentences: Sequence[str] = ()
    picture: str = ""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def bundle_of_timeline(line: Timeline) -> dict[str, str]:
    """Return the view of a timeline, by MIME type."""
    report = content.assemble_content(content.Sources(line, "timeline"))
    title = "One measured step" if line.kind == "measured" else "The predicted step"
    view = View(title, report.facts, report.sentences, picture_of_timeline(line), tables_of_moves(report))
    return {"text/plain": terminal_text.report_as_text(report), "text/html": view_as_html(view)}


def tables_of_moves(report: content.Content) -> tuple[Table, ...]:
    """Return the tables of waits and of lanes. A file can name any number of lanes, so cut the table."""
    lanes = report.lanes
    return report.waits, Table(lanes.caption, lanes.head, lanes.rows[:LANES_MAX])


def bundle_of_plan(plan: Plan) -> dict[str, str]:
    """Return the view of a plan, by MIME type."""
    facts = _facts_of_plan(plan)
    title = f"A plan by {plan.planner}" if plan.planner else "A plan"
    sentences = [] if plan.moves else ["Nothing moves: the whole step fits into the budget."]
    note = "A plan names tensors without their sizes. A timeline of the plan shows memory over the step."
    lines = [
        title,
        *(f"  {fact.label}: {fact.value}{f' ({fact.note})' if fact.note else ''}" for fact in facts),
    ]
    return {
        "text/plain": "\n".join(printable_line(line, 200) for line in lines),
        "text/html": view_as_html(View(title, facts, sentences, picture_of_plan(plan), notes=[note])),
    }


def _facts_of_plan(plan: Plan) -> list[Fact]:
    evicts = [move for move in plan.moves if isinstance(move, Evict)]
    drops = sum(move.trigger is None for move in evicts)
    tiers = {home.tier for home in plan.homes if home.tier != "device"}
    homes = [f"{sum(home.tier == tier for home in plan.homes)} on {tier}" for tier in sorted(tiers)]
    made = plan.predicted
    facts = [
        Fact("step, predicted", fmt_ns(made.step_ns) if made.step_ns else "unknown"),
        Fact("no plan takes less than", fmt_ns(made.bound_ns), _above_bound(made.step_ns, made.bound_ns)),
        Fact("budget", fmt_bytes(plan.budget_bytes), f"peak {fmt_bytes(made.peak_bytes)}"),
        Fact("evictions", str(len(evicts) - drops), f"and {fmt_count(drops, 'drop')}"),
        Fact("fetches", str(len(plan.moves) - len(evicts))),
        Fact("evicted between steps", ", ".join(homes) or "no tensor"),
        Fact("recomputed", fmt_count(len(plan.recompute), "tensor")) if plan.recompute else None,
        Fact("updated in the next forward", fmt_count(len(plan.late), "weight")) if plan.late else None,
        Fact("updated in the backward", fmt_count(len(plan.backward), "weight")) if plan.backward else None,
    ]
    return [fact for fact in facts if fact is not None]


def _above_bound(step_ns: int, bound_ns: int) -> str:
    if not step_ns or not bound_ns:
        return ""
    if step_ns < bound_ns:
        return "the kernels ran faster than in the profile"
    return f"the step is {step_ns / bound_ns - 1:.1%} above"


def view_of_stats(stats: Mapping[str, Any]) -> str:
    """Return the HTML of `teraio.stats()`: the last step, its memory beside the budget, and all figures."""
    if not stats:
        return view_as_html(View("teraio: no program has been compiled yet", ()))
    facts = []
    if "step_ns" in stats:
        waited = f"{fmt_ns(stats['step_stall_ns'])} of waiting" if "step_stall_ns" in stats else ""
        facts.append(Fact("last step", fmt_ns(stats["step_ns"]), waited))
    if "bound_ns" in stats:
        above = _above_bound(stats.get("step_ns", 0), stats["bound_ns"])
        facts.append(Fact("no plan takes less than", fmt_ns(stats["bound_ns"]), above))
    if "step_peak_bytes" in stats and "budget_bytes" in stats:
        of = f"of {fmt_bytes(stats['budget_bytes'])}"
        facts.append(Fact("peak of the step", fmt_bytes(stats["step_peak_bytes"]), of))
    facts += [
        Fact(label, fmt_bytes(stats[name]))
        for name, label in (
            ("step_written_bytes", "written in the step"),
            ("step_read_bytes", "read in the step"),
        )
        if name in stats
    ]
    if "step_misses" in stats:
        facts.append(Fact("misses in the step", str(stats["step_misses"]), "fetches in no plan"))
    how = f", next step: {stats['phase']}" if "phase" in stats else ""
    rows = tuple((name, _format_figure(name, value)) for name, value in stats.items())
    table = Table("All figures", ("name", "value"), rows)
    return view_as_html(View(f"Step {stats.get('step', 0)}{how}", facts, tables=(table,)))


def _format_figure(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return fmt_bytes(value)
    if name.endswith("_ns"):
        return fmt_ns(value)
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def view_as_html(view: View) -> str:
    style = (files("teraio.report") / "assets" / "notebook.css").read_text(encoding="utf-8")
    facts = "".join(
        f"<div class=fact><div class=quiet>{escape(fact.label)}</div>"
        f"<div class=value>{escape(fact.value)}</div><div class=quiet>{escape(fact.note)}</div></div>"
        for fact in view.facts
    )
    parts = [
        f"<div class=title>{escape(printable_line(view.title, 200))}</div>",
        f"<div class=facts>{facts}</div>" if facts else "",
        *(f"<div class=text>{escape(printable_line(text, 400))}</div>" for text in view.sentences),
        view.picture,
        *(_table_as_details(table) for table in view.tables if table.rows),
        *(f"<div class='text quiet'>{escape(printable_line(text, 800))}</div>" for text in view.notes),
    ]
    return f"<div class=teraio-view><style>{style}</style>{''.join(parts)}</div>"


def _table_as_details(table: Table) -> str:
    """Return a table that opens by a click."""
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in table.head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows[:ROWS])
    return (
        f"<details><summary>{escape(table.caption)}</summary><div class=scroll><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _cell(text: str) -> str:
    return f"<td>{escape(printable_line(text, CELL_MAX))}</td>"
