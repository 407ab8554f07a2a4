"""Prose of the tree: its comments, docstrings, messages and pages, and the faults of that prose.

Command line: `python tests/support/prose.py [PATH ...]`. Without a path, the script reads the whole tree. It
prints one line per fault. A docstring of a function must begin with a verb in `tests/data/verbs.txt`. A
docstring of a class may begin with such a verb only if `tests/data/verbs_also_nouns.txt` also lists the word.

The script cannot judge whether a sentence is true, or whether a reader needs the sentence.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tree

WORDS_MAX = 30  # the largest number of words in a sentence

# Docstrings that begin with one of these words are relative clauses without a noun.
BAD_STARTS = {
    *("what", "whose", "of", "that", "those", "whether", "how", "where", "when", "who", "which", "why"),
    *("it", "its", "they", "their", "them", "as", "so", "but", "also", "not", "if"),
}
# Each of these expressions hides the direction in which bytes move, or hides the actor. The value is a better
# word.
UNCLEAR = {
    "away": "evicted",
    "gone": "evicted, dropped or freed",
    "stay|stays|stayed|staying": "is resident, is kept",
    "(?:come|comes|came|coming) back": "is fetched",
    "(?:is|are|was) said": "name who reports it",
    "of those|those of": "repeat the noun",
    "no one's": "name the owner",
    "but for": "except",
    "what is": "name the thing",
}
UNCLEAR_WORDS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): better for words, better in UNCLEAR.items()}
PRODUCT = ("teraio", "passes", "runtime")


class Piece(NamedTuple):
    """One piece of prose: a docstring, comment, message or paragraph."""

    line: int
    kind: str  # function, class, module, test, comment, message, paragraph
    text: str


@cache
def words_of(name: str) -> frozenset[str]:
    """Return the words of a file in tests/data."""
    return frozenset((tree.ROOT / "tests/data" / name).read_text().split())


def pieces(path: Path) -> Iterator[Piece]:
    """Yield the pieces of prose in a file."""
    if path.suffix in (".py", ".pyi"):
        yield from _docstrings(path)
        yield from _python_comments(path)
        if path.parts[0] in PRODUCT:
            yield from _messages(path)
    elif path.suffix in (".cpp", ".h"):
        yield from _cpp_comments(path)
    elif path.suffix == ".md":
        yield from _paragraphs(path)


def _docstrings(path: Path) -> Iterator[Piece]:
    for node in ast.walk(tree.tree(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                kind = "test" if name.startswith("test_") else "function"
            case ast.ClassDef():
                kind = "class"
            case ast.Module():
                kind = "module"
            case _:
                continue
        text = ast.get_docstring(node)
        if text:
            yield Piece(node.body[0].lineno, kind, text)


def _python_comments(path: Path) -> Iterator[Piece]:
    """Yield the comments. Comment lines that follow each other in one column are one comment."""
    block: list[str] = []
    first, last, column = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(tree.text(path)).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# type:", "# noqa", "# ruff:")):
            continue
        row, at = token.start
        if not (block and row == last + 1 and at == column):
            if block:
                yield Piece(first, "comment", "\n".join(block))
            block, first, column = [], row, at
        block.append(token.string.removeprefix("#").removeprefix(" ").split("  # type:")[0])
        last = row
    if block:
        yield Piece(first, "comment", "\n".join(block))


def _messages(path: Path) -> Iterator[Piece]:
    """Yield the strings of more than three words that are not docstrings."""
    for string in tree.strings(path):
        if not string.is_statement and string.text.count(" ") > 2:
            yield Piece(string.line, "message", string.text)


CPP_COMMENT = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')|((?:[ \t]*//[^\n]*\n)+|/\*.*?\*/|//[^\n]*)""", re.DOTALL
)


def _cpp_comments(path: Path) -> Iterator[Piece]:
    text = tree.text(path)
    for found in CPP_COMMENT.finditer(text):
        if found[2]:
            lines = [re.sub(r"^\s*(///?|/\*+|\*/|\*)\s?", "", line) for line in found[2].splitlines()]
            yield Piece(text.count("\n", 0, found.start()) + 1, "comment", "\n".join(lines))


def _paragraphs(path: Path) -> Iterator[Piece]:
    """Yield the paragraphs, list items and cells of tables. Code blocks are left out."""
    block: list[str] = []
    first, code = 0, False
    for number, line in enumerate([*tree.text(path).splitlines(), ""], start=1):
        fence = line.lstrip().startswith("```")
        starts = not line.strip() or fence or re.match(r"\s*([-*]|\d+\.|#+|\|)\s?", line) is not None
        if starts and block:
            yield Piece(first, "paragraph", "\n".join(block))
            block = []
        code ^= fence
        if code or fence or not line.strip():
            continue
        if line.startswith("|"):
            yield from (Piece(number, "paragraph", cell) for cell in line.split("|") if cell.strip(" -:"))
            continue
        if not block:
            first = number
        block.append(re.sub(r"^\s*([-*]|\d+\.|#+)\s+", "", line))


def prose_of(piece: Piece) -> str:
    """Return the running text of a piece. Code, pictures and tables are left out."""
    lines = textwrap.dedent(piece.text).splitlines()
    kept = [line for line in lines if not line.startswith("  ") and "   " not in line.strip()]
    text = "\n".join(kept) if piece.kind != "message" else piece.text
    text = re.sub(r"`[^`]*`", "`x`", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text."""
    for part in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z`\"'(*\[])", " ".join(part.split()))


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each fault in the prose of a file."""
    only_verbs = words_of("verbs.txt") - words_of("verbs_also_nouns.txt")
    for piece in pieces(path):
        text = prose_of(piece)
        where = f"{path}:{piece.line}: {piece.kind}"
        first = re.findall(r"[A-Za-z][a-z]*", piece.text)[:1]
        if piece.kind in ("function", "class", "module", "test") and first and first[0].lower() in BAD_STARTS:
            yield f"{where} begins with {first[0]!r}"
        elif piece.kind == "class" and first and first[0].lower() in only_verbs:
            yield f"{where} begins with a verb: {first[0]!r}"
        elif piece.kind == "function" and (not first or first[0].lower() not in words_of("verbs.txt")):
            yield f"{where} begins with {' '.join(first)!r}, which is no verb of tests/data/verbs.txt"
        for pattern, better in UNCLEAR_WORDS.items():
            if found := pattern.search(text):
                yield f"{where} says {found.group()!r}: {better}"
        if piece.kind == "message":
            continue
        for sentence in sentences(text):
            count = len(re.findall(r"[\w`'.-]*\w[\w`'.-]*", sentence))
            if count > WORDS_MAX:
                yield f"{where} has a sentence of {count} words: {sentence[:60]}..."


def main(arguments: list[str]) -> int:
    paths = [Path(name).resolve().relative_to(tree.ROOT) for name in arguments]
    wanted = [path for path in paths if (tree.ROOT / path).is_file()]
    folders = [path for path in paths if (tree.ROOT / path).is_dir()]
    listed = [p for p in tree.files() if not paths or any(f in p.parents for f in folders)]
    found = [fault for path in {*wanted, *(listed if folders or not paths else ())} for fault in faults(path)]
    print("\n".join(sorted(found)) or "no fault")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
