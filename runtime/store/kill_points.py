"""Points in the life of a store at which tests kill the process. After each such kill, no bytes of the store
may be on the disk."""

from __future__ import annotations

POINTS = (
    "made", "locked", "created", "unlinked", "removed", "growing", "grown", "submitted", "closing",
)  # fmt: skip


def reach(point: str) -> None:
    """Do nothing at one of POINTS. Tests replace this function by a function that kills the process."""
