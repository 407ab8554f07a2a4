"""The parser of our command lines. An error about a mistyped word suggests the known word that is most
similar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from teraio.formats.fields import suggest_nearest_name
from teraio.units import printable_line


class SuggestingParser(argparse.ArgumentParser):
    """An argparse parser whose errors suggest the most similar known word. The parsers of subcommands also
    have this class.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown_flags(words)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Refuse an unknown flag before argparse complains that a required flag is missing.

        For example, `--mahcine` is refused as unknown. `--machin` is accepted, because argparse completes it
        to `--machine`.
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
