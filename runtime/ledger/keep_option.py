"""Names that the option `keep` lists: tensors that are always resident."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

UNOBSERVED = "no observer sees who reads it"
LISTED = "the option 'keep' names it"


class KeepOption:
    """The name globs of the option `keep`, and the globs that have matched a tensor."""

    def __init__(self, globs: Sequence[str] = (), unobserved: bool = False) -> None:
        self.globs = globs
        # True: every tensor that user code can reach is kept resident, because no observer sees reads.
        self.unobserved = unobserved
        self.found: set[str] = set()  # globs that have matched a tensor

    @property
    def reason(self) -> str:
        """Return the reason why `covers` keeps tensors resident."""
        return UNOBSERVED if self.unobserved else LISTED

    def covers(self, name: str) -> bool:
        """Return whether a tensor of this name is kept resident whenever user code can reach it."""
        return self.unobserved or self.lists(name)

    def lists(self, name: str) -> bool:
        """Return whether the option `keep` names this tensor."""
        found = {glob for glob in self.globs if fnmatchcase(name, glob)}
        self.found |= found
        return bool(found)
