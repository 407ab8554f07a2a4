"""Rows of a results file. A row belongs to a case, which some of its columns identify.

Benchmarks skip the cases that the file already contains, so a stopped run can continue.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versus"))

from race.result import write


class KeptRows:
    """The rows of a file. If `path` is None, the rows exist only in memory. `key` names the columns that
    identify a case.
    """

    def __init__(self, path: Path | None, benchmark: str, key: Sequence[str]) -> None:
        self.path, self.benchmark, self.key = path, benchmark, key
        self.rows: list[dict[str, Any]] = []
        if path and path.exists():
            self.rows = json.loads(path.read_text())["rows"]
        self.known = {tuple(row[name] for name in key) for row in self.rows}

    def add(self, case: tuple[Any, ...], found: dict[str, Any]) -> None:
        self.rows.append(dict(zip(self.key, case, strict=True)) | found)
        print(json.dumps(self.rows[-1]), flush=True)
        if self.path:
            write(self.path, self.benchmark, rows=self.rows)
