"""`teraio options`: every option, variable of the environment and public name, from the code that reads them.

docs/options.md is what this prints.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from dataclasses import fields

import teraio
from teraio.cli.commands import completion
from teraio.options import VARIABLES, Settings, env_name, flag_name, options_table

DESCRIPTION = """\
Prints what a run can be told, as Markdown: every key of `options` with its environment variable, flag and
default, the variables that are no options, and every public name of the package. docs/options.md is this."""

EPILOG = """\
examples:
  teraio options
  teraio options --json"""

HEAD = """\
# Options, variables, names

This page is what `teraio options` prints; a test holds the two together.

## Options

Each is a key of `options`, an environment variable and, where a command has a use for it, a flag. A key wins
over the environment, which wins over the default. Sizes are bytes, or text with a unit: `20GiB` is
20 * 2**30, `20GB` is 20 * 10**9, and a bare `G` is refused. Durations are seconds, or text: `30s`, `1.5 ms`,
`2min`. What is unknown or malformed is an `OptionError` that names the option, what it got and what it takes.

"""

VARIABLES_HEAD = """
## Variables that are no options

| variable | meaning |
|---|---|
"""

VARIABLES_FOOT = """
Any other variable that begins with `TERAIO_` is named in a warning and has no effect. `TORCH_LOGS=teraio` and
handlers of your own go before `TERAIO_LOG`; `TORCH_TRACE` gets profile, plan and timeline as artifacts.

## Public names

"""

FOOT = """
[The cookbook](cookbook.md) has them in use, [reports](reports.md#for-loggers) says what the keys of `Stats`
are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    print(options_as_json() if args.json else options_as_markdown(args.whole), end="")
    return 0


def options_as_markdown(whole: argparse.ArgumentParser) -> str:
    variables = "".join(f"| `{name}` | {doc} |\n" for name, doc in VARIABLES.items())
    names = "".join(
        _markdown_item(f"**`{shape}`** {line}") for shape, line in describe_public_names().items()
    )
    flags = _wrap_lines(
        "Flags that commands take: " + "; ".join(_describe_commands_taking_flags(whole)) + "."
    )
    return f"{HEAD}{options_table()}\n{flags}\n{VARIABLES_HEAD}{variables}{VARIABLES_FOOT}{names}{FOOT}"


def _markdown_item(text: str) -> str:
    return f"- {_wrap_lines(text, indent='  ')}\n"


def _wrap_lines(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _describe_commands_taking_flags(whole: argparse.ArgumentParser) -> list[str]:
    """`--keep` of plan, fit: the options that are flags of commands, too."""
    levels = list(completion.completions_of_commands(whole))
    takers = {
        flag_name(f.name): [
            level.path[-1] for level in levels if any(flag_name(f.name) in flag.names for flag in level.flags)
        ]
        for f in fields(Settings)
    }
    return [f"`{flag}` of {', '.join(commands)}" for flag, commands in takers.items() if commands]


def options_as_json() -> str:
    options = [
        {
            "name": f.name,
            "variable": env_name(f.name),
            "flag": flag_name(f.name),
            "meaning": f.metadata["doc"],
        }
        for f in fields(Settings)
    ]
    told = {"options": options, "variables": VARIABLES, "names": describe_public_names()}
    return json.dumps(told, sort_keys=True) + "\n"


def describe_public_names() -> dict[str, str]:
    """`teraio.reset()` -> the first sentence of its docstring."""
    found = {}
    for name in sorted(teraio.__all__, key=str.lower):
        thing = getattr(teraio, name)
        if isinstance(thing, str):
            found[f"teraio.{name}"] = "The version of this package."
            continue
        shape = "" if isinstance(thing, type) else _format_parameters(thing)
        told = " ".join((inspect.getdoc(thing) or "").split("\n\n", maxsplit=1)[0].split())
        found[f"teraio.{name}{shape}"] = re.split(r"(?<=\.) (?=[A-Z`])", told, maxsplit=1)[0]
    return found


def _format_parameters(function: object) -> str:
    """Names and defaults, without types."""
    assert callable(function)
    told = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            told.append("*")
        star = "*" * (parameter.kind is parameter.VAR_POSITIONAL)
        star += "**" * (parameter.kind is parameter.VAR_KEYWORD)
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        told.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(told)})"
