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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, Any]


class NotSupported(Exception):
    """This machine or this version cannot run the section; says why."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where a section may write, and for how long it may run."""

    scratch: Path
    seconds: float
    keep: Path  # what lies here comes back beside the figures

    @property
    def site(self) -> Path:
        """The built package goes here; it is on the path of every section."""
        return self.scratch / "site"


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
        return {"status": "failed", "error": traceback.format_exc()[-4000:]}


def run_apart(section: Section, room: Room, part: str) -> Figures:
    """Starts that process and returns its entry, or what became of it."""
    result = room.scratch / f"{section.name}.json"
    log = room.scratch / f"{section.name}.log"
    command = [sys.executable, __file__, "--part", part, "--section", section.name]
    command += ["--scratch", str(room.scratch), "--seconds", str(room.seconds), "--out", str(result)]
    command += ["--keep", str(room.keep)]
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


def run_part(part: str, out: Path, scratch: Path, seconds: float) -> int:
    """All sections in order; 0 if none failed."""
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
            room = Room(scratch, min(section.seconds, left), out)
            entries[section.name] = run_apart(section, room, part)
            entries[section.name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{section.name}: {entries[section.name]['status']}", flush=True)
        if section.name == "machine":
            machine.update(entries["machine"].get("result", {}))
        write(out / f"part{part}.json", content)
    return int(any(entry["status"] in ("failed", "timed out") for entry in entries.values()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--keep", type=Path, help="where files go that come back; default: --out")
    parser.add_argument("--section", help="run this section here and write its entry to --out")
    args = parser.parse_args()
    if args.section is None:
        return run_part(args.part, args.out, args.scratch, args.seconds)
    # By its module name, so that a part's NotSupported is the class that is caught.
    me = importlib.import_module("sections")
    sections = {section.name: section for section in importlib.import_module(f"part{args.part}").SECTIONS}
    room = Room(args.scratch, args.seconds, args.keep)
    write(args.out, me.run_here(sections[args.section], room))
    return 0


if __name__ == "__main__":
    sys.exit(main())
