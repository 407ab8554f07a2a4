"""The measurement of the link between the device and a store. The measurement moves bytes in the way of the
store: through slabs, and with O_DIRECT.

In: a folder, a byte limit and a time limit. Out: a MeasuredLink. A first probe with 1 MiB blocks estimates
the drive's rate. This rate gives the block size and the file size of the measurement. So the measurement
takes about the same time on a slow drive and on a fast drive.
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
AHEAD = 4  # transfers in flight per direction, so that the drive is never idle
DEADLINE_S = 10.0  # a drive that takes longer for one block cannot be a store
POLL_S = 0.0005
PHASE_BYTES = 2 * 2**30  # most bytes of a measured phase, to limit the drive's wear
SLOWEST_BYTES_PER_S = 4 * 10**6  # on a slower drive even the first probe would take too long

MEMORY_BYTES = 128 * MIB  # most device memory of a measurement, for evict and fetch together
MEMORY_PARTS = 8  # the measurement takes at most this fraction (1/8) of a budget
MEMORY_LEAST_BYTES = 2 * MIB  # least device memory of a measurement: one block for evict, one for fetch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The measured rates of the link between the device and a store, with facts about the measurement."""

    link: LinkRates
    page_bytes: int  # the actual page size of the slabs
    direct: bool  # True if the open and all transfers accepted O_DIRECT
    cpu_ns_per_gb: int  # this process's CPU time per 10**9 bytes moved, checksums included
    moved_bytes: int


@contextlib.contextmanager
def open_private_file(folder: Path) -> Iterator[tuple[int, bool]]:
    """Yield a pair for an unnamed file: its fd, and True if O_DIRECT was accepted. The file is freed when the
    process ends."""
    private = tempfile.mkdtemp(prefix="teraio-", dir=folder)
    path = os.path.join(private, "measure")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd, direct = -1, True
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # Linux may create the file before it refuses O_DIRECT
            fd, direct = os.open(path, flags, 0o600), False
    except OSError as error:
        raise StoreError(f"no file can be created in {folder}: {error}", errno=error.errno or 0) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.rmdir(private)
    try:
        yield fd, direct
    finally:
        os.close(fd)


class DriveBench:
    """One measurement: its file, its slabs (buffers) and its memory. Each block of the file is written before
    it is read."""

    def __init__(self, io: _native.Io, device: Device, scratch: Scratch) -> None:
        self.device = device
        self.slabs = device.allocate_slabs(SLAB_BYTES, LANES)
        self.io = io
        self.transfers = _native.Transfers(io, self.slabs, deadline_s=DEADLINE_S, copier=device.copier)
        self.scratch = scratch
        self.half = scratch.size_bytes // 2
        scratch.fill(os.urandom(self.half))  # random, because a drive may compress other bytes
        self.block_bytes = MIB
        self.blocks = 0
        self.moved_bytes = 0

    def submit_evict(self, block: int, size_bytes: int = 0) -> int:
        size, at = self._size_and_memory_offset(block, size_bytes)
        return self.transfers.out(
            self.scratch.address + at, size, [(0, block * self.block_bytes, size)], block + 1, 1, True
        )

    def submit_fetch(self, block: int, size_bytes: int = 0) -> int:
        size, at = self._size_and_memory_offset(block, size_bytes)
        target = self.scratch.address + self.half + at
        return self.transfers.into(target, size, [(0, block * self.block_bytes, size)], block + 1, 1, True)

    def _size_and_memory_offset(self, block: int, size_bytes: int) -> tuple[int, int]:
        return size_bytes or self.block_bytes, block * self.block_bytes % self.half

    def write_blocks_once(self, block_bytes: int, blocks: int, seconds: float) -> None:
        """Divide the file into blocks, and write each block once before the measurement. The first write of a
        block is slower than later writes."""
        self.transfers.forget([(0, 0, self.blocks * self.block_bytes)])
        self.block_bytes, self.blocks = block_bytes, 0
        ends = time.monotonic() + seconds
        tickets: deque[int] = deque()
        for block in range(blocks):
            if len(tickets) == AHEAD:
                self._wait_for_block(tickets.popleft())
            if time.monotonic() > ends and block >= 2 * AHEAD:
                break
            tickets.append(self.submit_evict(block))
            self.blocks = block + 1
        while tickets:
            self._wait_for_block(tickets.popleft())

    def _wait_for_block(self, ticket: int) -> None:
        self.transfers.wait(ticket, "a measured block")
        self.moved_bytes += self.block_bytes

    def measure_rates(self, seconds: float, evict: bool, fetch: bool) -> tuple[int, int]:
        """Return the bytes per second of each direction: evict and fetch. If both directions run, each one
        uses its own half of the file."""
        ways = [_Direction(self.submit_evict, 0, self.blocks // 2 if fetch else self.blocks)] if evict else []
        first = self.blocks // 2 if evict else 0
        ways += [_Direction(self.submit_fetch, first, self.blocks)] if fetch else []
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
        """Wait for the oldest block of this direction. Count the block if it ended before `stop_ns`, or if no
        block of the direction was counted yet.

        If both directions run, one direction ends earlier. The other direction then runs alone, and must not
        be measured. Its blocks end after `stop_ns`, so they are not counted.
        """
        ticket = way.tickets.popleft()
        self.transfers.wait(ticket, "a measured block", keep=True)
        ended_ns = self.transfers.times(ticket)[2]
        self.transfers.release(ticket)
        self.moved_bytes += self.block_bytes
        if ended_ns <= stop_ns or not way.last_ns:
            way.bytes += self.block_bytes
            way.last_ns = max(way.last_ns, ended_ns)

    def measure_latency_ns(self, move: Callable[[int, int], int], times: int = 9) -> int:
        """Return the median time to transfer one page, without other transfers in flight."""
        found = []
        for block in range(min(times, self.blocks)):
            start = time.monotonic_ns()
            self.transfers.wait(move(block, PAGE_BYTES), "a measured block")
            found.append(time.monotonic_ns() - start)
        return round(statistics.median(found))

    def close(self) -> None:
        self.transfers.close(DEADLINE_S)
        self.device.unpin_slabs(self.slabs)
        self.scratch.end()


def memory_bytes_for_probe(budget_bytes: int) -> int:
    """Return the number of bytes of device memory that a measurement may take. This is MEMORY_BYTES, halved
    until it is at most the larger of two numbers: MEMORY_LEAST_BYTES, and the budget divided by
    MEMORY_PARTS."""
    size = MEMORY_BYTES
    while size > max(budget_bytes // MEMORY_PARTS, MEMORY_LEAST_BYTES):
        size //= 2
    return size


class _Direction:
    """One direction of a measurement, evict or fetch: (1) its range of blocks, (2) its transfers in flight,
    (3) its finished bytes."""

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
    """Measure the link device <-> ssd with a file of up to `limit_bytes` in `folder`.

    The measurement takes about five times `seconds`. `around` may wrap the I/O between the transfer engine
    and the drive. Without `device`, or if the device has no free memory, the measurement uses RAM. RAM is
    good enough, because the drive is slower. Raise StoreError if the drive refuses a transfer, hangs or is
    too slow.
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
            progress("measuring the drive: first probe")
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
    """Choose the block size by the drive's rate, and write each block of the file once."""
    began = time.monotonic()
    bench.write_blocks_once(_halve_block_until_fits(MIB, 4 * AHEAD, limit_bytes), 4 * AHEAD, seconds / 4)
    first = int(bench.moved_bytes / (time.monotonic() - began))
    if first < SLOWEST_BYTES_PER_S:
        raise StoreError(
            f"the drive of {folder} writes {fmt_rate(first)}; a store needs at least "
            f"{fmt_rate(SLOWEST_BYTES_PER_S)}. Name a directory on another drive with --store",
            path=str(folder),
        )
    probe, _ = bench.measure_rates(seconds / 8, evict=True, fetch=False)
    block = min(_halve_block_until_fits(_block_bytes_for_rate(probe), 2 * AHEAD, limit_bytes), bench.half)
    progress("measuring the drive: writing a file")
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
    """Return the number of bytes of the measurement's file: half of the free bytes, but at most the process's
    limit of a file's size."""
    about = os.statvfs(folder)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = about.f_bavail * about.f_frsize // 2
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


def _halve_block_until_fits(block_bytes: int, blocks: int, limit_bytes: int) -> int:
    """Halve the block size until `blocks` blocks fit in `limit_bytes`."""
    while block_bytes > PAGE_BYTES and block_bytes * blocks > limit_bytes:
        block_bytes //= 2
    return block_bytes


def _block_bytes_for_rate(bytes_per_s: int) -> int:
    """Return the largest block of 2, 4, 8 or 16 MiB that the drive moves in at most 40 ms, or else 1 MiB.

    16 MiB is about the size of a layer's weight. Larger blocks would prolong the end of a measurement.
    """
    block = MIB
    while block < 16 * MIB and 2 * block * 25 <= bytes_per_s:
        block *= 2
    return block
