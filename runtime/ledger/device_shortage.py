"""Fetches on a device that has less memory than the budget: something else took it, or it is in pieces.

a fetch ahead    is put off: a plan is a hint
a demanded one   evicts all that may leave, and is begun once more; then the error is the program's
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from teraio.units import fmt_bytes

from ..device.device import OUT_OF_MEMORY
from .mover import Mover
from .record import Record

log = logging.getLogger("teraio")

Stays = Callable[[Record], bool]


class DeviceShortage:
    """Fetches that the device may have no memory for."""

    def __init__(self, mover: Mover, evict_all: Callable[[Stays | None], object]) -> None:
        self.mover = mover
        self.evict_all = evict_all  # except what stays
        self.said = False

    def begin_fetch_making_room(self, record: Record, stays: Stays | None, demand: bool = False) -> None:
        """Begin to fetch it, if need be after all has left that may, except what `stays`."""
        try:
            self.mover.begin_fetch(record, demand=demand)
        except OUT_OF_MEMORY as error:
            self._warn_of_shortage_once(record, error)
            self.evict_all(stays)
            self.mover.begin_fetch(record, demand=demand)

    def begin_fetch_if_memory(self, record: Record) -> bool:
        """Begin to fetch it ahead of its use; return False if the device has no memory for it now."""
        try:
            self.mover.begin_fetch(record)
        except OUT_OF_MEMORY as error:
            self._warn_of_shortage_once(record, error)
            return False
        return True

    def _warn_of_shortage_once(self, record: Record, error: BaseException) -> None:
        error.with_traceback(None)  # whose frames would keep a program's tensors
        if not self.said:
            self.said = True
            log.warning(
                "teraio: the device has no memory for %s (%s), although no more than %s of the budget are in "
                "use: something beside teraio takes it. A smaller memory= leaves more for that. Meanwhile "
                "fetches ahead wait, and others leave where one is needed at once",
                record.name,
                fmt_bytes(record.size_bytes),
                fmt_bytes(self.mover.resident_bytes, up=True),
            )
