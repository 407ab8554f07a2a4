"""A test that every docstring, comment, message and page obeys the rules of `prose.py`."""

from __future__ import annotations

from pathlib import Path

import prose
import pytest
import tree


def test_prose_of_the_tree_has_no_fault() -> None:
    found = [fault for path in tree.files(".py", ".pyi", ".cpp", ".h", ".md") for fault in prose.faults(path)]
    assert not found, "\n".join(found)


LONG = "One sentence of " + "very " * 30 + "many words."
# Each entry has (1) a file's name, (2) the file's text, and (3) a part of the fault that the checker must
# report.
FAULTY = (
    ("a.py", 'def f():\n    """The number of things."""\n', "which is no verb"),
    ("a.py", 'def f():\n    """Whether things are equal."""\n', "begins with 'Whether'"),
    ("a.py", 'class A:\n    """Whose things they are."""\n', "begins with 'Whose'"),
    ("a.py", 'class A:\n    """Return things."""\n', "begins with a verb"),
    ("a.py", '"""What the file does."""\n', "begins with 'What'"),
    ("a.py", f'def f():\n    """Return a number.\n\n    {LONG}\n    """\n', "words"),
    ("a.py", "a = 1  # the tensor is away\n", "says 'away'"),
    ("runtime/a.py", 'a = "the tensor stays in memory"\n', "says 'stays'"),
    ("a.cpp", "// The bytes are gone.\nint a;\n", "says 'gone'"),
    ("a.md", f"# Title\n\nA tensor comes back.\n\n- {LONG}\n", "says 'comes back'"),
    ("a.md", f"| {LONG} | cell |\n|---|---|\n", "words"),
)
CACHED = (tree.text, tree.tree, tree.strings, prose.words_of)


@pytest.mark.parametrize(("name", "text", "fault"), FAULTY)
def test_checker_reports_the_fault(
    name: str, text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    (tmp_path / "tests/data").mkdir(parents=True)
    (tmp_path / "tests/data/verbs.txt").write_text("return\n")
    (tmp_path / "tests/data/verbs_also_nouns.txt").touch()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    for cached in CACHED:
        cached.cache_clear()
    found = [*prose.faults(Path(name))]
    for cached in CACHED:
        cached.cache_clear()
    assert [line for line in found if fault in line], found


def test_verbs_are_sorted_and_single() -> None:
    verbs = (tree.ROOT / "tests/data/verbs.txt").read_text().split()
    nouns = (tree.ROOT / "tests/data/verbs_also_nouns.txt").read_text().split()
    assert verbs == sorted(set(verbs))
    assert nouns == sorted(set(nouns))
