"""A random draw of comments, docstrings and paragraphs of the docs, for a reader who does not know the tree.

    python tests/long/draw_prose.py [--seed HASH] [--comments 40] [--paragraphs 20]

The reader marks a piece "once" if one reading was enough to understand it, otherwise "again". By default, the
seed is the commit's hash, so that nobody chooses the sample. The goal is 38 of 40 comments and 19 of 20
paragraphs.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import prose
import tree

WORDS_LEAST = 4  # smallest number of words; a shorter piece, such as a heading, cannot be judged
CODE = (".py", ".pyi", ".cpp", ".h")


class Drawn(NamedTuple):
    """One piece of prose, and its surroundings: the line of code beside it, or a cell's column and row."""

    path: Path
    line: int
    text: str
    beside: str


def pieces(*suffixes: str) -> Iterator[Drawn]:
    """Yield all pieces of prose in files with these suffixes."""
    for path in tree.files(*suffixes):
        lines = tree.text(path).splitlines()
        for piece in prose.pieces(path):
            if piece.kind == "message" or len(prose.prose_of(piece).split()) < WORDS_LEAST:
                continue
            beside = _code_beside(piece, lines) if path.suffix in CODE else _column_and_row(piece, lines)
            yield Drawn(path, piece.line, piece.text, beside)


def _code_beside(piece: prose.Piece, lines: list[str]) -> str:
    """Return the line of code beside a piece: for a docstring the line before it, and for a comment the line
    before or after it.
    """
    own = re.split(r"\s*(?:#|//|/\*)", lines[piece.line - 1])[0].strip()
    if piece.kind != "comment":
        return lines[piece.line - 2].strip() if piece.line > 1 else ""
    return own or lines[min(piece.line + piece.text.count("\n"), len(lines) - 1)].strip()


def _column_and_row(piece: prose.Piece, lines: list[str]) -> str:
    """Return the head of a cell's column, and the first cell of its row. For other text, return an empty
    string.
    """
    row = lines[piece.line - 1]
    if not row.startswith("|"):
        return ""
    head = piece.line - 1
    while head and lines[head - 1].startswith("|"):
        head -= 1
    cells, heads = row.split("|"), lines[head].split("|")
    column = heads[cells.index(piece.text)].strip()
    return f"column: {column}; row: {cells[1].strip()}"


def show(found: list[Drawn], seed: str, count: int) -> None:
    """Print a numbered random sample of `found`."""
    drawn = random.Random(seed).sample(found, min(count, len(found)))
    for number, one in enumerate(drawn, start=1):
        beside = f"    [{one.beside}]" if one.beside or one.path.suffix in CODE else ""
        print(f"{number}. {one.path}:{one.line}{beside}")
        print("\n".join(f"    {line}" for line in one.text.splitlines()))
    print(f"{len(drawn)} of {len(found)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", help="default: the hash of the commit")
    parser.add_argument("--comments", type=int, default=40)
    parser.add_argument("--paragraphs", type=int, default=20)
    args = parser.parse_args()
    seed = args.seed or tree.commit_hash()
    print(f"seed {seed}\n\nComments and docstrings:\n")
    show(list(pieces(*CODE)), seed, args.comments)
    print("Paragraphs, list items and cells of the docs:\n")
    show(list(pieces(".md")), seed, args.paragraphs)


if __name__ == "__main__":
    main()
