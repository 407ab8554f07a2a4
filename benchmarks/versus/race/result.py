"""The output of benchmarks: a results file with date and machine, a table printed row by row, a bar chart."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).resolve().parents[2] / "results"
BAR, GAP, LEFT, WIDTH, TOP = 16, 8, 260, 420, 46


class Table:
    """A table on stderr, with a head, printed row by row."""

    def __init__(self, **widths: int) -> None:
        self.widths = widths
        self._print(list(widths))

    def row(self, *values: object) -> None:
        self._print([f"{value:.3f}" if isinstance(value, float) else str(value) for value in values])

    def _print(self, cells: Sequence[str]) -> None:
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, self.widths.values(), strict=True))
        print(line, file=sys.stderr, flush=True)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.machine()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"


def write(path: str | Path, benchmark: str, **found: Any) -> None:
    head = {"benchmark": benchmark, "date": datetime.date.today().isoformat(), "machine": machine()}
    Path(path).write_text(json.dumps({**head, **found}, indent=1) + "\n")


def bars(
    path: str | Path, title: str, rows: Sequence[tuple[str, float, str]], mark: float | None = None
) -> None:
    """Write a bar chart as SVG. Each row has a label, the length of its bar, and a text at the bar's end.

    If `mark` is given, draw a line across all bars at this value.
    """
    top = max([value for _, value, _ in rows] + [mark or 0]) or 1
    height = TOP + len(rows) * (BAR + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 150} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, (label, value, end_text) in enumerate(rows):
        y, length = TOP + number * (BAR + GAP), WIDTH * value / top
        colour = "#2563a8" if "teraio" in label else "#9aa4af"
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">{escape(end_text)}</text>',
        ]
    if mark is not None:
        x = LEFT + WIDTH * mark / top
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height}" stroke="#b3261e" '
            'stroke-dasharray="4 3"/>'
        )
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n")
