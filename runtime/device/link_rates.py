"""LinkRates: what the way between the device and one other tier carries, in both directions, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARE_THRESHOLD = 0.85  # both at once carry less of the sum than this: they share (noise is about 10 %)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """One pair of tiers, both ways. `both_*`: with evictions and fetches running at once."""

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
        """Whether the two directions take from each other, clearly."""
        return self.together_bytes_per_s < SHARE_THRESHOLD * (self.evict_bytes_per_s + self.fetch_bytes_per_s)

    @property
    def shared_bytes_per_s(self) -> int:
        """What they have in common: never less than one of them carries alone."""
        return max(self.together_bytes_per_s, self.evict_bytes_per_s, self.fetch_bytes_per_s)


def link_of_drives(links: Sequence[LinkRates]) -> LinkRates:
    """Drives that every tensor is striped over: they carry what they carry together, and the slowest ends
    it."""
    return LinkRates(
        links[0].tier,
        sum(link.evict_bytes_per_s for link in links),
        sum(link.fetch_bytes_per_s for link in links),
        sum(link.both_evict_bytes_per_s for link in links),
        sum(link.both_fetch_bytes_per_s for link in links),
        max(link.evict_latency_ns for link in links),
        max(link.fetch_latency_ns for link in links),
    )
