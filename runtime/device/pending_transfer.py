"""A pending transfer, its ticket, and the mark that the transfer waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class Ticket(Protocol):
    """The host's view of a transfer."""

    def done(self) -> bool:
        """Return True if `wait` would return without blocking."""
        ...

    def wait(self) -> None:
        """Block until the bytes have arrived. In a StreamTicket, block only until the copy is issued.

        Raise the transfer's error if the transfer failed.
        """
        ...


@runtime_checkable
class StreamTicket(Ticket, Protocol):
    """A ticket of a copy on a stream.

    `wait` returns as soon as the copy is issued. Work that needs the bytes waits for `event`.
    """

    event: Any


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on the compute stream, after all kernels launched so far.

    `handle` is the native handle of the event at this point, or 0 without an event. The mark keeps the event
    alive.
    """

    event: Any = None
    handle: int = 0


Start = Callable[[Any, Mark], Ticket]
"""A function that issues a copy of the storage, ordered after the mark. For example
`lambda storage, mark: store.write(extent, storage.data_ptr(), name, event=mark.handle)`."""


@dataclass(slots=True)
class Pending:
    """A transfer between its begin and its end. `Pending` keeps the storage and the mark's event alive."""

    storage: Any
    ticket: Ticket
    mark: Mark
    block: Any = None  # the target of a copy in; None for a copy out

    def done(self) -> bool:
        return self.ticket.done()
