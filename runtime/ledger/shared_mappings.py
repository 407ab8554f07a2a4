"""Memory of this process that others may write, as the system tells."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import torch


def shared_mappings() -> list[tuple[int, int]] | None:
    """(begin, end) of the memory that other processes may write and see written, ascending; None: the system
    does not tell."""
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
    if mappings is None:
        return storage.is_shared()
    begin = storage.data_ptr()
    at = bisect_right(mappings, (begin + storage.nbytes() - 1, 2**64)) - 1
    return at >= 0 and mappings[at][1] > begin
