"""Addresses of this process, as the system maps them."""

from __future__ import annotations

from pathlib import Path


def rights(address: int) -> str:
    """Return what may be done there, as in `rw-p`; nothing where nothing is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, found = line.split()[:2]
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin <= address < end:
            return found
    return ""
