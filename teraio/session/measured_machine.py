"""The description of this machine as planners need it, made from the measured links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from teraio.formats.machine import Link, Machine, Tier
from teraio.runtime.device import limits
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.store.drive_health import size_of_drives


def machine_from_links(
    name: str,
    links: Sequence[LinkRates],
    device_bytes: int,
    ssd_bytes: int,
    host_bytes: int | None = None,
    directories: Sequence[Path] = (),
) -> Machine:
    """Return the machine: the device, and each tier to which a link was measured.

    `ssd_bytes` is the room of the store, and `directories` are its directories.
    `host_bytes` is the capacity of host memory for evicted tensors. If it is None, the capacity is all memory
    that this process can obtain.
    """
    capacities = {
        "ssd": ssd_bytes,
        "host": limits.read_memory_limits().obtainable_bytes if host_bytes is None else host_bytes,
    }
    tiers = [Tier("device", device_bytes)]
    drive_bytes = size_of_drives(directories) or None
    for link in links:
        tiers.append(Tier(link.tier, capacities[link.tier], drive_bytes if link.tier == "ssd" else None))
    directed: list[Link] = []
    shared: list[tuple[str, int]] = []
    for link in links:
        shares = f"device_{link.tier}" if link.is_shared_by_directions else None
        if shares:
            shared.append((shares, link.shared_bytes_per_s))
        directed.append(Link("device", link.tier, link.evict_bytes_per_s, link.evict_latency_ns, shares))
        directed.append(Link(link.tier, "device", link.fetch_bytes_per_s, link.fetch_latency_ns, shares))
    return Machine(name, tuple(tiers), tuple(directed), tuple(shared))
