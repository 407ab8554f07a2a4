"""The memory tiers of this process, and the measured rates of the links between them.

with a GPU   device <-> pinned host memory, device <-> SSD
on the CPU   device (which is RAM) <-> SSD
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import astuple
from fractions import Fraction
from functools import cache
from pathlib import Path

import torch

from teraio import _native
from teraio.errors import UnsupportedError
from teraio.formats.machine import Machine
from teraio.options import NULL_STORE, Memory, Settings
from teraio.ranks.host_share import Meeting, divided_among, shares_of_drives
from teraio.ranks.rank_store import local_ranks
from teraio.runtime.device import link_rates
from teraio.runtime.device.device import Device
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.store import link_probe
from teraio.runtime.store.store import Store
from teraio.session.host_shares import StoreShare, log_shares, obtainable_host_bytes
from teraio.session.measured_machine import machine_from_links
from teraio.units import fmt_bytes

log = logging.getLogger("teraio")

HOST_SHARE = Memory(percent=Fraction(50))  # at most half, because other processes cannot use pinned memory
LOOK_S = 0.1  # duration of one measurement of a link, in seconds


class Tiers:
    """The store, the host memory for evicted tensors, and the description of the machine.

    The constructor opens the store and measures the links.
    """

    def __init__(self, options: Settings, device: Device, budget_bytes: int) -> None:
        in_ram = device.kind == "cpu"
        log_shares(options, device.kind)
        share = StoreShare(options)
        self.store = Store.open(
            share.directories or None,
            share.size_bytes,
            checksums=options.checksum,
            memory_bytes=budget_bytes if in_ram else None,
            device=None if in_ram else device,
            on_fallback=options.on_fallback,
            write_per_day_bytes=options.max_write_per_day,
            **({"wrap": _make_memory_io} if options.store == (NULL_STORE,) else {}),
        )
        most = link_probe.memory_bytes_for_probe(budget_bytes)
        link, weights = measure_share_of_drives(self.store.directories, device, most, share.sharers)
        self.store.weigh_directories(weights)
        links = [link]
        self.host_bytes = host_limit_bytes(options)
        self.host = device.make_host_tier(self.host_bytes) if self.host_bytes else None
        if self.host is not None:
            carried = device.measure_host_link(self.host, LOOK_S, most)
            if isinstance(carried, str):
                self._go_without_host_memory(carried, options)
            else:
                links.append(carried)
        if self.host is None and options.optimizer_step == "host":
            self.store.close()
            raise UnsupportedError(
                "option 'optimizer_step' is 'host', and no host memory is used; give 'host_memory', or leave "
                "'optimizer_step' out"
            )
        device.forget_highest_counts()
        capacity = max(budget_bytes, device.capacity_bytes())
        self.machine: Machine = machine_from_links(
            "here", links, capacity, self.store.capacity_bytes, self.host_bytes if self.host else None
        )

    def _go_without_host_memory(self, reason: str, options: Settings) -> None:
        what = f"no host memory is used, so evicted tensors go to the SSD: {reason}"
        if options.on_fallback == "error":
            self.store.close()
            raise UnsupportedError(f"{what} (on_fallback is 'error')")
        log.warning("teraio: %s", what)
        self.host = None

    @property
    def places_text(self) -> str:
        """Return a description of the tiers, for a log line."""
        host = f"up to {fmt_bytes(self.host_bytes)} of host memory; " if self.host else ""
        return f"{host}store in {', '.join(map(str, self.store.directories))}"


def _make_memory_io(io: _native.Io) -> _native.Io:
    """Return an I/O object for a store that keeps evicted bytes in memory instead of on drives."""
    log.warning("teraio: the store is '%s': evicted bytes are kept in this process's memory", NULL_STORE)
    return _native.MemoryIo(size_bytes=2**62, depth=4)


def refuse_host_options_without_gpu(options: Settings, kind: str) -> None:
    if options.optimizer_step == "host" and kind in {"cpu", "meta"}:
        raise UnsupportedError(
            "option 'optimizer_step': 'host' is for a GPU; on the CPU, tensors are in host memory already. "
            "Leave 'optimizer_step' out"
        )
    if options.host_memory is not None and kind in {"cpu", "meta"}:
        raise UnsupportedError(
            "option 'host_memory' is for a GPU; on the CPU, tensors are in host memory, and 'memory' is "
            "their budget. Leave 'host_memory' out"
        )


def host_limit_bytes(options: Settings) -> int:
    """Return how many bytes of host memory may be pinned. A percentage refers to the memory that is available
    now.
    """
    return (options.host_memory or HOST_SHARE).resolve(obtainable_host_bytes(), 0)


def measure_drives(
    directories: Sequence[Path], device: Device, memory_bytes: int = link_probe.MEMORY_BYTES
) -> tuple[LinkRates, list[int]]:
    """Return a pair: the rates of the link to all drives together, and the rate of each directory.

    Directories on the same drive get equal parts of the drive's rate.
    """
    numbers = [os.stat(directory).st_dev for directory in directories]
    return _link_and_weights(numbers, _measure_links(numbers, directories, device, memory_bytes))


def measure_share_of_drives(
    directories: Sequence[Path], device: Device, memory_bytes: int, sharers: int
) -> tuple[LinkRates, list[int]]:
    """Return the same pair as `measure_drives`, for this rank's share of the drives.

    `sharers` is the number of ranks that use these drives. With several ranks on the host, all of them
    measure at once. If a rank does not come, this rank measures alone, and its share is a part of the rates.
    """
    if local_ranks() == 1:
        return measure_drives(directories, device, memory_bytes)
    numbers = [os.stat(directory).st_dev for directory in directories]
    if not all((number, device.device) in _SHARES for number in numbers):
        meeting = Meeting.of_host()
        together = meeting is not None and meeting.begin()
        if together:  # rates that this rank has measured alone are no shares
            for directory in directories:
                _KNOWN.pop((directory, device.device), None)
        links = _measure_links(numbers, directories, device, memory_bytes)
        own = {number: _numbers_of_link(link) for number, link in links.items()}
        published = meeting.exchange(own) if meeting is not None and together else None
        if published is None:
            _warn_of_measuring_alone(sharers)
        shares = divided_among(own, sharers) if published is None else shares_of_drives(own, published)
        for number, rates in shares.items():
            _SHARES[number, device.device] = LinkRates(links[number].tier, *rates)
    return _link_and_weights(numbers, {number: _SHARES[number, device.device] for number in numbers})


# The shares of drives that this process has measured, by the drive's number.
_SHARES: dict[tuple[int, torch.device], LinkRates] = {}


@cache
def _warn_of_measuring_alone(sharers: int) -> None:
    log.warning(
        "teraio: not all ranks of this host measured the drives together: this rank measured alone, and "
        "takes 1/%d of the measured rates as its share. Plans may be less good",
        sharers,
    )


def _numbers_of_link(link: LinkRates) -> tuple[int, ...]:
    return tuple(max(1, number) for number in astuple(link)[1:])


def _measure_links(
    numbers: Sequence[int], directories: Sequence[Path], device: Device, memory_bytes: int
) -> dict[int, LinkRates]:
    """Return the rates of each drive. `numbers` has the number of the drive for each directory."""
    return {
        number: _measure_link_once(directory, device, memory_bytes)
        for number, directory in zip(numbers, directories)
    }


def _link_and_weights(numbers: Sequence[int], links: dict[int, LinkRates]) -> tuple[LinkRates, list[int]]:
    rates = {n: link.evict_bytes_per_s + link.fetch_bytes_per_s for n, link in links.items()}
    return link_rates.link_of_drives(list(links.values())), [
        max(rates[n] // numbers.count(n), 1) for n in numbers
    ]


_KNOWN: dict[tuple[Path, torch.device], LinkRates] = {}  # each directory is measured once per process


def _measure_link_once(directory: Path, device: Device, memory_bytes: int) -> LinkRates:
    """Measure the rates of a directory, in about half a second. Later calls in this process return the first
    result.

    The measurement uses at most `memory_bytes` of the device's memory.
    """
    if (directory, device.device) not in _KNOWN:
        measured = link_probe.measure_store_link(
            directory, LOOK_S, limit_bytes=64 * 2**20, device=device, memory_bytes=memory_bytes
        )
        _KNOWN[directory, device.device] = measured.link
    return _KNOWN[directory, device.device]
