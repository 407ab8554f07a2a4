"""The parser of our command lines. An error about a mistyped word suggests the nearest known word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from teraio.formats.fields import suggest_nearest_name
from teraio.units import printable_line


class SuggestingParser(argparse.ArgumentParser):
    """An argparse parser whose errors name the nearest command, flag or word. Subparsers have this class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown_flags(words)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Refuse a mistyped flag before argparse reports the intended flag as missing.

        `--machin` is accepted, because argparse completes it to `--machine`. `--mahcine` is refused.
        """
        above = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        known = list(self._option_string_actions)
        for word in words:
            if word == "--" or (above and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            if not name.startswith("--") or " " in word or any(flag.startswith(name) for flag in known):
                continue
            self.error(f"there is no flag {printable_line(name)}{suggest_nearest_name(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action,
            f"'{printable_line(value)}' is unknown{suggest_nearest_name(value, names)}; there are "
            f"{', '.join(names)}",
        )
