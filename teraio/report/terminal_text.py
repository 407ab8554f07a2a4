"""The report for a terminal: sentences, a picture of memory drawn with letters, and tables."""

from __future__ import annotations

from collections.abc import Iterator

from teraio.units import fmt_bytes, fmt_ns, printable_line

from . import picture_data
from .content import Content, Table
from .labels import KIND_WORDS

LETTERS = {
    "reserve": ".",
    "workspace": "-",
    "input": "i",
    "outside": "o",
    "weight": "w",
    "state": "s",
    "grad": "g",
    "activation": "a",
}
WIDTH, HEIGHT = 72, 14
CELL_MAX = 52  # most characters of a cell; longer names are cut


def report_as_text(report: Content, top: int = 8) -> str:
    parts = [
        printable_line(report.title, 200),
        *(f"  {printable_line(sentence, 400)}" for sentence in report.sentences),
        "",
        memory_picture(report),
    ]
    waits = report.waits
    tables = [report.lanes, Table(waits.caption, waits.head, waits.rows[:top])]
    for each in (*tables, report.compared, report.drifts, report.what_if):
        if each is not None and each.rows:
            parts += ["", *_table_as_lines(each)]
    parts += ["", *(f"  {cause}" for cause in report.causes)] if report.causes else []
    parts += [f"  note: {note}" for note in report.notes]
    return "\n".join(parts)


def memory_picture(report: Content, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Draw the memory over the step, one column per slice of time.

    Each kind of memory has a letter. A line of `=` marks the budget.
    """
    line = report.sources.line
    held = picture_data.memory_curve(line)
    if not held.kinds:
        return "  (the timeline has no counters)"
    columns = picture_data.peak_by_slice(held, picture_data.slice_edges(picture_data.step_ns(line), width))
    top = max(held.peak_bytes, line.budget_bytes, 1)
    lines = []
    for row in range(height, 0, -1):
        level = top * (row - 0.5) / height
        cells = "".join(_letter_at_level(held.kinds, column, level) for column in columns)
        if line.budget_bytes and row == picture_data.picture_row_reached_by(line.budget_bytes, top, height):
            cells = "".join("=" if cell == " " else cell for cell in cells)
        lines.append(f"  {fmt_bytes(top * row // height):>10} |{cells}")
    lines.append(f"  {'':>10} +{'-' * width}")
    lines.append(f"  {'':>10}  0{fmt_ns(picture_data.step_ns(line)):>{width - 1}}")
    legend = [
        f"{LETTERS.get(kind, '?')} {KIND_WORDS.get(kind, printable_line(kind, 20))}" for kind in held.kinds
    ]
    lines.append(f"  {'':>10}  " + "   ".join([*legend, *["= budget"] * bool(line.budget_bytes)]))
    return "\n".join(lines)


def _letter_at_level(kinds: tuple[str, ...], sizes: tuple[int, ...], level: float) -> str:
    height = 0
    for kind, size in zip(kinds, sizes):
        height += size
        if height >= level:
            return LETTERS.get(kind, "?")
    return " "


def _table_as_lines(table: Table) -> Iterator[str]:
    rows = [[printable_line(cell, CELL_MAX) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    yield f"  {printable_line(table.caption, 200)}"
    for row in rows:
        first, *rest = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        )
        yield "    " + "  ".join([first, *rest]).rstrip()
