"""Tables of text. In: rows. Out: text with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned_text_table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return the rows as text. Each column is as wide as its widest entry. The first row is the heading.

    Align the first `left` columns to the left, and the other columns to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
