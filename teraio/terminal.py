"""Terminals: width, colours, and bars of other libraries on the same terminal. In: a stream. Out: text.

Text for a pipe, a file or a CI log is plain, so that programs can compare it. A terminal shows colours unless
TERM is dumb. Two variables change this: NO_COLOR turns colours off, and FORCE_COLOR turns them on, even in a
pipe. NO_COLOR wins.

The colours are the 16 colours that each terminal's theme defines, so they are readable on light and on dark.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

WIDTH_MIN = 40  # fewest columns that text is fitted to
CODES = {
    "bold": "1",
    "quiet": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "grey": "90",
}


@dataclass(frozen=True, slots=True)
class Terminal:
    """The abilities of a stream. `width` is its number of columns, or 0 if the stream is no terminal."""

    width: int = 0
    colours: bool = False

    def paint(self, text: str, *styles: str, block: bool = False) -> str:
        """Return the text in the given styles, or unchanged without colours. A block has the colour as its
        background.
        """
        if not self.colours or not text:
            return text
        codes = ";".join([CODES[style] for style in styles] + ["7"] * block)
        return f"\033[{codes}m{text}\033[0m"

    def fold(self, text: str, indent: str = "  ") -> str:
        """Break a sentence into lines that fit. Without a terminal, return one line."""
        if not self.width:
            return f"{indent}{text}"
        return textwrap.fill(text, self.width - 1, initial_indent=indent, subsequent_indent=indent)


PLAIN = Terminal()


def terminal_of(stream: TextIO | None) -> Terminal:
    """Return the abilities of a stream. Output in CI is plain, even if CI has a terminal."""
    is_terminal = can_overwrite_line(stream)
    forced = os.environ.get("FORCE_COLOR", "") not in ("", "0")
    colours = (is_terminal or forced) and not os.environ.get("NO_COLOR")
    return Terminal(_columns_of(stream) if is_terminal and stream is not None else 0, colours)


def can_overwrite_line(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal on which a line can be erased and written again."""
    if os.environ.get("TERM") == "dumb" or os.environ.get("CI"):
        return False
    # While rich shows a bar, its stream prints whole lines above the bar.
    if stream is None or hasattr(stream, "rich_proxied_file"):
        return False
    with suppress(ValueError):  # the stream is closed
        return stream.isatty()
    return False


def _columns_of(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(int(columns), WIDTH_MIN)
    with suppress(OSError, ValueError):
        return max(os.get_terminal_size(stream.fileno()).columns or 80, WIDTH_MIN)  # 0 means unknown
    return 80


def _bar_class() -> Any:
    """Return tqdm's class of bars if the user's program has imported tqdm, or None."""
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def has_bars(stream: TextIO | None) -> bool:
    """Return True if tqdm shows a bar on the terminal of this stream."""
    with suppress(Exception):  # another thread closes a bar, or this version of tqdm differs
        bars = list(getattr(_bar_class(), "_instances", ()))
        return any(bar.fp == each for bar in bars for each in (stream, sys.stdout, sys.stderr))
    return False


@contextmanager
def bars_cleared(stream: TextIO | None) -> Iterator[None]:
    """Clear tqdm's bars while the block writes lines, and show the bars below these lines.

    This takes no lock of tqdm. A thread that holds the lock may wait for the writer of the line, so both
    would wait forever.
    """
    bars = _bar_class()
    with ExitStack() as stack:
        if bars is not None and has_bars(stream):
            with suppress(Exception):  # another thread closes a bar, or this version of tqdm differs
                stack.enter_context(bars.external_write_mode(file=stream, nolock=True))
        yield
