"""Figures of long proofs, and their two forms: a JSON file and a Markdown table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LINE = re.compile(r"^(\S+) (\S+) (\S+) (PASS|FAIL)$", re.MULTILINE)
NO_FIGURE = "exit-code"  # name of the figure for a script that printed no figures


@dataclass(frozen=True, slots=True)
class Figure:
    script: str
    name: str
    value: str
    target: str
    verdict: str


def told(script: str, output: str, exit_code: int) -> list[Figure]:
    """Return the figures that a script has printed.

    The exit code is added as a figure in two cases: the script printed no figure, or it failed although no
    figure failed.
    """
    found = [Figure(script, *match) for match in LINE.findall(output)]
    if not found or (exit_code and not any(figure.verdict == "FAIL" for figure in found)):
        verdict = "FAIL" if exit_code or not found else "PASS"
        found.append(Figure(script, NO_FIGURE, str(exit_code), "0", verdict))
    return found


class Scorecard:
    """Figures of proofs, by the proof's script. `path` is the file that contains the figures.

    If `path` is None, the scorecard reads no file. If `quick` is None, the scorecard takes the value in the
    file.
    """

    def __init__(self, path: Path | None, quick: bool | None) -> None:
        self.path = path
        self.kept: dict[str, Any] = {"quick": quick, "found": {}}
        if path is not None and path.exists():
            self.kept = _read(path)
            if quick not in (None, self.kept["quick"]):
                what = "samples" if self.kept["quick"] else "whole runs"
                raise SystemExit(f"{path} has {what}: name another file")
        self.found: dict[str, dict[str, Any]] = self.kept["found"]

    def add(self, script: str, figures: list[Figure], took_s: float) -> None:
        self.found[script] = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": round(took_s),
            "figures": [asdict(figure) for figure in figures],
        }
        if self.path is not None:
            self.path.write_text(json.dumps(self.kept, indent=1) + "\n")

    def figures(self, scripts: Iterable[str]) -> list[Figure]:
        """Return the figures of these scripts, in the order of `scripts`."""
        chosen = [self.found[script] for script in scripts if script in self.found]
        return [Figure(**row) for one in chosen for row in one["figures"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON: {error}") from None
    if not isinstance(kept, dict) or not {"quick", "found"} <= kept.keys():
        raise SystemExit(f"{path} is no scorecard, or one in an older form: name another file")
    return kept


def table(found: list[Figure], promises: Mapping[str, str]) -> str:
    """Return a Markdown table of the figures. Each promise appears in the row of its first figure."""
    lines = ["| promise | script | figure | value | target | |", "|---|---|---|---|---|---|"]
    for place, each in enumerate(found):
        first = place == 0 or found[place - 1].script != each.script
        head = (promises[each.script], f"`{each.script}`") if first else ("", "")
        name = each.name.removeprefix(each.script.replace("_", "-") + "-").replace("-", " ")
        verdict = "" if each.target == "any" else each.verdict
        lines.append(f"| {' | '.join((*head, name, each.value, each.target, verdict))} |")
    return "\n".join(lines)
