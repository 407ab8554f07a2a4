"""What a link carries: bytes out of memory and back, through slabs and O_DIRECT, as the runtime moves them.

Bounded in bytes and in time, so that a slow drive takes as long as a fast one: first a probe of 1 MiB blocks,
then blocks and a file that fit what the probe found.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from teraio import _native
from teraio.errors import StoreError
from teraio.units import fmt_rate

from ..device.cpu import CpuDevice
from ..device.device import Device, Scratch
from ..device.link_rates import LinkRates
from .slabs import LANES, SLAB_BYTES

MIB = 2**20
PAGE_BYTES = 4096
AHEAD = 4  # transfers submitted and unfinished per direction: the drive never idles
DEADLINE_S = 10.0  # a drive that takes longer for one block is no store
POLL_S = 0.0005
PHASE_BYTES = 2 * 2**30  # per measurement: a drive's endurance is not ours to spend
SLOWEST_BYTES_PER_S = 4 * 10**6  # below this even a look takes longer than a person waits

MEMORY_BYTES = 128 * MIB  # where tensors are: for both directions together
MEMORY_PARTS = 8  # of a budget, at most one for that
MEMORY_LEAST_BYTES = 2 * MIB  # a block each way

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A store's link, and what was met on the way."""

    link: LinkRates
    page_bytes: int  # of the slabs, in effect
    direct: bool  # O_DIRECT was taken by open and by every operation
    cpu_ns_per_gb: int  # this process's CPU time per 10**9 bytes moved, checksums included
    moved_bytes: int


@contextlib.contextmanager
def open_private_file(folder: Path) -> Iterator[tuple[int, bool]]:
    """(fd, O_DIRECT was taken) of a file that no one else can open and that is gone with this process."""
    private = tempfile.mkdtemp(prefix="teraio-", dir=folder)
    path = os.path.join(private, "measure")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd, direct = -1, True
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # Linux may create the file before it refuses the flag
            fd, direct = os.open(path, flags, 0o600), False
    except OSError as error:
        raise StoreError(f"no file can be made in {folder}: {error}", errno=error.errno or 0) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.rmdir(private)
    try:
        yield fd, direct
    finally:
        os.close(fd)


class DriveBench:
    """A file, slabs and memory. Places of the file are written once before they are read."""

    def __init__(self, io: _native.Io, device: Device, scratch: Scratch) -> None:
        self.device = device
        self.slabs = device.allocate_slabs(SLAB_BYTES, LANES)
        self.io = io
        self.transfers = _native.Transfers(io, self.slabs, deadline_s=DEADLINE_S, copier=device.copier)
        self.scratch = scratch
        self.half = scratch.size_bytes // 2
        scratch.fill(os.urandom(self.half))  # a drive may compress, and weights cannot be compressed
        self.block_bytes = MIB
        self.places = 0
        self.moved_bytes = 0

    def submit_evict(self, place: int, size_bytes: int = 0) -> int:
        size, at = self._size_and_memory_offset(place, size_bytes)
        return self.transfers.out(
            self.scratch.address + at, size, [(0, place * self.block_bytes, size)], place + 1, 1, True
        )

    def submit_fetch(self, place: int, size_bytes: int = 0) -> int:
        size, at = self._size_and_memory_offset(place, size_bytes)
        target = self.scratch.address + self.half + at
        return self.transfers.into(target, size, [(0, place * self.block_bytes, size)], place + 1, 1, True)

    def _size_and_memory_offset(self, place: int, size_bytes: int) -> tuple[int, int]:
        return size_bytes or self.block_bytes, place * self.block_bytes % self.half

    def write_blocks_once(self, block_bytes: int, places: int, seconds: float) -> None:
        """Cuts the file into blocks and writes each once: first writes are slower."""
        self.transfers.forget([(0, 0, self.places * self.block_bytes)])
        self.block_bytes, self.places = block_bytes, 0
        ends = time.monotonic() + seconds
        tickets: deque[int] = deque()
        for place in range(places):
            if len(tickets) == AHEAD:
                self._wait_for_block(tickets.popleft())
            if time.monotonic() > ends and place >= 2 * AHEAD:
                break
            tickets.append(self.submit_evict(place))
            self.places = place + 1
        while tickets:
            self._wait_for_block(tickets.popleft())

    def _wait_for_block(self, ticket: int) -> None:
        self.transfers.wait(ticket, "a measured block")
        self.moved_bytes += self.block_bytes

    def measure_rates(self, seconds: float, evict: bool, fetch: bool) -> tuple[int, int]:
        """Bytes per second of each direction. When both run, each keeps to its half of the file."""
        ways = [_Direction(self.submit_evict, 0, self.places // 2 if fetch else self.places)] if evict else []
        first = self.places // 2 if evict else 0
        ways += [_Direction(self.submit_fetch, first, self.places)] if fetch else []
        start = time.monotonic_ns()
        stop = start + round(seconds * 1e9)
        while time.monotonic_ns() < stop and sum(way.bytes for way in ways) < PHASE_BYTES:
            for way in ways:
                way.submit_until_enough_ahead()
                while way.tickets and self.transfers.done(way.tickets[0]):
                    self._finish_oldest_block(way, stop)
            time.sleep(POLL_S)
        stop = min(stop, time.monotonic_ns())
        for way in ways:
            while way.tickets:
                self._finish_oldest_block(way, stop)
        speeds = [way.bytes_per_s(start) for way in ways]
        return (speeds[0] if evict else 0, speeds[-1] if fetch else 0)

    def _finish_oldest_block(self, way: _Direction, stop_ns: int) -> None:
        """Counts what ended in time; of directions that run at once, the tail of one runs alone."""
        ticket = way.tickets.popleft()
        self.transfers.wait(ticket, "a measured block", keep=True)
        ended_ns = self.transfers.times(ticket)[2]
        self.transfers.release(ticket)
        self.moved_bytes += self.block_bytes
        if ended_ns <= stop_ns or not way.last_ns:
            way.bytes += self.block_bytes
            way.last_ns = max(way.last_ns, ended_ns)

    def measure_latency_ns(self, move: Callable[[int, int], int], times: int = 9) -> int:
        """Of one page with nothing else under way: the median."""
        found = []
        for place in range(min(times, self.places)):
            start = time.monotonic_ns()
            self.transfers.wait(move(place, PAGE_BYTES), "a measured block")
            found.append(time.monotonic_ns() - start)
        return round(statistics.median(found))

    def close(self) -> None:
        self.transfers.close(DEADLINE_S)
        self.device.unpin_slabs(self.slabs)
        self.scratch.end()


def memory_bytes_for_probe(budget_bytes: int) -> int:
    """How much of the device's memory a measurement may take: by halves, so that blocks fit."""
    size = MEMORY_BYTES
    while size > max(budget_bytes // MEMORY_PARTS, MEMORY_LEAST_BYTES):
        size //= 2
    return size


class _Direction:
    """One direction of a measurement: which places it visits, what is under way and what has arrived."""

    def __init__(self, move: Callable[[int], int], first: int, last: int) -> None:
        self.move, self.first, self.last = move, first, last
        self.at = first
        self.tickets: deque[int] = deque()
        self.bytes = 0
        self.last_ns = 0

    def submit_until_enough_ahead(self) -> None:
        while len(self.tickets) < AHEAD:
            self.tickets.append(self.move(self.at))
            self.at = self.first if self.at + 1 == self.last else self.at + 1

    def bytes_per_s(self, start_ns: int) -> int:
        return max(1, self.bytes * 10**9 // max(1, self.last_ns - start_ns))


def measure_store_link(
    folder: Path,
    seconds: float = 2.0,
    limit_bytes: int = 512 * MIB,
    progress: Progress = lambda doing: None,
    around: Callable[[_native.Io], _native.Io] = lambda io: io,
    device: Device | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> MeasuredLink:
    """Measures device <-> ssd with a file of up to `limit_bytes` in `folder`, in about five times `seconds`.

    `around` puts something between the engine and the drive; `device`: where the tensors are, by default RAM,
    and where it has no memory free: the drive is the slower part.
    StoreError: the drive refuses, hangs or crawls.
    """
    with open_private_file(folder) as (fd, opened):
        io = around(_native.ThreadIo([(fd, str(folder))], threads=LANES))
        where = device or CpuDevice()
        scratch = where.allocate_scratch(memory_bytes, MEMORY_LEAST_BYTES)
        if scratch is None:
            where = CpuDevice()
            scratch = where.allocate_scratch(memory_bytes, MEMORY_LEAST_BYTES)
            assert scratch is not None
        bench = DriveBench(io, where, scratch)
        began_cpu_ns = time.process_time_ns()
        try:
            progress("measuring the drive: a first look")
            _choose_and_write_blocks(
                bench, folder, seconds, min(limit_bytes, _file_bytes_for_probe(folder)), progress
            )
            link = _measure_link(bench, seconds, progress)
            cpu_ns = time.process_time_ns() - began_cpu_ns
            direct = opened and bench.io.buffered_files == 0
            per_gb = cpu_ns * 10**9 // bench.moved_bytes
            return MeasuredLink(link, bench.slabs.page_bytes, direct, per_gb, bench.moved_bytes)
        finally:
            bench.close()


def _choose_and_write_blocks(
    bench: DriveBench, folder: Path, seconds: float, limit_bytes: int, progress: Progress
) -> None:
    """Finds the block size that suits the drive and writes every block of the file once."""
    began = time.monotonic()
    bench.write_blocks_once(_halve_block_until_fits(MIB, 4 * AHEAD, limit_bytes), 4 * AHEAD, seconds / 4)
    first = int(bench.moved_bytes / (time.monotonic() - began))
    if first < SLOWEST_BYTES_PER_S:
        raise StoreError(
            f"the drive of {folder} writes {fmt_rate(first)}; a store needs {fmt_rate(SLOWEST_BYTES_PER_S)} "
            "and more. Name a directory on another drive with --store",
            path=str(folder),
        )
    probe, _ = bench.measure_rates(seconds / 8, evict=True, fetch=False)
    block = min(_halve_block_until_fits(_block_bytes_for_rate(probe), 2 * AHEAD, limit_bytes), bench.half)
    progress("measuring the drive: laying out a file")
    bench.write_blocks_once(block, max(min(limit_bytes, int(probe * seconds)) // block, 2 * AHEAD), seconds)


def _measure_link(bench: DriveBench, seconds: float, progress: Progress) -> LinkRates:
    progress("measuring the drive: evicting")
    evict, _ = bench.measure_rates(seconds, evict=True, fetch=False)
    progress("measuring the drive: fetching")
    _, fetch = bench.measure_rates(seconds, evict=False, fetch=True)
    progress("measuring the drive: both at once")
    both_evict, both_fetch = bench.measure_rates(seconds, evict=True, fetch=True)
    progress("measuring the drive: latency")
    evict_ns, fetch_ns = (
        bench.measure_latency_ns(bench.submit_evict),
        bench.measure_latency_ns(bench.submit_fetch),
    )
    return LinkRates("ssd", evict, fetch, both_evict, both_fetch, evict_ns, fetch_ns)


def _file_bytes_for_probe(folder: Path) -> int:
    """What a look may write: half of what is free, and no more than a file may hold."""
    about = os.statvfs(folder)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = about.f_bavail * about.f_frsize // 2
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


def _halve_block_until_fits(block_bytes: int, places: int, limit_bytes: int) -> int:
    """A block, by halves, of which so many fit."""
    while block_bytes > PAGE_BYTES and block_bytes * places > limit_bytes:
        block_bytes //= 2
    return block_bytes


def _block_bytes_for_rate(bytes_per_s: int) -> int:
    """As large as a layer's weight where that takes a drive under 40 ms, and never so large that the tail of
    a measurement takes long: 1, 2, 4, 8 or 16 MiB."""
    block = MIB
    while block < 16 * MIB and 2 * block * 25 <= bytes_per_s:
        block *= 2
    return block
