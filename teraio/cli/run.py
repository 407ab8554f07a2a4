"""`teraio run`: runs an unchanged training script. teraio compiles the models that the script trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from teraio.launch.program import replace_process
from teraio.options import Settings, add_flags

DESCRIPTION = """\
Runs a training script unchanged. Each model that an optimizer trains is compiled with backend="teraio" at
its first call with gradients, and the script's own torch.compile calls get this backend, too. This process
becomes the script's: its arguments, standard streams, signals and exit code are as without teraio. Models of
child processes are compiled, too, for example with torchrun.

The flags are the options of the backend, and come before the script. `teraio options` explains them."""

EPILOG = """\
examples:
  teraio run --memory 20GiB train.py --epochs 3
  teraio run --memory 20GiB -m package.train --config big.yaml
  teraio run --memory 8GiB torchrun --nproc-per-node 2 train.py
  TERAIO_DISABLE=1 teraio run train.py        the same programs without a budget, with the same bits

A model that is larger than the device needs two lines in the script: docs/cookbook.md explains teraio.init.

exit code: the script's own, or 2 for bad input of `teraio run` itself"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.usage = "teraio run [flags] SCRIPT [ARG ...] | -m MODULE [ARG ...] | PROGRAM [ARG ...]"
    add_flags(parser, [option.name for option in fields(Settings)])


def main(args: argparse.Namespace) -> int:
    replace_process(args.command, args)


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into words for the parser, and the command of `teraio run`.

    The command begins at the first word that is neither a flag nor the value of a flag. All words from there
    on belong to the script, also those that look like flags of teraio.
    """
    if not words or words[0] != "run":
        return list(words), []
    at = 1
    while at < len(words):
        word = words[at]
        if word == "--":
            return list(words[:at]), list(words[at + 1 :])
        if not word.startswith("-") or word in ("-", "-m"):
            return list(words[:at]), list(words[at:])
        at += 1 if "=" in word or word in ("-h", "--help") else 2
    return list(words), []
