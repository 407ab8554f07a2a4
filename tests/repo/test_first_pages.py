"""Tests of the first page of each package, which is the docstring of its `__init__.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tree

PACKAGES = {name: path for name, path in tree.package().items() if path.name == "__init__.py"}
# A row of a page's table: the names of modules, then the contents of these modules.
ROW = re.compile(r"^    (\S.*?) {2,}(\S.*)$", re.MULTILINE)
WORDS = re.compile(r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*")
QUOTED = re.compile(r'"([^"]*)"')
LOG_CALL = re.compile(r"\blog\.(?:debug|info|warning|error)\(")


def page_of(package: str) -> str:
    return ast.get_docstring(tree.tree(PACKAGES[package])) or ""


def modules_of(package: str) -> list[Path]:
    return [path for path in tree.package().values() if path.parent == PACKAGES[package].parent]


@cache
def names_of(path: Path) -> frozenset[str]:
    """Return the names of the functions, classes and methods that a module defines."""
    defined = (ast.FunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(tree.tree(path)) if isinstance(node, defined))


def text_of(package: str) -> str:
    """Return the joined texts of the package's modules."""
    return "\n".join(
        string.text
        for path in modules_of(package)
        if path.stem != "__init__"
        for string in tree.strings(path)
    )


def promised_names(page: str) -> Iterator[str]:
    """Yield the promised names of a table. They are before a colon in the second column, as in `Mover: begin
    and end of ...`."""
    for row in ROW.finditer(page):
        for clause in row[2].split("; "):
            names, colon, _ = clause.partition(":")
            if colon and WORDS.fullmatch(names):
                yield from names.split(", ")


@pytest.mark.parametrize("package", PACKAGES)
def test_first_page_has_inputs_outputs_and_invariant(package: str) -> None:
    page = page_of(package)
    assert len(page.splitlines()) > 3
    for word in ("In:", "Out:", "Invariant:"):
        assert word in page, f"{PACKAGES[package]} lacks {word!r}"
    if any(LOG_CALL.search(tree.text(path)) for path in modules_of(package)):
        assert "Log lines:" in page, f"modules of {package} write log lines, but its page lists none"


@pytest.mark.parametrize("package", PACKAGES)
def test_first_page_names_each_module_and_only_existing_names(package: str) -> None:
    page, modules = page_of(package), modules_of(package)
    for path in modules:
        assert path.stem.startswith("__") or re.search(rf"\b{path.stem}\b", page), (
            f"{path} is not on the page"
        )
    known = {path.stem for path in modules}.union(*map(names_of, modules))
    unknown = [name for name in promised_names(page) if name not in known]
    assert not unknown, f"{PACKAGES[package]} has names that no module of it defines: {unknown}"


@pytest.mark.parametrize("package", PACKAGES)
def test_log_lines_on_a_first_page_are_in_the_code(package: str) -> None:
    _, _, owned = page_of(package).partition("Log lines:")
    for line in QUOTED.findall(" ".join(owned.split())):
        for part in filter(str.strip, re.split(r"\.\.\.", line)):
            words = part.strip(" ():,")
            assert words in text_of(package), f"{PACKAGES[package]}: no text of its modules has {words!r}"
