"""`teraio options`: every option, environment variable and public name, taken from the code itself.

docs/options.md is the output of this command.
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
Prints Markdown: every key of `options` with its environment variable, flag and default, every other
environment variable, and every public name of the package. docs/options.md is this output."""

EPILOG = """\
examples:
  teraio options
  teraio options --json"""

HEAD = """\
# Options, variables, names

This page is the output of `teraio options`. A test compares the two.

## Options

Each option is a key of `options` and an environment variable. Some are also flags of commands. A key
overrides the environment variable, and the variable overrides the default. Sizes are bytes, or text with a
unit: `20GiB` is 20 * 2**30, and `20GB` is 20 * 10**9. A bare `G` is refused. Durations are seconds, or text:
`30s`, `1.5 ms`, `2min`. An unknown key or a malformed value raises an `OptionError`. Its message names the
option, the given value and the accepted ones.

"""

FLAGS_HEAD = """
Some commands take the flags of options:

"""

VARIABLES_HEAD = """
## Other environment variables

| variable | meaning |
|---|---|
"""

VARIABLES_FOOT = """
Any other variable that begins with `TERAIO_` has no effect, and a warning names it. `TORCH_LOGS=teraio` and
logging handlers of your own override `TERAIO_LOG`. `TORCH_TRACE` receives profile, plan and timeline as
artifacts.

## Public names

"""

FOOT = """
[The cookbook](cookbook.md) shows these names in use. [Reports](reports.md#for-loggers) explains the keys of
`Stats`.
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
    flags = "".join(map(_markdown_item, _describe_commands_taking_flags(whole)))
    tables = f"{options_table()}{FLAGS_HEAD}{flags}{VARIABLES_HEAD}{variables}"
    return f"{HEAD}{tables}{VARIABLES_FOOT}{names}{FOOT}"


def _markdown_item(text: str) -> str:
    return f"- {_wrap_lines(text, indent='  ')}\n"


def _wrap_lines(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _describe_commands_taking_flags(whole: argparse.ArgumentParser) -> list[str]:
    """List, for each option that is a flag of some command, the flag and these commands, as in `--keep`:
    plan, fit.
    """
    levels = list(completion.completions_of_commands(whole))
    takers = {
        flag_name(f.name): [
            level.path[-1] for level in levels if any(flag_name(f.name) in flag.names for flag in level.flags)
        ]
        for f in fields(Settings)
    }
    return [f"`{flag}`: {', '.join(commands)}" for flag, commands in takers.items() if commands]


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
    parts = {"options": options, "variables": VARIABLES, "names": describe_public_names()}
    return json.dumps(parts, sort_keys=True) + "\n"


def describe_public_names() -> dict[str, str]:
    """Map each public name to the first sentence of its docstring. A function's name has its parameters, as
    in `teraio.reset()`.
    """
    found = {}
    for name in sorted(teraio.__all__, key=str.lower):
        thing = getattr(teraio, name)
        if isinstance(thing, str):
            found[f"teraio.{name}"] = "The version of this package."
            continue
        shape = "" if isinstance(thing, type) else _format_parameters(thing)
        paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n", maxsplit=1)[0].split())
        found[f"teraio.{name}{shape}"] = re.split(r"(?<=\.) (?=[A-Z`])", paragraph, maxsplit=1)[0]
    return found


def _format_parameters(function: object) -> str:
    """Format the parameters of a function with their defaults, without types."""
    assert callable(function)
    parts = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        star = "*" * (parameter.kind is parameter.VAR_POSITIONAL)
        star += "**" * (parameter.kind is parameter.VAR_KEYWORD)
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(parts)})"
