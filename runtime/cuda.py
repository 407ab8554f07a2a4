"""A GPU: side streams, events, pinned memory. What must wait for what is said in device.py; here is how.

    compute stream   the one that is current when a kernel is launched
    evict stream     device -> pinned memory  |
    fetch stream     pinned memory -> device  |  host tier: copies are given here, on the caller's thread
    demand stream    the same, past the queue |
    copier's streams device <-> pinned slabs <-> files: ssd tier, on the transfer engine's threads

Nothing of this has an effect before a CudaDevice is made.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch

from teraio import _native
from teraio.units import fmt_bytes

from . import measure
from .device import Host, Mark, Ordered, Start, Ticket

log = logging.getLogger("teraio")

MARGIN_PERCENT = 5  # of free and held memory: what the driver and libraries take beside the allocator
SEGMENT_BYTES = 2**30  # pinned memory grows by this much at a time: pinning takes tens of milliseconds
LIBRARIES_BYTES = 96 * 2**20  # cuBLAS takes 32 MiB on Hopper, per thread: the forward's, and autograd's
GRAIN_BYTES = 64 * 1024  # of places in pinned memory, so that equal sizes with small differences share them


def driver_devices() -> tuple[str, ...]:
    """The names of the GPUs that the driver shows, whatever torch was built for. Empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return ()
        names = []
        for index in range(count.value):
            driver.cuDeviceGetName(name, len(name), index)
            names.append(name.value.decode(errors="replace"))
        return tuple(names)
    except (OSError, AttributeError):
        return ()


def reason_without() -> str | None:
    """Why this process has no GPU to use; None if it has one."""
    if torch.version.hip:
        return f"torch {torch.__version__} is built for ROCm, which is not supported"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "the driver shows no GPU"
    return None


ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # in the environment


def split_blocks_finely() -> None:
    """Segments that grow, for tensors from now on. In others a block is not split if less than 1 MiB would be
    left of it: all of it counts as allocated, and hundreds of tensors that come and go take that much more
    each. Who has settings of their own keeps them; without these the reserve learns what is lost."""
    if any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        log.warning(
            "teraio: torch %s has no way to change its allocator's settings: memory may be split into pieces "
            "that nothing fits in. Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            torch.__version__,
        )
    else:
        change("expandable_segments:True")


class CudaDevice(Ordered):
    """The current GPU of this process. Touches it: makes its context if there is none yet."""

    kind = "cuda"
    counts_all = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        split_blocks_finely()
        self.highest = 0
        torch.cuda.synchronize(self.device)  # the copier takes the context that is current
        self.copier = _native.CudaCopier()
        self.evict_stream = torch.cuda.Stream(self.device)
        self.fetch_stream = torch.cuda.Stream(self.device)
        # A copy on it does not queue behind the prefetches: the copy engine takes from all streams in turn.
        self.demand_stream = torch.cuda.Stream(self.device, priority=-1)
        self._compute = torch.cuda.current_stream(self.device)

    def capacity_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def available_bytes(self) -> int:
        """Free memory and what this process holds, in use or cached by its allocator."""
        return int(torch.cuda.mem_get_info(self.device)[0]) + torch.cuda.memory_reserved(self.device)

    def default_budget_bytes(self) -> int:
        return self.available_bytes() * (100 - MARGIN_PERCENT) // 100

    def used_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        self.highest = self.highest_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)

    def highest_bytes(self) -> int:
        return max(self.highest, self.peak_bytes())

    def libraries_bytes(self, budget_bytes: int) -> int:
        return min(LIBRARIES_BYTES, budget_bytes // 8)

    def slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Pinned for the life of the copier, and on huge pages: cudaHostAlloc does not tell what it gives."""
        slabs = _native.Slabs(slab_bytes, count)
        error = self.copier.pin(slabs)
        if error != 0:
            raise OSError(
                errno.ENOMEM,
                f"the CUDA driver refuses to pin {fmt_bytes(slab_bytes * count)} (error {error}). Raise the "
                "limit on locked memory (ulimit -l unlimited; in a container --ulimit memlock=-1), or give a "
                "smaller host_memory",
            )
        return slabs

    def host(self, limit_bytes: int) -> HostTier:
        return HostTier(self, limit_bytes)

    def host_link(self, host: Host, seconds: float) -> measure.Link | str:
        assert isinstance(host, HostTier)
        return measure_host(self, host, seconds, lambda doing: None)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self.compute())
        return Mark(event, event.cuda_event)

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute())
        return event

    def times_ns(self, moments: Sequence[torch.cuda.Event]) -> list[int]:
        """From each to the next: the driver tells milliseconds in 24 bits, of an hour too few."""
        for event in moments[-1:]:
            event.synchronize()
        spans = (round(a.elapsed_time(b) * 1e6) for a, b in pairwise(moments))
        return list(accumulate(spans, initial=0))[: len(moments)]

    def compute_waits(self, event: torch.cuda.Event) -> None:
        self.compute().wait_event(event)

    def drain(self) -> None:
        for stream in (self.evict_stream, self.fetch_stream, self.demand_stream):
            stream.synchronize()

    def idle(self) -> None:
        self.drain()
        self.compute().synchronize()

    def compute(self) -> torch.cuda.Stream:
        """The current stream, behind what the last one was given.

        Asked for on the caller's thread and before any side stream is entered: inside one, it would be that
        side stream, and waiting for itself orders nothing.
        """
        stream = torch.cuda.current_stream(self.device)
        assert stream not in (self.evict_stream, self.fetch_stream, self.demand_stream), (
            "inside a side stream"
        )
        if stream != self._compute:
            stream.wait_stream(self._compute)
            self._compute = stream
        return stream


class CopyTicket:
    """A copy that was issued when this was made: the host has nothing to wait for, the compute stream has."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the compute stream would not wait either."""
        return bool(self.event.query())

    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Bytes of pinned memory."""

    address: int
    size_bytes: int


class HostTier:
    """Pinned copies of tensors. In steady state nothing is allocated: the places of one step serve the next.

    A place may be given back as soon as the fetch from it has ended on the host: what is copied there next
    waits for a mark on the compute stream, which has waited for that fetch.
    """

    def __init__(self, device: CudaDevice, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self.refused: OSError | None = None  # why there is less than the limit
        self._segments: list[_native.Slabs] = []
        self._free: list[Place] = []  # by address; neighbours within a segment are merged
        self._starts: set[int] = set()

    def reserve(self, size_bytes: int) -> Place | None:
        """The smallest free place that fits; None when the limit is reached."""
        size_bytes = -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
        fits = [place for place in self._free if place.size_bytes >= size_bytes]
        if not fits:
            grown = self._grow(size_bytes)
            if grown is None:
                return None
            fits = [grown]
        found = min(fits, key=lambda place: (place.size_bytes, place.address))
        self._free.remove(found)
        if found.size_bytes > size_bytes:
            insort(self._free, Place(found.address + size_bytes, found.size_bytes - size_bytes))
        return Place(found.address, size_bytes)

    def release(self, place: Place) -> None:
        insort(self._free, place)
        at = self._free.index(place)
        for left in (at, at - 1):  # with the right neighbour, then with the left one
            if 0 <= left < len(self._free) - 1:
                one, two = self._free[left : left + 2]
                if one.address + one.size_bytes == two.address and two.address not in self._starts:
                    self._free[left : left + 2] = [Place(one.address, one.size_bytes + two.size_bytes)]

    def _grow(self, size_bytes: int) -> Place | None:
        """One more segment; the last one is cut to what the limit leaves."""
        left = self.limit_bytes - self.pinned_bytes
        size = min(
            max(SEGMENT_BYTES, -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES),
            left // GRAIN_BYTES * GRAIN_BYTES,
        )
        if size < size_bytes:
            return None
        count = -(-size // SEGMENT_BYTES)  # a slab is at most 1 GiB; they lie side by side
        each = -(-size // count // 4096) * 4096
        try:
            segment = self.device.slabs(each, count)
        except OSError as error:  # what is pinned stays in use; there will be no more of it
            self.limit_bytes, self.refused = self.pinned_bytes, error
            return None
        self._segments.append(segment)
        self._starts.add(segment.address)
        self.pinned_bytes += segment.arena_bytes
        place = Place(segment.address, segment.arena_bytes)
        insort(self._free, place)
        return place

    def write(self, place: Place) -> Start:
        """For `begin_evict`: copies the storage into the place."""
        stream = self.device.evict_stream
        return lambda storage, mark: _issue(stream, mark, storage, place, out=True)

    def read(self, place: Place, demand: bool = False) -> Start:
        """For `begin_fetch`: copies the place into the storage; on demand, not behind queued prefetches."""
        stream = self.device.demand_stream if demand else self.device.fetch_stream
        return lambda storage, mark: _issue(stream, mark, storage, place, out=False)


def _issue(
    stream: torch.cuda.Stream, mark: Mark, storage: torch.UntypedStorage, place: Place, out: bool
) -> CopyTicket:
    size = storage.nbytes()
    assert size <= place.size_bytes, f"{size} bytes and a place of {place.size_bytes}"
    stream.wait_event(mark.event)
    copy_on(stream, storage, place.address, size, out)
    event = torch.cuda.Event()
    event.record(stream)
    return CopyTicket(event)


def copy_on(
    stream: torch.cuda.Stream, storage: torch.UntypedStorage, address: int, size: int, out: bool
) -> None:
    """Gives the stream a copy between the storage and pinned memory; nothing is allocated."""
    pinned = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    with torch.cuda.stream(stream):
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        target, source = (pinned, tensor) if out else (tensor, pinned)
        target.copy_(source, non_blocking=True)


# ---- the link

LOOK_BYTES = 128 * 2**20  # pinned, and as much of the device's memory
LOOK_COUNT = 4  # copies each way


def measure_host(
    device: CudaDevice, tier: HostTier, seconds: float, progress: Callable[[str], None]
) -> measure.Link | str:
    """The link device <-> host, or why memory could not be pinned. The places go back to the tier."""
    count = 2 * LOOK_COUNT
    size = min(LOOK_BYTES, tier.limit_bytes) // count // GRAIN_BYTES * GRAIN_BYTES
    places = [place for _ in range(count) if size and (place := tier.reserve(size)) is not None]
    if len(places) < count:
        for place in places:
            tier.release(place)
        return str(tier.refused or f"{fmt_bytes(tier.limit_bytes)} are too little to measure a link with")
    storages = [torch.empty(size, dtype=torch.uint8, device=device.device).untyped_storage() for _ in places]
    pairs = list(zip(places, storages))
    out = [partial(_copy, device, tier.write(place), storage) for place, storage in pairs[:LOOK_COUNT]]
    into = [partial(_copy, device, tier.read(place), storage) for place, storage in pairs[LOOK_COUNT:]]

    def rate(moves: Sequence[Callable[[], Ticket]]) -> int:
        torch.cuda.synchronize()
        start, moved = time.monotonic(), 0
        while time.monotonic() - start < seconds / 2:
            for move in moves:
                move()
            device.drain()
            moved += len(moves) * size
        return int(moved / (time.monotonic() - start))

    progress("device to host and back")
    rate(out + into)  # clocks and links of a sleeping GPU are slow for a moment
    evict, fetch = rate(out), rate(into)
    both = rate(out + into) // 2
    small = torch.empty(4096, dtype=torch.uint8, device=device.device).untyped_storage()
    latencies = []
    for start in (tier.write(pairs[0][0]), tier.read(pairs[0][0])):
        begun = time.monotonic_ns()
        for _ in range(16):
            _copy(device, start, small)
            device.drain()
        latencies.append((time.monotonic_ns() - begun) // 16)
    torch.cuda.synchronize()
    for place in places:
        tier.release(place)
    return measure.Link("host", evict, fetch, both, both, *latencies)


def _copy(device: CudaDevice, start: Start, storage: torch.UntypedStorage) -> Ticket:
    return start(storage, device.mark())
