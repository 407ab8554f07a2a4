"""Functions that parse patch files of planted bugs, and plant a bug in a text.

    the fault, in a sentence or two
    found by: tests/test_x.py::test_name           a line per test that must fail; a file: any of its tests
    found by hang: tests/test_x.py::test_name      a test that never ends counts as failed, too
                                                   (an empty line, then a unified diff)

Patches are applied without git, and only where all lines of a hunk match. If a change of the code makes a
patch stale, applying the patch raises an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS / "data" / "planted"

_FOUND = re.compile(r"found by( hang)?: (tests/\S+\.py)(?:::([a-z_0-9]+)(\[.+\])?)?")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """An error in a patch. The message names the place in the patch."""


@dataclass(frozen=True, slots=True)
class Finder:
    """A test that must fail while the bug is planted. If `name` is empty, at least one test of the file must
    fail.
    """

    file: str
    name: str
    case: str  # the part in brackets of a parametrized test's name

    @property
    def selector(self) -> str:
        return f"{self.file}::{self.name}{self.case}" if self.name else self.file


@dataclass(frozen=True, slots=True)
class Hunk:
    line: int  # the original number of the hunk's first line, counted from 1
    before: tuple[str, ...]
    after: tuple[str, ...]
    changes: int  # the larger of two numbers: removed lines and added lines


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    about: str
    tests: tuple[Finder, ...]
    hangs: bool
    hunks: dict[str, tuple[Hunk, ...]]  # hunks by file

    @property
    def native(self) -> bool:
        return any(file.startswith("csrc/") for file in self.hunks)

    @property
    def changed_lines(self) -> int:
        """Return the number of lines that the bug changes."""
        return sum(hunk.changes for hunks in self.hunks.values() for hunk in hunks)


def bugs(folder: Path = FOLDER) -> list[Bug]:
    return [parse(path.stem, path.read_text()) for path in sorted(folder.glob("*.patch"))]


def parse(name: str, text: str) -> Bug:
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    about, tests, hangs = [], [], False
    for line in filter(None, lines[:start]):
        if not line.startswith("found by"):
            about.append(line)
        elif found := _FOUND.fullmatch(line):
            tests.append(Finder(found[2], found[3] or "", found[4] or ""))
            hangs |= found[1] is not None
        else:
            raise PatchError(f"{name}: {line!r} names no test")
    if not about or not tests:
        raise PatchError(f"{name}: its first lines say what is wrong, then `found by: tests/...`")
    return Bug(name, " ".join(about), tuple(tests), hangs, _files(name, lines[start:]))


def _files(name: str, lines: list[str]) -> dict[str, tuple[Hunk, ...]]:
    """Parse the diff. Each file has the lines `--- a/x` and `+++ b/x`, followed by hunks."""
    found: dict[str, tuple[Hunk, ...]] = {}
    at = 0
    while at < len(lines):
        file = lines[at].removeprefix("--- a/")
        if lines[at : at + 2] != [f"--- a/{file}", f"+++ b/{file}"]:
            raise PatchError(f"{name}: {lines[at]!r} begins no file")
        hunks = []
        at += 2
        while at < len(lines) and (head := _HUNK.match(lines[at])):
            hunk, at = _hunk(name, head, lines, at + 1)
            hunks.append(hunk)
        if not hunks or file in found:
            raise PatchError(f"{name}: {file} has no changes, or comes twice")
        found[file] = tuple(hunks)
    if not found:
        raise PatchError(f"{name}: there is no diff")
    return found


def _hunk(name: str, head: re.Match[str], lines: list[str], at: int) -> tuple[Hunk, int]:
    """Parse one hunk. Return the hunk, and the index of the line after it. The counts in the hunk's first
    line must match the hunk's lines, as git requires.
    """
    wanted = int(head[2] or 1), int(head[4] or 1)
    before: list[str] = []
    after: list[str] = []
    both = 0
    while (len(before), len(after)) != wanted:
        if at == len(lines) or lines[at][:1] not in (" ", "-", "+"):
            raise PatchError(f"{name}: {head[0]} counts lines that are not there")
        sign, line = lines[at][:1], lines[at][1:]
        at += 1
        before += [line] if sign != "+" else []
        after += [line] if sign != "-" else []
        both += sign == " "
    return Hunk(int(head[1]), tuple(before), tuple(after), max(wanted) - both), at


def planted(text: str, hunks: Sequence[Hunk], what: str) -> str:
    """Return the text with the bug planted. A hunk is applied where all its lines match, at the match nearest
    to its original place.
    """
    lines = text.split("\n")
    shift = 0
    for hunk in hunks:
        size, expected = len(hunk.before), hunk.line - 1 + shift
        places = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == hunk.before]
        if not places:
            raise PatchError(
                f"{what}: the lines that a patch of tests/data/planted changes near line {hunk.line} were "
                f"edited. Update the patch, or plant another bug instead"
            )
        place = min(places, key=lambda at: abs(at - expected))
        lines[place : place + size] = hunk.after
        shift += place - expected + len(hunk.after) - size
    return "\n".join(lines)


def plant(bug: Bug, root: Path) -> None:
    """Plant the bug in the files under `root`. If one file does not match, change no file."""
    texts = {
        file: planted((root / file).read_text(), hunks, f"{bug.name}: {file}")
        for file, hunks in bug.hunks.items()
    }
    for file, text in texts.items():
        (root / file).write_text(text)


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """Return the names of the tests that a file defines."""
    tree = ast.parse(path.read_text(), str(path))
    names = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))
