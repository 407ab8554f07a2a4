"""Tests of the docs. Their Python blocks and commands run, and their names, links, messages and files
exist."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tree
from children import ended

import teraio
from teraio import errors
from teraio.cli import main
from teraio.cli.commands import options as options_page
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.options import VARIABLES, Settings, env_name

RECIPES = sorted((tree.ROOT / "docs" / "recipes").glob("[!R]*.md"))
DOCS = [tree.ROOT / "README.md", *sorted((tree.ROOT / "docs").glob("*.md")), *RECIPES]
PAGES = [tree.ROOT / path for path in tree.files(".md")]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
KEYS = {field.name for field in fields(Settings)}
# Keyword arguments of teraio.load that are not options.
OTHER_KEYS = {"strict", "copy", "whole"}
# Strings in the docs that only look like environment variables: (1) a prefix, and (2) a typo that an example
# shows.
OPEN = {"TERAIO_", "TERAIO_MEMROY"}


def blocks(word: str) -> dict[str, str]:
    """Return the code of each block by its place, such as `cookbook.md:18`.

    The function reads only blocks whose fence has exactly the text `word`.
    """
    found = {}
    for path in DOCS:
        text = path.read_text()
        for fence in FENCE.finditer(text):
            if fence[1].strip() == word:
                found[f"{path.name}:{text.count(chr(10), 0, fence.start()) + 1}"] = fence[2]
    return found


PYTHON = {**blocks("python"), **blocks("python run")}
# Pages with runnable commands. The commands of one page run after the commands of the previous page. They run
# in the folder to which the Python blocks wrote their files.
RUNS = ("start.md", "README.md", "planning.md", *(path.name for path in RECIPES))


def commands() -> dict[str, str]:
    """Return, for the pages in RUNS, each command by a name such as `planning.md: teraio profile list`."""
    found: dict[str, str] = {}
    for path in sorted(DOCS, key=lambda path: (*RUNS, path.name).index(path.name)):
        shells = (fence[2] for fence in FENCE.finditer(path.read_text()) if fence[1].strip() in ("", "bash"))
        lines = re.findall(r"^(?:\$ )?(teraio .*)$", "\n".join(shells), re.MULTILINE)
        if path.name in RUNS:
            found |= {f"{path.name}: {line}": line for line in lines}
    return found


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """Run all runnable blocks and commands in one child process. Return their results."""
    environment = {**os.environ, "TERAIO_INNER": "eager", "TERAIO_PLANNER": "greedy", "TERAIO_WARMUP": "1"}
    command = [sys.executable, str(tree.SUPPORT / "docs_run.py")]
    given = {"python": list(blocks("python run").items()), "commands": list(commands().items())}
    done = ended(command, env=environment, given=json.dumps(given))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "matches none" not in done.stderr, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_runnable_blocks_of_the_docs_run(ran: dict[str, Any]) -> None:
    failures = {name: result["error"] for name, result in ran.items() if "error" in result}
    assert not failures, "\n".join(f"{name}\n{error}" for name, error in failures.items())
    assert len(blocks("python run")) >= 12


def test_commands_of_the_docs_run_in_an_empty_folder(ran: dict[str, Any]) -> None:
    wrong = [f"{name}\n{error}" for name, error in ran["commands"].items() if error]
    assert not wrong, "\n".join(wrong)
    assert {name.partition(":")[0] for name in ran["commands"]} == set(RUNS) and len(ran["commands"]) >= 15


def test_blocks_with_a_budget_move_tensors(ran: dict[str, Any]) -> None:
    """Check that blocks with a budget have slots and fetches.

    For each block, docs_run.py sets a smaller budget than the block's model needs.
    """
    for name, code in blocks("python run").items():
        if '"memory"' in code or "memory=" in code:
            assert ran[name]["slots"] > 0, (name, ran[name])
            # A block without gradients may fetch nothing, because its weights may fit in the budget.
            assert ran[name]["fetches"] > 0 or "no_grad" in code, (name, ran[name])
    assert {"run.profile.json", "run.timeline.json", "last.pt"} <= {
        name for name, size in ran["files"].items() if size
    }


@pytest.mark.parametrize("name", PYTHON)
def test_python_in_the_docs_uses_existing_names(name: str) -> None:
    for node in ast.walk(ast.parse(PYTHON[name], name)):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "teraio":
            assert node.attr in (*teraio.__all__, "errors"), f"{name}: teraio.{node.attr}"
        for key in keys_of(node):
            assert key in KEYS | OTHER_KEYS, f"{name}: option {key!r}"


def keys_of(node: ast.AST) -> list[str]:
    """List the options in calls and dicts such as `options={...}`, `options = {...}` and
    `teraio.init(...)`."""
    given: list[ast.expr] = []
    match node:
        case ast.keyword(arg="options", value=ast.Dict(keys=keys)):
            given = [key for key in keys if key]
        case ast.Assign(targets=[ast.Name(id="options")], value=ast.Dict(keys=keys)):
            given = [key for key in keys if key]
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="teraio"), attr="init" | "load" | "wrap"), keywords=keywords
        ):
            return [keyword.arg for keyword in keywords if keyword.arg]
    return [str(key.value) for key in given if isinstance(key, ast.Constant)]


def test_names_in_the_docs_exist() -> None:
    known = {*VARIABLES, *map(env_name, KEYS)}
    raised = {name for name in vars(errors) if name.endswith("Error")}
    wrong = []
    for path in DOCS:
        text = path.read_text()
        wrong += [
            f"{path.name}: {name}"
            for name in re.findall(r"\bTERAIO_[A-Z_]*", text)
            if name not in known | OPEN
        ]
        wrong += [
            f"{path.name}: teraio.{name}"
            for name in re.findall(r"`teraio\.([a-z_]+)", text)
            if name not in (*teraio.__all__, "errors", "integrations")
        ]
        wrong += [
            f"{path.name}: {name}"
            for name in re.findall(r"`([A-Z][A-Za-z]+Error)\b", text)
            if name not in raised | {"RuntimeError", "ValueError"}
        ]
    assert not wrong, "\n".join(wrong)


QUOTED = re.compile(r"`([^`]+)`")
WORDS = 4  # number of successive words of a message that must occur in a text of the code


def in_a_row(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[\w'-]+", text.lower())
    return {tuple(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}


def test_messages_in_troubleshooting_are_printed_by_the_code() -> None:
    """Check that four successive words of each quoted message also occur in a text of the code."""
    texts: set[tuple[str, ...]] = set()
    for path in tree.package().values():
        for string in tree.strings(path):
            texts |= in_a_row(re.sub(r"%\w", "0", string.text))
    for path in tree.files(".h", ".cpp"):
        for literals in re.findall(r'"[^"\n]*"(?:\s+"[^"\n]*")*', tree.text(path)):
            texts |= in_a_row("".join(literals.split('"')[1::2]))
    page = (tree.ROOT / "docs" / "troubleshooting.md").read_text()
    theirs = ("Either mode or options", "is not a valid DynamoBackend")
    quoted = [" ".join(text.split()) for text in QUOTED.findall(page)]
    messages = [
        text for text in quoted if len(text.split()) > 2 * WORDS and not any(t in text for t in theirs)
    ]
    wrong = [text for text in messages if not in_a_row(re.sub(r"\d[\d.]*", "0", text)) & texts]
    assert len(messages) >= 20
    assert not wrong, "\n".join(wrong)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    text = FENCE.sub("", path.read_text())
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(kept.replace(" ", "-"))
    return found


def test_links_in_the_docs_resolve() -> None:
    wrong, count = [], 0
    for path in PAGES:
        text = FENCE.sub("", path.read_text())
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?://", target):
                continue
            count += 1
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists():
                wrong.append(f"{path.name}: {target}")
            elif anchor and anchor not in anchors(file):
                wrong.append(f"{path.name}: {target} ({', '.join(sorted(anchors(file)))})")
    assert not wrong, "\n".join(wrong)
    assert count >= 20


def test_files_named_in_the_docs_exist() -> None:
    """Check each path in the docs that begins with a folder of the tree, such as `runtime/store/store.py`."""
    folders = ("teraio", "passes", "runtime", "csrc", "tests", "examples", "benchmarks", "docs", "profiles")
    wrong = []
    for path in PAGES:
        for name in re.findall(rf"[` ]((?:{'|'.join(folders)})/[\w./-]+\.\w+)", path.read_text()):
            if not (tree.ROOT / name).exists():
                wrong.append(f"{path.name}: {name}")
    assert not wrong, "\n".join(wrong)


def test_call_chains_of_the_architecture_name_functions_of_their_files() -> None:
    """Check each line such as `  Mover.begin_evict    runtime/ledger/mover.py: the tier of the copy`."""
    page = (tree.ROOT / "docs" / "architecture.md").read_text()
    chains = page[page.index("## Who calls whom") :]
    hops = re.findall(r"^ *([\w.:]+) +([\w/]+\.(?:py|cpp))", chains, re.MULTILINE)
    assert len(hops) > 50
    wrong = []
    for hop, path in hops:
        name = re.split(r"\.|::", hop)[-1]
        if not re.search(rf"\b{name}\b", (tree.ROOT / path).read_text()):
            wrong.append(f"{path} has no {hop}")
    assert not wrong, "\n".join(wrong)


def test_every_decision_is_listed_and_has_a_context_and_a_choice() -> None:
    folder = tree.ROOT / "docs" / "decisions"
    pages = {path.name: path.read_text() for path in folder.glob("*.md")}
    listed = re.findall(r"\]\(([\w-]+\.md)\)", pages.pop("README.md"))
    assert sorted(listed) == sorted(pages)
    wrong = [name for name, text in pages.items() if "## Context" not in text or "## Choice" not in text]
    assert not wrong, wrong


FORMATS: dict[str, type[Profile | Machine | Plan | Timeline]] = {
    "teraio-profile": Profile,
    "teraio-machine": Machine,
    "teraio-plan": Plan,
    "teraio-timeline": Timeline,
}


def test_files_shown_in_the_docs_are_valid_and_complete() -> None:
    page = (tree.ROOT / "docs" / "formats.md").read_text()
    shown = {json.loads(text)["format"]: text for text in blocks("json").values()}
    assert shown.keys() == FORMATS.keys()
    for name, text in shown.items():
        value = FORMATS[name].loads(text)
        written = json.loads(value.dumps())
        assert FORMATS[name].loads(value.dumps()) == value
        keys = set(re.findall(r'"(\w+)":', value.dumps())) - set(written.get("tiers", ()))
        assert all(f"`{key}`" in page or f'"{key}"' in page for key in keys)


def test_the_package_shows_its_public_names_and_is_typed() -> None:
    assert dir(teraio) == sorted(teraio.__all__) and len(teraio.__all__) <= 13
    assert (Path(teraio.__file__).parent / "py.typed").is_file()


def test_every_page_is_linked_from_start() -> None:
    start = (tree.ROOT / "docs" / "start.md").read_text()
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", start))
    assert {path.relative_to(tree.ROOT / "docs").as_posix() for path in DOCS[1:]} <= linked


def test_options_page_equals_the_output_of_the_command() -> None:
    """Compare docs/options.md with the command's output.

    `teraio options > docs/options.md` updates the page.
    """
    assert (tree.ROOT / "docs" / "options.md").read_text() == options_page.options_as_markdown(
        main._make_parser()
    )
    names = list(options_page.describe_public_names())
    assert len(names) == len(teraio.__all__) and all(options_page.describe_public_names().values())
    assert all(one.lower() <= other.lower() for one, other in pairwise(name.split("(")[0] for name in names))
