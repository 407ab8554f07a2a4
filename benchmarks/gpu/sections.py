"""Runs the sections of one part, each in a process of its own, and writes what they return into a JSON file.

A part is a module `part<k>` with SECTIONS, a tuple of Section. A section's function takes a Room and returns
the figures for the file; it raises NotSupported where the machine lacks something, else whatever went wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, Any]
ERROR_CHARACTERS = 4000


class NotSupported(Exception):
    """This machine or this version cannot run the section; says why."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where a section may write, and for how long it may run."""

    scratch: Path
    seconds: float
    keep: Path  # what lies here comes back beside the figures
    kept: Path  # what lies here the next part finds, on this machine
    label: str  # of part and section

    @property
    def site(self) -> Path:
        """The built package goes here; it is on the path of every section."""
        return self.kept / "site"

    def note(self, rows: Figures) -> None:
        """What was found so far: whatever happens next, it is not lost."""
        write(self._rows, rows)

    def noted(self) -> Figures:
        """Read once: the section's entry has it from then on."""
        if not self._rows.exists():
            return {}
        rows: Figures = json.loads(self._rows.read_text())
        self._rows.unlink()
        return rows

    @property
    def _rows(self) -> Path:
        return self.keep / f"{self.label}.rows.json"


@dataclass(frozen=True, slots=True)
class Section:
    run: Callable[[Room], Figures]
    seconds: float  # at most

    @property
    def name(self) -> str:
        return self.run.__name__


def run_here(section: Section, room: Room) -> Figures:
    """In the section's own process: its entry in the file."""
    try:
        return {"status": "ok", "result": section.run(room)}
    except NotSupported as reason:
        return {"status": "not supported", "reason": str(reason)}
    except Exception:  # noqa: BLE001  whatever it was goes into the file
        return {"status": "failed", "error": traceback.format_exc()[-ERROR_CHARACTERS:]}


def each(
    room: Room, cases: Mapping[str, Callable[[], Figures]], found: dict[str, Figures] | None = None
) -> dict[str, Figures]:
    """A row per case, beside those `found` before. One that fails has its error there and costs no other."""
    found = {} if found is None else found
    for name, case in cases.items():
        start = time.monotonic()
        try:
            found[name] = dict(case())
        except Exception as error:  # noqa: BLE001  whatever it was is the row
            found[name] = {"error": f"{type(error).__name__}: {error}"[-ERROR_CHARACTERS:]}
        found[name]["case_seconds"] = round(time.monotonic() - start, 1)
        room.note(found)
    return found


def run_apart(section: Section, room: Room, part: str) -> Figures:
    """Its entry: what its process returned, or what became of it, and the rows that it had found."""
    room.noted()  # of a run before this one
    entry = start_apart(section, room, part)
    rows = room.noted()
    return entry | {"rows": rows} if rows and entry["status"] != "ok" else entry


def start_apart(section: Section, room: Room, part: str) -> Figures:
    result = room.scratch / f"{section.name}.json"
    log = room.scratch / f"{section.name}.log"
    command = [sys.executable, __file__, "--part", part, "--section", section.name]
    command += ["--scratch", str(room.scratch), "--seconds", str(room.seconds), "--out", str(result)]
    command += ["--keep", str(room.keep), "--kept", str(room.kept)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            code = child.wait(room.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return {"status": "timed out", "output": tail(log)}
    if not result.exists():
        return {"status": "failed", "error": f"its process ended with {code}", "output": tail(log)}
    entry: Figures = json.loads(result.read_text())
    return entry if entry["status"] == "ok" else entry | {"output": tail(log)}


def tail(log: Path, characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-characters:]


def write(path: Path, content: Figures) -> None:
    """After every section, so that whoever ends us keeps what there is."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    partial.rename(path)


def run_part(args: argparse.Namespace) -> int:
    """All sections in order; 0 if none failed."""
    part, out, seconds = args.part, args.out, args.seconds
    begin = time.monotonic()
    machine: Figures = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    }
    content: Figures = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "part": part,
        "machine": machine,
    }
    entries: dict[str, Figures] = {}
    content["sections"] = entries
    for section in importlib.import_module(f"part{part}").SECTIONS:
        start = time.monotonic()
        left = seconds - (start - begin)
        if left < 10:
            entries[section.name] = {"status": "skipped", "reason": "no time left"}
        else:
            room = room_for(section, args, min(section.seconds, left), out)
            entries[section.name] = run_apart(section, room, part)
            entries[section.name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{section.name}: {entries[section.name]['status']}", flush=True)
        if section.name == "machine":
            machine.update(entries["machine"].get("result", {}))
        write(out / f"part{part}.json", content)
    return int(any(entry["status"] in ("failed", "timed out") for entry in entries.values()))


def room_for(section: Section, args: argparse.Namespace, seconds: float, keep: Path) -> Room:
    return Room(args.scratch, seconds, keep, args.kept, f"part{args.part}-{section.name}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--kept", type=Path, required=True, help="what the next part finds, on this machine")
    parser.add_argument("--keep", type=Path, help="where files go that come back; default: --out")
    parser.add_argument("--section", help="run this section here and write its entry to --out")
    args = parser.parse_args()
    if args.section is None:
        return run_part(args)
    # By its module name, so that a part's NotSupported is the class that is caught.
    me = importlib.import_module("sections")
    sections = {section.name: section for section in importlib.import_module(f"part{args.part}").SECTIONS}
    section = sections[args.section]
    write(args.out, me.run_here(section, me.room_for(section, args, args.seconds, args.keep)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
