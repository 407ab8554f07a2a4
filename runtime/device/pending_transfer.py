"""Transfers in flight. Pending is a transfer, and Ticket is the object with which the host waits for it. Mark
is the point on the compute stream for which the transfer waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class Ticket(Protocol):
    """A transfer, with which the host can check and await the transfer's end."""

    def done(self) -> bool:
        """Return True if `wait` would return without blocking."""
        ...

    def wait(self) -> None:
        """Block until the bytes have arrived. For a StreamTicket, block only until the copy is issued.

        Raise the transfer's error if the transfer failed.
        """
        ...


@runtime_checkable
class StreamTicket(Ticket, Protocol):
    """A ticket of a copy on a stream.

    The host's `wait` returns as soon as the copy is issued. Kernels that need the bytes must wait for
    `event`.
    """

    event: Any


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on the compute stream, after all kernels launched before the mark was made.

    `event` is the CUDA event at this point, and `handle` is its native handle. Without streams, `event` is
    None and `handle` is 0. The mark keeps the event alive.
    """

    event: Any = None
    handle: int = 0


Start = Callable[[Any, Mark], Ticket]
"""A function that issues a copy of the storage, ordered after the mark. For example
`lambda storage, mark: store.write(extent, storage.data_ptr(), name, event=mark.handle)`."""


@dataclass(slots=True)
class Pending:
    """A transfer in flight. It keeps the storage and the mark's event alive."""

    storage: Any
    ticket: Ticket
    mark: Mark
    block: Any = None  # for a fetch: the new memory; for an eviction: None

    def done(self) -> bool:
        return self.ticket.done()
