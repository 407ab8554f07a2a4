"""The entry point of the command line: builds the parser and runs one command.

`main` prints an error as one line, which ends with the remedy. The exit code for bad input is 2. The commands
that plan without training are in `teraio.cli.commands`. The commands `demo`, `run` and `doctor` are in this
folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from teraio import __version__
from teraio.cli import demo, doctor, run
from teraio.cli.commands import (
    cache,
    completion,
    explain,
    fit,
    machine,
    options,
    plan,
    profile,
    report,
    simulate,
    store,
)
from teraio.cli.commands.parser import SuggestingParser
from teraio.errors import FileFormatError, OptionError, TeraioError

DESCRIPTION = """\
Train models that do not fit: torch.compile(model, backend="teraio", options={"memory": "20GiB"}) keeps
weights, gradients, optimizer states and activations within one budget. These commands check a machine, plan
offline, and show what a run did."""

EPILOG = """\
Each command has examples: teraio COMMAND --help. Options of the backend are environment variables, too:
TERAIO_MEMORY=20GiB. TERAIO_LOG=debug|info|warning|error|off sets how much a run logs.

exit codes: 0 done, 1 not possible (the line ends with a remedy), 2 bad input"""


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...


# The commands. A new user needs them in about this order.
COMMANDS: tuple[tuple[str, Command, str], ...] = (
    ("demo", demo, "train a small Llama without a budget, then within a third of its memory"),
    ("run", run, "run a training script unchanged, with its models compiled by teraio"),
    ("doctor", doctor, "check this machine, measure its links, and print a fix for each problem"),
    ("profile", profile, "list, show and make profiles, for planning offline"),
    ("machine", machine, "list the machines that come with teraio, for planning offline"),
    ("plan", plan, "make a plan from a saved profile, for any machine"),
    ("simulate", simulate, "predict the step of a plan and write its timeline"),
    ("explain", explain, "list what a step waits for, and predict what would make it faster"),
    ("report", report, "show one step as a page, as text or as a trace"),
    ("fit", fit, "find the smallest memory for a step, or the largest step for a machine"),
    ("cache", cache, "list or clear the plans that runs keep for later runs"),
    ("store", store, "list or clear the directories that dead processes left in a store"),
    ("options", options, "print every option, environment variable and public name"),
    ("completion", completion, "print a script that completes command lines in a shell"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    words, command = run.split_command(sys.argv[1:] if arguments is None else arguments)
    args = _make_parser().parse_args(words, argparse.Namespace(command=command))
    try:
        return int(args.run(args))
    except (FileFormatError, OptionError) as error:
        print(f"teraio: {error}", file=sys.stderr)
        return 2
    except TeraioError as error:
        print(f"teraio: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has closed the pipe; the flush at exit would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _make_parser() -> argparse.ArgumentParser:
    whole = SuggestingParser(
        prog="teraio",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"teraio {__version__}")
    whole.set_defaults(whole=whole)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for name, module, help_text in COMMANDS:
        command = commands.add_parser(
            name, help=help_text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(run=getattr(module, "main", None))
        module.add_arguments(command)
    return whole
