"""The report for a terminal: sentences, a picture of memory drawn with letters, and tables.

A terminal with colours shows the letters on the colour of their kind. The report fits the terminal's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from teraio.terminal import PLAIN, Terminal
from teraio.text_table import aligned_text_table
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
COLOURS = {
    "reserve": "grey",
    "workspace": "grey",
    "input": "grey",
    "outside": "cyan",
    "weight": "blue",
    "state": "magenta",
    "grad": "yellow",
    "activation": "green",
}
WIDTH, HEIGHT = 72, 14
WIDTH_MAX = 132  # most columns of a picture on a wide terminal
MARGIN = 14  # columns to the left of the picture
CELL_MAX = 52  # most characters of a cell; longer names are cut


def report_as_text(report: Content, top: int = 8, terminal: Terminal = PLAIN) -> str:
    parts = [
        terminal.paint(terminal.fold(printable_line(report.title, 200), ""), "bold"),
        *(terminal.fold(printable_line(sentence, 400)) for sentence in report.sentences),
        "",
        memory_picture(report, terminal=terminal),
    ]
    waits = report.waits
    tables = [report.lanes, Table(waits.caption, waits.head, waits.rows[:top])]
    for each in (*tables, report.compared, report.drifts, report.what_if):
        if each is not None and each.rows:
            parts += ["", *_table_as_lines(each, terminal)]
    parts += ["", *(terminal.fold(cause) for cause in report.causes)] if report.causes else []
    parts += [terminal.fold(f"note: {note}") for note in report.notes]
    return "\n".join(parts)


def memory_picture(
    report: Content, width: int = WIDTH, height: int = HEIGHT, terminal: Terminal = PLAIN
) -> str:
    """Draw the memory over the step, one column per slice of time.

    Each kind of memory has a letter. A line of `=` marks the budget. On a terminal, `width` is the width that
    fits.
    """
    line = report.sources.line
    held = picture_data.memory_curve(line)
    if not held.kinds:
        return "  (the timeline has no counters)"
    if terminal.width:
        width = min(terminal.width - MARGIN - 1, WIDTH_MAX)
    columns = picture_data.peak_by_slice(held, picture_data.slice_edges(picture_data.step_ns(line), width))
    top = max(held.peak_bytes, line.budget_bytes, 1)
    lines = []
    for row in range(height, 0, -1):
        level = top * (row - 0.5) / height
        kinds = [_kind_at_level(held.kinds, column, level) for column in columns]
        at_budget = row == picture_data.picture_row_reached_by(line.budget_bytes, top, height)
        empty = "=" if line.budget_bytes and at_budget else " "
        lines.append(f"  {fmt_bytes(top * row // height):>10} |{_painted_row(kinds, empty, terminal)}")
    lines.append(f"  {'':>10} +{'-' * width}")
    lines.append(f"  {'':>10}  0{fmt_ns(picture_data.step_ns(line)):>{width - 1}}")
    return "\n".join([*lines, *_legend_lines(held.kinds, bool(line.budget_bytes), terminal)])


def _kind_at_level(kinds: tuple[str, ...], sizes: tuple[int, ...], level: float) -> str:
    """Return the kind of memory that the picture shows at a height in bytes, or an empty text above all
    kinds.
    """
    height = 0
    for kind, size in zip(kinds, sizes):
        height += size
        if height >= level:
            return kind
    return ""


def _painted_row(kinds: list[str], empty: str, terminal: Terminal) -> str:
    """Return one row of the picture. Neighbours of one kind share one colour code."""
    parts = []
    for kind, cells in groupby(kinds):
        count = sum(1 for _ in cells)
        parts.append(
            _painted_letters(kind, count, terminal) if kind else terminal.paint(empty * count, "bold")
        )
    return "".join(parts)


def _painted_letters(kind: str, count: int, terminal: Terminal) -> str:
    return terminal.paint(LETTERS.get(kind, "?") * count, COLOURS.get(kind, "cyan"), block=True)


def _legend_lines(kinds: tuple[str, ...], budget: bool, terminal: Terminal) -> Iterator[str]:
    """Yield the legend. On a terminal, begin a new line if the next entry does not fit."""
    entries = [
        (LETTERS.get(kind, "?"), KIND_WORDS.get(kind, printable_line(kind, 20)), kind) for kind in kinds
    ]
    entries += [("=", "budget", "")] * budget
    line, used = "", MARGIN
    for letter, word, kind in entries:
        wide = len(word) + 5
        if line and terminal.width and used + wide > terminal.width:
            yield f"{' ' * MARGIN}{line}"
            line, used = "", MARGIN
        shown = _painted_letters(kind, 1, terminal) if kind else terminal.paint(letter, "bold")
        line += f"{'   ' if line else ''}{shown} {word}"
        used += wide
    yield f"{' ' * MARGIN}{line}"


def _table_as_lines(table: Table, terminal: Terminal) -> Iterator[str]:
    rows = [[printable_line(cell, CELL_MAX) for cell in row] for row in (table.head, *table.rows)]
    yield terminal.fold(printable_line(table.caption, 200))
    yield aligned_text_table(rows, indent="    ", terminal=terminal)
