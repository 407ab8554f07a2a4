"""Memory ranges of this process that other processes may write to, from the system's list in
/proc/self/maps."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import torch


def shared_mappings() -> list[tuple[int, int]] | None:
    """Return (begin, end) of each writable memory range that this process shares with other processes, in
    ascending order. Other processes may write to these ranges.

    Return None if the system does not have /proc/self/maps.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split(None, 2)[:2] for line in lines]
    return sorted(
        (int(begin, 16), int(end, 16))
        for span, rights in fields
        for begin, _, end in [span.partition("-")]
        if rights[1] == "w" and rights[3] == "s"
    )


def is_shared(storage: torch.UntypedStorage, mappings: list[tuple[int, int]] | None) -> bool:
    """Return whether other processes may write to the storage's memory. `mappings` is the result of
    `shared_mappings`."""
    if mappings is None:
        return storage.is_shared()
    begin = storage.data_ptr()
    at = bisect_right(mappings, (begin + storage.nbytes() - 1, 2**64)) - 1
    return at >= 0 and mappings[at][1] > begin
