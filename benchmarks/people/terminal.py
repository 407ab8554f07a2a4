"""Pictures of teraio's commands on a terminal.

    python benchmarks/people/terminal.py [--pictures FOLDER] [--columns 60 100] [COMMAND ...]

The script runs a command (by default `teraio report` of a made timeline, and `teraio profile list`) on a
pseudo-terminal of each width. It draws the screens in colour, on a light and on a dark ground. It needs pyte
(pip install pyte) and `chromium` (apt-get install chromium). It exits with 1 if a line does not fit.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from html import escape
from pathlib import Path
from typing import Any

from report_page import BROWSERS, HERE, disturbed

from teraio.formats.machine import Machine
from teraio.passes.planner import planners
from teraio.passes.planner.simulate import simulate
from teraio.passes.synth.profiles import ProfileRequest, synth

LINES = 200
# The colours of a usual theme, by pyte's names.
COLOURS = {
    "red": "#c0392b",
    "green": "#2e9e5b",
    "brown": "#c99a1e",
    "blue": "#3b78c4",
    "magenta": "#9257b0",
    "cyan": "#2b9aa6",
    "brightblack": "#808080",
}
GROUNDS = {"light": ("#ffffff", "#1b1e22"), "dark": ("#16181b", "#d8dade")}


def screen_of(command: list[str], columns: int) -> Any:
    """Run a command on a pseudo-terminal, and return its last screen."""
    import pyte

    child, terminal = pty.fork()
    if child == 0:
        os.environ.update({"TERM": "xterm-256color"})
        for name in ("COLUMNS", "CI", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        os.execvp(command[0], command)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            text = os.read(terminal, 65536)
        except OSError:  # the child has ended
            break
        stream.feed(text)
    os.waitpid(child, 0)
    return screen


def page_of(screen: Any, ground: str, ink: str) -> str:
    rows = []
    used = max((row for row in range(LINES) if screen.display[row].strip()), default=0) + 1
    for row in range(used):
        cells = []
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            colour = COLOURS.get(cell.fg, ink)
            fore, back = (ground, colour) if cell.reverse else (colour, "none")
            weight = "bold" if cell.bold else "normal"
            style = f"color:{fore};background:{back};font-weight:{weight}"
            cells.append(f"<span style='{style}'>{escape(cell.data)}</span>")
        rows.append("".join(cells))
    style = f"background:{ground};color:{ink};font:13px/1.25 monospace;margin:10px;white-space:pre"
    return f"<!doctype html><meta charset=utf-8><body style='{style}'>" + "\n".join(rows)


def full_lines(screen: Any) -> list[str]:
    """Return lines whose last column is used. Such a line may have been broken by the terminal."""
    return [line for line in screen.display if line[-1] != " "]


def write_made_timeline(path: Path) -> None:
    profile = synth("llama-3.1-8b", ProfileRequest(batch=2, micro_batches=2))
    machine = Machine.read(HERE.parents[1] / "profiles/machines/h100-4ssd.machine.json")
    plan = planners.plan(profile, machine, 40 * 2**30, planner="greedy", fingerprint="")
    disturbed(simulate.simulate(plan, profile, machine)).write(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="folder for pictures")
    parser.add_argument("--columns", type=int, nargs="+", default=[60, 100, 160])
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "run.timeline.json"
        teraio = [sys.executable, "-m", "teraio"]
        commands = {"command": args.command}
        if not args.command:
            write_made_timeline(timeline)
            commands = {
                "report": [*teraio, "report", str(timeline)],
                "profiles": [*teraio, "profile", "list"],
            }
        for name, command in commands.items():
            for columns in args.columns:
                screen = screen_of(command, columns)
                for line in full_lines(screen):
                    broken += 1
                    print(f"{name}, {columns} columns: {line}")
                if args.pictures and browser:
                    args.pictures.mkdir(parents=True, exist_ok=True)
                    for theme, (ground, ink) in GROUNDS.items():
                        page = Path(folder) / "page.html"
                        page.write_text(page_of(screen, ground, ink), encoding="utf-8")
                        target = args.pictures / f"{name}-{columns}-{theme}.png"
                        size = f"--window-size={columns * 8 + 30},{800}"
                        shot = [browser, "--headless", "--no-sandbox", f"--screenshot={target}", size]
                        subprocess.run([*shot, page.as_uri()], check=True, capture_output=True)
    print(f"{broken} lines do not fit")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
