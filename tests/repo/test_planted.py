"""Tests that the patch of each planted bug still applies to the code.

tests/long/planted.py checks that the named tests find each bug. That check takes most of an hour.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import planted_bugs
import pytest
import tree
from planted_bugs import Bug, PatchError

LEAST, LEAST_NATIVE = 30, 8
LINES_MOST = 6

BUGS = planted_bugs.bugs()


def test_planted_bugs_cover_the_whole_engine() -> None:
    assert len(BUGS) >= LEAST
    assert sum(bug.native for bug in BUGS) >= LEAST_NATIVE
    folders = {file.partition("/")[0] for bug in BUGS for file in bug.hunks}
    assert folders >= {"csrc", "runtime", "teraio"}
    numbers = sorted(int(bug.name.partition("-")[0]) for bug in BUGS)
    assert numbers == [*range(1, len(BUGS) + 1)]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_applies_is_small_and_names_existing_tests(bug: Bug) -> None:
    for file, hunks in bug.hunks.items():
        text = tree.text(tree.ROOT / file)
        worse = planted_bugs.planted(text, hunks, f"{bug.name}: {file}")
        assert worse != text
        if file.endswith(".py"):
            ast.parse(worse, file)
    assert 0 < bug.changed_lines <= LINES_MOST, "a bug that a person could write by mistake"
    for finder in bug.tests:
        path = tree.ROOT / finder.file
        assert path.is_file(), f"{finder.file} does not exist"
        names = planted_bugs.names_of_tests(path)
        assert not finder.name or finder.name in names, f"{finder.selector} does not exist"


def test_bug_uses_only_existing_names(tmp_path: Path) -> None:
    for bug in BUGS:
        for file, hunks in bug.hunks.items():
            if file.endswith(".py"):
                path = tmp_path / bug.name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(planted_bugs.planted(tree.text(tree.ROOT / file), hunks, bug.name))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F821", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.skipif(not (tree.ROOT / ".git").exists(), reason="not a git checkout")
def test_git_applies_every_patch() -> None:
    for path in sorted(planted_bugs.FOLDER.glob("*.patch")):
        command = ["git", "apply", "--check", str(path)]
        ran = subprocess.run(command, cwd=tree.ROOT, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


# ---- parsing of patches

HEAD = "It adds wrongly.\nfound by: tests/test_x.py::test_sums[2]\n\n"
DIFF = "--- a/x.py\n+++ b/x.py\n@@ -2,3 +2,3 @@\n one\n-two\n+too\n three\n"
TEXT = "zero\none\ntwo\nthree\nfour\n"


def changed(text: str) -> str:
    return planted_bugs.planted(text, planted_bugs.parse("p", HEAD + DIFF).hunks["x.py"], "p")


def test_patch_is_applied_where_its_lines_match() -> None:
    bug = planted_bugs.parse("p", HEAD + DIFF)
    assert (bug.about, [finder.selector for finder in bug.tests]) == (
        "It adds wrongly.",
        ["tests/test_x.py::test_sums[2]"],
    )
    assert (bug.hangs, bug.native, bug.changed_lines) == (False, False, 1)
    assert changed(TEXT) == TEXT.replace("two", "too")
    assert changed("more\n" * 50 + TEXT) == "more\n" * 50 + TEXT.replace("two", "too")
    twice = TEXT * 2
    assert changed(twice) == twice.replace("two", "too", 1), "the match nearest to the old line numbers"


@pytest.mark.parametrize("text", [TEXT.replace("two", "2"), TEXT.replace("three", "3"), ""])
def test_patch_without_matching_lines_is_stale(text: str) -> None:
    with pytest.raises(PatchError, match="Update the patch"):
        changed(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DIFF, "what is wrong"),
        (HEAD, "no diff"),
        (HEAD + DIFF.replace("-2,3", "-2,4"), "counts lines"),
        (HEAD + DIFF + "something else\n", "begins no file"),
        (HEAD + DIFF.replace("b/x.py", "b/y.py"), "begins no file"),
        (HEAD + DIFF + DIFF, "comes twice"),
        (HEAD.replace("tests/test_x.py", "somewhere") + DIFF, "names no test"),
    ],
)
def test_malformed_patch_is_refused(text: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        planted_bugs.parse("p", text)
