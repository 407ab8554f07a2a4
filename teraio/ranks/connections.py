"""Connections of this process to the server of a key-value store. A store that reads from a closed connection
prints a warning with a stack, so the connection is checked before."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Made = TypeVar("Made")

CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


def make_with_connections(make: Callable[[], Made]) -> tuple[Made, list[int]]:
    """Call the function. Return its result, and the descriptors of the sockets that it has opened."""
    before = _sockets()
    made = make()
    return made, sorted(_sockets() - before)


def is_any_closed(descriptors: list[int]) -> bool:
    """Return whether the other side has closed one of these connections."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    return any(event & CLOSED for _, event in poll.poll(0))


def _sockets() -> set[int]:
    """Return the descriptors of this process's sockets, or an empty set if the system does not list them."""
    found: set[int] = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # a descriptor that was closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.add(int(name))
    return found
