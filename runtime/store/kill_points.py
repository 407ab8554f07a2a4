"""The points of a store's life at which tests kill the process. No kill may leave bytes on the disk."""

from __future__ import annotations

POINTS = (
    "made", "locked", "created", "unlinked", "removed", "growing", "grown", "submitted", "closing",
)  # fmt: skip


def reach(point: str) -> None:
    """Do nothing at one of POINTS. Tests replace this function by a function that kills the process."""
