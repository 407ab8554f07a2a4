"""The files of this tree, for the tests that read the code instead of running it."""

from __future__ import annotations

import ast
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"  # the folder of modules that tests import, and of scripts that tests run


@cache
def listed() -> tuple[Path, ...]:
    """Return the existing files that git tracks or would add, relative to the root. Symbolic links count as
    links.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return tuple(Path(name) for name in sorted({*names} - {""}) if os.path.lexists(ROOT / name))


def files(*suffixes: str) -> list[Path]:
    """Return the files, or only the files with one of these suffixes.

    teraio/passes and teraio/runtime are links and are not followed, so each file occurs only one time.
    """
    found = [path for path in listed() if not (ROOT / path).is_symlink()]
    return [path for path in found if not suffixes or path.suffix in suffixes]


@cache
def text(path: Path) -> str:
    return (ROOT / path).read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path), str(path))


class String(NamedTuple):
    """One string of a module. In an f-string, each value is replaced by a 0."""

    line: int
    text: str
    is_statement: bool  # True: a docstring, or another string that stands alone


@cache
def strings(path: Path) -> tuple[String, ...]:
    """Return all strings of a module."""
    nodes = list(ast.walk(tree(path)))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    found: list[String] = []
    for node in nodes:
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in values)
            case ast.Constant(value=str(text)) if id(node) not in parts:
                pass
            case _:
                continue
        found.append(String(node.lineno, text, id(node) in statements))
    return tuple(found)


@cache
def commit_hash() -> str:
    """Return the hash of the commit that is checked out."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def module_name(path: Path) -> str:
    """Return the module name by which the tree imports a file. `passes/planner/auto.py` gives
    `teraio.passes.planner.auto`.
    """
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "teraio" else ("teraio", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package() -> dict[str, Path]:
    """Return the modules of the package by name."""
    inside = (path for path in files(".py") if path.parts[0] in ("teraio", "passes", "runtime"))
    return {module_name(path): path for path in inside}
