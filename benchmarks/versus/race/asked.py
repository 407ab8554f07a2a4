"""The command line that all races share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from race.models import SUBJECTS
from race.pairs import PAIRS_LEAST
from race.result import RESULTS


def command_line(description: str | None, output: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a race. `description` is the script's docstring; `names` are the default
    models.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "subjects", nargs="*", default=names, metavar="model", help=f"one of {', '.join(SUBJECTS)}"
    )
    parser.add_argument("--pairs", type=two_or_more, default=PAIRS_LEAST)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", default=str(RESULTS / f"{output}.json"))
    return parser


def add_part(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", type=float, default=0.4, help="teraio's budget, as a share of the plain peak"
    )


def two_or_more(text: str) -> int:
    """Parse the number of pairs. Refuse fewer than two, because one pair has no spread."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number} is too few: the spread of a ratio needs 2 pairs or more")
    return number
