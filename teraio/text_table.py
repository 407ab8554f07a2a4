"""Tables of text. In: rows. Out: text with aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from teraio.terminal import PLAIN, Terminal, terminal_of

CUT_TO = 16  # columns are cut to this width, but not further


def aligned_text_table(
    rows: Sequence[Sequence[str]], left: int = 1, *, indent: str = "  ", terminal: Terminal = PLAIN
) -> str:
    """Return the rows as text. Each column is as wide as its widest entry. The first row is the heading.

    Align the first `left` columns to the left, and the other columns to the right. If the table is wider than
    the terminal, cut long entries. If this is not enough, print two tables, each with the first column.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = terminal.width - 1 - len(indent) if terminal.width else 0
    if room and not _cut_to_fit(widths, room) and len(widths) > 2:
        half = max(_count_fitting(widths, room), 2)
        first = [row[:half] for row in rows]
        rest = [[row[0], *row[half:]] for row in rows]
        above = aligned_text_table(first, left, indent=indent, terminal=terminal)
        below = aligned_text_table(rest, max(1, left - half + 1), indent=indent, terminal=terminal)
        return f"{above}\n\n{below}"
    lines = []
    for number, row in enumerate(rows):
        cut = [cell if len(cell) <= w else f"{cell[: w - 1]}…" for cell, w in zip(row, widths)]
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cut, widths))]
        line = indent + "  ".join(cells).rstrip()
        lines.append(line if number else terminal.paint(line, "bold"))
    return "\n".join(lines)


def table_for_stdout(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return the rows as text that fits the terminal on stdout. In a pipe or a file, nothing is cut."""
    return aligned_text_table(rows, left, terminal=terminal_of(sys.stdout))


def _cut_to_fit(widths: list[int], room: int) -> bool:
    """Cut the widest columns until they fit, the first column last. If they cannot fit, cut nothing, and
    return False.
    """
    cut = list(widths)
    for first in (1, 0):
        while _width_of(cut) > room and max(cut[first:], default=0) > CUT_TO:
            cut[cut.index(max(cut[first:]), first)] -= 1
    if _width_of(cut) > room:
        return False
    widths[:] = cut
    return True


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _count_fitting(widths: Sequence[int], room: int) -> int:
    """Return how many of the first columns fit."""
    counts = range(len(widths), 0, -1)
    return next((count for count in counts if _width_of(widths[:count]) <= room), 1)
