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
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from teraio import _native
from teraio.units import fmt_bytes

from . import measure
from .device import Host, Mark, Ordered, Start, Ticket
from .pinned import GRAIN_BYTES, HostTier

log = logging.getLogger("teraio")

MARGIN_PERCENT = 5  # of free and held memory: what the driver and libraries take beside the allocator
LIBRARIES_BYTES = 96 * 2**20  # cuBLAS takes 32 MiB on Hopper, per thread: the forward's, and autograd's


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
    """One GPU of this process, by its index; without one, the current GPU. Makes its context if there is none
    yet. Every call names this device: user code may make another one current."""

    kind = "cuda"
    counts_all = True

    def __init__(self, index: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        split_blocks_finely()
        self.highest = 0
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            self.copier = _native.CudaCopier()  # takes the context that is current
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
        torch.cuda.synchronize(device.device)
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
    torch.cuda.synchronize(device.device)
    for place in places:
        tier.release(place)
    return measure.Link("host", evict, fetch, both, both, *latencies)


def _copy(device: CudaDevice, start: Start, storage: torch.UntypedStorage) -> Ticket:
    return start(storage, device.mark())
