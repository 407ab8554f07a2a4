"""The option `keep`: names of tensors that are always resident."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

UNOBSERVED = "no observer sees who reads it"
LISTED = "the option 'keep' names it"


class KeepOption:
    """The patterns of names in the option `keep`, and the patterns that have matched a tensor."""

    def __init__(self, globs: Sequence[str] = (), unobserved: bool = False) -> None:
        self.globs = globs
        # True: no observer detects reads by user code, so every tensor that user code can read is kept
        # resident.
        self.unobserved = unobserved
        self.found: set[str] = set()  # patterns that have matched a tensor

    @property
    def reason(self) -> str:
        """Return the reason why tensors are kept resident for which `covers` returns True."""
        return UNOBSERVED if self.unobserved else LISTED

    def covers(self, name: str) -> bool:
        """Return whether a tensor of this name must be resident whenever user code can read it."""
        return self.unobserved or self.lists(name)

    def lists(self, name: str) -> bool:
        """Return whether a pattern of the option `keep` matches this name."""
        found = {glob for glob in self.globs if fnmatchcase(name, glob)}
        self.found |= found
        return bool(found)
