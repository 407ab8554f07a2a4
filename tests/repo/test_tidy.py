"""Tests of the style guide. They run the linter, the formatter and the type checker, and check rules that
these tools cannot check."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tree

FUNCTION_LINES = 60
FILE_LINES = 600
LINE_CHARACTERS = 110
SOURCES = (".py", ".pyi", ".cpp", ".h")

# Vague words that no name may contain. For example, `swap` names no direction. `process` is refused only as a
# verb, as in `process_batch`.
UNUSED_WORDS = {"manager", "handler", "helper", "helpers", "util", "utils", "context", "swap"} | {
    # Words without a direction; use evicted, dropped, freed, resident, kept.
    *("away", "gone", "stay", "stays", "stayed"),
}
# CUDA has no other word for its contexts, so C++ files and .pyi files may use `context`.
CUDA_WORDS = {suffix: {"context"} for suffix in (".cpp", ".h", ".pyi")}


def silent(*command: str) -> None:
    ran = subprocess.run(command, cwd=tree.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_linter_reports_nothing() -> None:
    silent(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", ".")


def test_formatters_change_nothing() -> None:
    silent(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--output-format=concise", ".")
    sources = [str(path) for path in tree.files(".cpp", ".h")]
    # clang-format is a program in the interpreter's folder, and cannot be run with -m.
    program = str(Path(sys.executable).with_name("clang-format"))
    silent(program, "--style=file:csrc/.clang-format", "--dry-run", "--Werror", *sources)


def test_type_checker_reports_nothing() -> None:
    """Run mypy without a cache, because writing a cache takes time."""
    silent(sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", os.devnull)


def test_lines_have_at_most_110_characters() -> None:
    """Check files that are not Python. The linter checks Python files."""
    wrong = [
        f"{path}:{number} has {len(line)} characters"
        for path in tree.files(".cpp", ".h", ".toml", ".sh")
        for number, line in enumerate(tree.text(path).splitlines(), start=1)
        if len(line) > LINE_CHARACTERS and not line.startswith("description = ")
    ]
    assert not wrong, "\n".join(wrong)


def test_files_have_at_most_600_lines() -> None:
    lengths = {path: len(tree.text(path).splitlines()) for path in tree.files(*SOURCES)}
    wrong = [f"{path} has {length} lines" for path, length in lengths.items() if length > FILE_LINES]
    assert not wrong, "\n".join(wrong)


def test_functions_have_at_most_60_lines() -> None:
    wrong = [
        f"{path}:{first} is {last - first + 1} lines"
        for path in tree.files(*SOURCES)
        for first, last in (python_functions if path.suffix.startswith(".py") else cpp_functions)(path)
        if last - first + 1 > FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def python_functions(path: Path) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree.tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.end_lineno or node.lineno


# A pattern for comments, literals and preprocessor lines. cpp_code replaces each of them by its line ends.
CPP_NOISE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)


def cpp_code(path: Path) -> str:
    return CPP_NOISE.sub(lambda noise: "\n" * noise.group().count("\n"), tree.text(path))


def cpp_functions(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the first and the last line of each function.

    A block in braces after a parameter list counts as a function, also inside a namespace or a class.
    """
    code = cpp_code(path)
    # For each open brace, a pair: True if the brace opens a function, and the position at which the
    # declaration before the brace begins.
    opened: list[tuple[bool, int]] = []
    text_from = 0
    for mark in re.finditer(r"[;{}]", code):
        if mark.group() == "{":
            before = code[text_from : mark.start()]
            start = text_from + len(before) - len(before.lstrip())
            opened.append(("(" in before and not re.match(r"\s*(namespace|extern)\b", before), start))
        elif mark.group() == "}" and opened:
            is_function, start = opened.pop()
            if is_function and not any(outer for outer, _ in opened):
                yield code.count("\n", 0, start) + 1, code.count("\n", 0, mark.end()) + 1
        text_from = mark.end()


def words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier)]


def python_names(path: Path) -> Iterator[str]:
    """Yield the names that this file defines. Names that the file only uses are left out."""
    yield path.stem
    for node in ast.walk(tree.tree(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                yield name


def cpp_names(path: Path) -> Iterator[str]:
    """Yield the identifiers of a C++ file that may be names of this project.

    An identifier after `::`, `.` or `->` is left out, because `swap` in `std::swap` is a name of another
    library.
    """
    yield path.stem
    yield from re.findall(r"(?<![:.>\w])[A-Za-z_]\w*", cpp_code(path))


def in_sentences(name: str) -> set[str]:
    """Return the vague words that a test's name may contain.

    The name of a test is a sentence, and a sentence may be about a signal's handler or a CUDA context.
    """
    return {"handler", "context"} if name.startswith("test_") else set()


def test_names_contain_no_vague_words() -> None:
    wrong = [
        f"{path} calls something {name!r}"
        for path in tree.files(*SOURCES)
        for name in sorted(set(python_names(path) if path.suffix.startswith(".py") else cpp_names(path)))
        if (UNUSED_WORDS - CUDA_WORDS.get(path.suffix, set()) - in_sentences(name)) & set(words(name))
        or words(name)[:1] == ["process"] != words(name)
    ]
    assert not wrong, "\n".join(wrong)


# An absolute path of one particular machine. Paths that every system has, and paths in examples, do not
# count.
ABSOLUTE = re.compile(r"""(?<![\w./$}\])*"'<>~+:?&=%-])/([A-Za-z]\w*)(?=[/\s"'`),.:;]|$)""")
QUOTED_ABSOLUTE = re.compile(r"""["'=:]/([A-Za-z]\w*)/""")
SYSTEM = {"bin", "boot", "dev", "etc", "lib", "mnt", "opt", "proc", "run", "sys", "tmp", "usr", "var"}
EXAMPLES = {"a", "docker", "nvme", "nvme0", "nvme1", "path", "scratch"}
TALK = re.compile(
    r"\bissue\s+#?\d|\bpart \d+ of \d+|\b(?:this|last|previous|earlier) session\b", re.IGNORECASE
)


def test_files_contain_no_paths_of_one_machine() -> None:
    wrong = []
    ours = SYSTEM | EXAMPLES | {path.parts[0].split(".")[0] for path in tree.files()}
    for path in tree.files():
        try:
            text = (tree.ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            roots = {*ABSOLUTE.findall(line), *QUOTED_ABSOLUTE.findall(line)} - ours
            if roots or TALK.search(line):
                wrong.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_readme_and_ci_run_the_same_commands() -> None:
    """Compare the shell blocks of the README with .ci/run. The README has blocks for set-up, demo and tests,
    and .ci/run runs the set-up and the tests."""
    blocks = re.findall(r"```bash\n(.*?)```", (tree.ROOT / "README.md").read_text(), re.DOTALL)
    setup, job, tests = (block.strip().splitlines() for block in blocks[:3])
    script = (tree.ROOT / ".ci/run").read_text().splitlines()
    assert len(setup) == 2
    assert job == ["python -m teraio demo"]
    assert tests == ["python -m pytest"]
    commands = [line.removesuffix(" || exit") for line in script]
    assert [line for line in commands if line in (*setup, *tests)] == [*setup, *tests]
    assert script[-1] == tests[-1], "the exit code of CI is the one of the tests"
    assert (tree.ROOT / ".ci/run").stat().st_mode & 0o111
