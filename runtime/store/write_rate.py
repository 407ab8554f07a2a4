"""The limit of a store's long-term write rate, in bytes per day. A burst may have at most the bytes of one
hour.

level           the bytes that may be written now; the level is full at the start and rises with time
a write         waits until the level is at least the write's size, and then lowers the level by its size
a large write   is larger than the full level; it waits until the level is full, and makes it negative
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from teraio.units import fmt_bytes, fmt_ns

log = logging.getLogger("teraio")

DAY_S, AT_ONCE_S = 86_400, 3_600


class WriteRate:
    """A token bucket. Its level is the number of bytes that may be written now."""

    def __init__(
        self,
        per_day_bytes: int,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.per_day_bytes = per_day_bytes
        self.rate = per_day_bytes / DAY_S
        self.full_bytes = self.rate * AT_ONCE_S
        self.level_bytes = self.full_bytes
        self._now, self._sleep = now, sleep
        self._refilled_s = now()
        self._warned_s = 0.0  # the total waiting time that the last warning reported
        self.waited_s = 0.0

    def wait_until_allowed(self, size_bytes: int) -> None:
        """Block until `size_bytes` may be written."""
        self._refill_level()
        wanted = min(size_bytes, self.full_bytes)
        while (missing := wanted - self.level_bytes) >= 1:
            wait_s = missing / self.rate
            self._warn_of_waiting(wait_s)
            self._sleep(wait_s)
            self.waited_s += wait_s
            self._refill_level()
        self.level_bytes -= size_bytes

    def _refill_level(self) -> None:
        now = self._now()
        self.level_bytes = min(self.full_bytes, self.level_bytes + (now - self._refilled_s) * self.rate)
        self._refilled_s = now

    def _warn_of_waiting(self, wait_s: float) -> None:
        """Warn at the first wait, and whenever the total waiting time has doubled."""
        if self.waited_s + wait_s > 2 * self._warned_s:
            self._warned_s = self.waited_s + wait_s
            log.warning(
                "teraio: max_write_per_day: %s per day are used up, writes wait (%s so far). More memory "
                "means fewer writes",
                fmt_bytes(self.per_day_bytes),
                fmt_ns(int(self._warned_s * 1e9)),
            )
