"""Rows of a file of results, by what they are of: those that the file has are not made again, so that a run
goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versus"))

from race.result import write


class KeptRows:
    """`path` None: they are in no file. `key`: the names of what a row is of."""

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
