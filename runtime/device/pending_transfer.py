"""A transfer between its beginning and its end, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class Ticket(Protocol):
    """A pending transfer."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Returns when nothing is left that the host must wait for; raises what went wrong."""
        ...


@runtime_checkable
class StreamTicket(Ticket, Protocol):
    """A ticket whose `wait` returns when the copy has been issued; what follows waits for `event`."""

    event: Any


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on the compute stream, behind all kernels given so far. `handle` is what native code knows the
    event by; 0 where there is none. Whoever holds the mark keeps the event alive."""

    event: Any = None
    handle: int = 0


Start = Callable[[Any, Mark], Ticket]
"""Issues a copy of this storage that waits for this mark. For example
`lambda storage, mark: store.write(extent, storage.data_ptr(), name, event=mark.handle)`."""


@dataclass(slots=True)
class Pending:
    """A transfer between begin and end. Holds what the copy uses: the storage and the mark's event."""

    storage: Any
    ticket: Ticket
    mark: Mark
    block: Any = None  # where the bytes arrive, if that is not the storage itself

    def done(self) -> bool:
        return self.ticket.done()
