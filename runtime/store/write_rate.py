"""How fast a store may write in the long run: so many bytes per day, an hour's worth of them at once.

level     full at the start, what a write takes is gone, time fills it again
a write   waits until there is as much as it takes; one that is larger than the hour's worth, until it is
          full, and leaves a debt
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from teraio.units import fmt_bytes, fmt_ns

log = logging.getLogger("teraio")

DAY_S, AT_ONCE_S = 86_400, 3_600


class WriteRate:
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
        self._seen_s = now()
        self._said_s = 0.0
        self.waited_s = 0.0

    def wait_until_allowed(self, size_bytes: int) -> None:
        """Returns when so many bytes may be written."""
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
        self.level_bytes = min(self.full_bytes, self.level_bytes + (now - self._seen_s) * self.rate)
        self._seen_s = now

    def _warn_of_waiting(self, wait_s: float) -> None:
        """At first, and each time the waiting has doubled."""
        if self.waited_s + wait_s > 2 * self._said_s:
            self._said_s = self.waited_s + wait_s
            log.warning(
                "teraio: max_write_per_day: %s per day are used up, writes wait (%s so far). More memory "
                "means fewer writes",
                fmt_bytes(self.per_day_bytes),
                fmt_ns(int(self._said_s * 1e9)),
            )
