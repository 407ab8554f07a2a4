"""The command line. Every error is one line that ends with the remedy; exit code 2 for bad input.

`teraio.cli.commands` has the commands that plan offline; demo and doctor are their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from teraio import __version__
from teraio.cli import demo, doctor
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
weights, gradients, optimizer states and activations within one budget. These commands look at a machine, plan
offline, and show what a run did."""

EPILOG = """\
Each command has examples: teraio COMMAND --help. Options of the backend are environment variables, too:
TERAIO_MEMORY=20GiB. TERAIO_LOG=debug|info|warning|error|off says how much a run tells.

exit codes: 0 done, 1 it cannot be done (the line says what would do), 2 bad input"""


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...


# In the order in which a person meets them.
COMMANDS: tuple[tuple[str, Command, str], ...] = (
    ("demo", demo, "train a small Llama plainly and within a third of its memory"),
    ("doctor", doctor, "what this machine can do, what stands in the way, and the fix"),
    ("profile", profile, "profiles of well-known models, for planning offline"),
    ("machine", machine, "machines that come with teraio, for planning offline"),
    ("plan", plan, "make a plan from a saved profile, for a machine one may not own"),
    ("simulate", simulate, "predict the step of a plan and write its timeline"),
    ("explain", explain, "why a step takes as long as it does, and what would make it faster"),
    ("report", report, "show what happened in a step: a page, lines for a terminal, a trace"),
    ("fit", fit, "how little memory a step needs, how large a step a machine takes"),
    ("cache", cache, "list or clear the plans that runs keep for later runs"),
    ("store", store, "list or clear what dead processes left in a store"),
    ("options", options, "every option, environment variable and public name, with its meaning"),
    ("completion", completion, "print a script that makes a shell complete our command lines"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _make_parser().parse_args(arguments)
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
    except BrokenPipeError:  # `| head` has seen enough; nor is there anyone to flush the rest to
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
    for name, module, told in COMMANDS:
        command = commands.add_parser(name, help=told, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.set_defaults(run=getattr(module, "main", None))
        module.add_arguments(command)
    return whole
