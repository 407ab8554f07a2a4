"""The memory maps of this process, read from /proc."""

from __future__ import annotations

from pathlib import Path


def rights(address: int) -> str:
    """Return the permissions of the mapping at an address, such as `rw-p`. Return an empty string if nothing
    is mapped there.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, found = line.split()[:2]
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin <= address < end:
            return found
    return ""
