"""The program that `teraio run` starts, and the environment that the program gets.

    train.py ARG...           a script, a folder or an archive with __main__.py: this Python runs it
    -m MODULE ARG...          a module: this Python runs it
    torchrun ARG...           any other program in PATH; its Python processes get the environment

The options are in the environment, as `TERAIO_MEMORY` and so on, so that child processes get them, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from teraio.errors import OptionError
from teraio.options import Settings, env_name
from teraio.units import printable_line

# In the environment of a run: the prefix of the Python that runs the script.
VARIABLE = "TERAIO_RUN"
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"


def replace_process(command: Sequence[str], flags: argparse.Namespace) -> NoReturn:
    """Replace this process with the program. The program gets the options as environment variables."""
    program = find_program(command)
    environment = run_environment(flags, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these signals. The program expects the system's default, and Python ignores them again.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program[0], program, environment)
    except OSError as error:
        raise OptionError(
            f"{printable_line(command[0])}: the system cannot run it: {error.strerror}"
        ) from None


def find_program(command: Sequence[str]) -> list[str]:
    """Return the path of the program to start, and its arguments."""
    if not command:
        raise OptionError("the script is missing. Example: teraio run --memory 20GiB train.py --epochs 3")
    first = command[0]
    if first == "-m":
        if len(command) == 1:
            raise OptionError("-m: the name of the module is missing. Example: teraio run -m package.train")
        return [*_interpreter(), *command]
    if first.startswith("-") and first != "-":
        raise OptionError(f"{printable_line(first)} is no flag of teraio run; teraio run --help lists them")
    if first == "-":
        raise OptionError("-: a script from standard input cannot be run; save it in a file first")
    if os.path.exists(first) and (first.endswith((".py", ".pyz", ".zip")) or not _is_executable_file(first)):
        return [*_interpreter(), *command]
    if not first.endswith(".py") and (found := shutil.which(first)) is not None:
        return [found, *command[1:]]
    raise OptionError(
        f"{printable_line(first)}: there is no such file in {os.getcwd()}"
        + ("" if first.endswith(".py") or os.sep in first else ", and no such program in PATH")
        + ". Give the path of the training script"
    )


def _is_executable_file(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _interpreter() -> list[str]:
    """Return this Python with its flags, such as -u or -X dev."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise OptionError(
            "this Python was started with -E, -I or -S, so it ignores PYTHONPATH or sitecustomize, which "
            "`teraio run` needs. Start it without this flag"
        )
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def run_environment(flags: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the program: `environ`, the options in `flags`, and the bootstrap folder.

    A flag has priority over its variable. The flags and variables must be valid.
    """
    environment = dict(environ)
    for option in fields(Settings):
        value = getattr(flags, option.name, None)
        if value is not None:
            environment[env_name(option.name)] = ",".join(value) if isinstance(value, list) else value
    Settings.parse({}, environment)
    before = environ.get("PYTHONPATH", "")
    if before.partition(os.pathsep)[0] != str(BOOTSTRAP):  # else this is a run inside a run
        environment["PYTHONPATH"] = f"{BOOTSTRAP}{os.pathsep}{before}" if before else str(BOOTSTRAP)
    environment[VARIABLE] = sys.prefix
    return environment
