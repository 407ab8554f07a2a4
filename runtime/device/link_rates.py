"""LinkRates: the measured rates of the link between the device and one other tier, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# If both directions run together, their rates may add up to less than the two rates of single directions. The
# directions share bandwidth if the sum is below this fraction. A measured rate varies by 10 % from run to
# run.
SHARE_THRESHOLD = 0.85


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The measured rates of the link between the device and the tier `tier`. The `both_*` rates were measured
    while evictions and fetches ran at the same time."""

    tier: str
    evict_bytes_per_s: int
    fetch_bytes_per_s: int
    both_evict_bytes_per_s: int
    both_fetch_bytes_per_s: int
    evict_latency_ns: int
    fetch_latency_ns: int

    @property
    def together_bytes_per_s(self) -> int:
        return self.both_evict_bytes_per_s + self.both_fetch_bytes_per_s

    @property
    def is_shared_by_directions(self) -> bool:
        """Return True if evictions and fetches slow each other down, by more than measurements vary."""
        return self.together_bytes_per_s < SHARE_THRESHOLD * (self.evict_bytes_per_s + self.fetch_bytes_per_s)

    @property
    def shared_bytes_per_s(self) -> int:
        """Return the largest of three rates: both directions together, evictions alone, fetches alone."""
        return max(self.together_bytes_per_s, self.evict_bytes_per_s, self.fetch_bytes_per_s)


def link_of_drives(links: Sequence[LinkRates]) -> LinkRates:
    """Return the rates of several drives that store tensors in stripes, as one link.

    A rate is the sum of all drives' rates. A latency is the largest latency of all drives.
    """
    return LinkRates(
        links[0].tier,
        sum(link.evict_bytes_per_s for link in links),
        sum(link.fetch_bytes_per_s for link in links),
        sum(link.both_evict_bytes_per_s for link in links),
        sum(link.both_fetch_bytes_per_s for link in links),
        max(link.evict_latency_ns for link in links),
        max(link.fetch_latency_ns for link in links),
    )
