"""A GPU: side streams, events, pinned memory. What must wait for what is said in device.py; here is how.

    compute stream   the one that is current when a kernel is launched
    evict stream     device -> pinned memory  |
    fetch stream     pinned memory -> device  |  host tier: copies are given here, on the caller's thread
    demand stream    the same, past the queue |
    copier's streams device <-> pinned slabs <-> files: ssd tier, on the transfer engine's threads

The side streams are ours alone. The compute stream may change: each is put behind the one before when it is
met, and memory that is given back is held by the allocator until the current one is done with it.

Nothing of this has an effect before a CudaDevice is made.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from teraio import _native
from teraio.units import fmt_bytes

from ..torch_extension.observer import observer_of_process
from .cuda_memory import CudaMemory
from .device import Host
from .link_rates import LinkRates
from .pending_transfer import Mark, Pending, Start, Ticket
from .pinned_host import GRAIN_BYTES, HostTier, PinnedBlock

log = logging.getLogger("teraio")
_IDLE_STREAMS: dict[tuple[int, int], list[int]] = defaultdict(list)  # by GPU and priority: no device has them


def gpu_names_from_driver() -> tuple[str, ...]:
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


def reason_without_gpu() -> str | None:
    """Why this process has no GPU to use; None if it has one."""
    if torch.version.hip:
        return f"torch {torch.__version__} is built for ROCm, which is not supported"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "the driver shows no GPU"
    return None


VIRTUAL_MEMORY_MANAGEMENT = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # in the environment


def enable_expandable_segments() -> None:
    """Segments that grow, for tensors from now on. In others a block is not split if less than 1 MiB would be
    left of it: all of it counts as allocated, and hundreds of tensors that come and go take that much more
    each. Who has settings of their own keeps them: new ones would put back what they do not name. Without
    these the reserve learns what is lost."""
    if _has_user_allocator_settings():
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        log.warning(
            "teraio: torch %s has no way to change its allocator's settings: memory may be split into pieces "
            "that nothing fits in. Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            torch.__version__,
        )
    elif _can_expand_segments():
        change("expandable_segments:True")
    else:
        log.warning(
            "teraio: this GPU's driver cannot map memory piece by piece, as on virtual GPUs: torch's "
            "allocator keeps segments of fixed sizes, and more of the memory goes to the reserve"
        )


def _has_user_allocator_settings() -> bool:
    """Return whether the user made settings, in the environment or at run time."""
    if any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        return True
    try:
        told = torch.cuda.memory._snapshot().get("allocator_settings", {})
    except RuntimeError:  # an allocator of the user's own has no snapshot
        return True
    return any(told.get(name) for name in ALLOCATOR_SETTINGS)


def _can_expand_segments() -> bool:
    """Return whether the current device can have segments that grow; torch tries it without asking."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        can, device = ctypes.c_int(1), ctypes.c_int(0)
        if driver.cuCtxGetDevice(ctypes.byref(device)) == 0:
            driver.cuDeviceGetAttribute(ctypes.byref(can), VIRTUAL_MEMORY_MANAGEMENT, device)
        return bool(can.value)
    except (OSError, AttributeError):
        return True


class CudaDevice(CudaMemory):
    """One GPU of this process, by its index; without one, the current GPU. Makes its context if there is none
    yet. Every call names this device: user code may make another one current."""

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(torch.cuda.current_device() if index is None else index)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            enable_expandable_segments()
            self.copier = _native.CudaCopier()  # takes the context that is current
        self.evict_stream, self.fetch_stream = self._private_stream(), self._private_stream()
        # A copy on it does not queue behind the prefetches: the copy engine takes from all streams in turn.
        self.demand_stream = self._private_stream(priority=-1)
        self._compute = torch.cuda.current_stream(self.index)
        self.observer = observer_of_process()

    def _private_stream(self, priority: int = 0) -> torch.cuda.ExternalStream:
        """Return a stream that no user has: torch hands out 32 of each priority in turn, and then the same.

        It outlives this device, and serves the next one: where memory was used on a stream, torch may ask
        that stream when the memory is freed, and to ask a destroyed one is undefined.
        """
        idle = _IDLE_STREAMS[self.index, priority]
        handle = idle.pop() if idle else self.copier.stream(priority)
        weakref.finalize(self, idle.append, handle)
        return torch.cuda.ExternalStream(handle, self.device)

    def resize_storage(self, storage: Any, size_bytes: int) -> None:
        """Give the storage so many bytes. Freed memory serves the stream next that it was made on. If that is
        not the current one, the allocator holds the memory until the current one is done with it."""
        if size_bytes == 0 and storage.nbytes():
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            tensor.record_stream(self.current_compute_stream())
        storage.resize_(size_bytes)

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        self.join_user_streams()  # on any stream: it may write there still
        return super().begin_copy_out(storage, start)

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        self.join_user_streams()  # on any stream: it may read there still
        if self.observer is None:
            super().drop_bytes(storage, unwritten)
            return
        block = self.observer.make_empty_block(storage)
        self.observer.empty_storage(storage, unwritten, block)
        self.resize_storage(block, 0)

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        self.copier.unpin(slabs)

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
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

    def make_host_tier(self, limit_bytes: int) -> HostTier:
        return HostTier(self, limit_bytes)

    def measure_host_link(self, host: Host, seconds: float, memory_bytes: int) -> LinkRates | str:
        assert isinstance(host, HostTier)
        return measure_host_tier_link(self, host, seconds, memory_bytes, lambda doing: None)

    def mark_compute_stream(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self.current_compute_stream())
        return Mark(event, event.cuda_event)

    def moment_after_kernels(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_compute_stream())
        return event

    def moments_in_ns(self, moments: Sequence[torch.cuda.Event]) -> list[int]:
        """From each to the next: the driver tells milliseconds in 24 bits, of an hour too few."""
        for event in moments[-1:]:
            event.synchronize()
        spans = (round(a.elapsed_time(b) * 1e6) for a, b in pairwise(moments))
        return list(accumulate(spans, initial=0))[: len(moments)]

    def make_kernels_wait_for_event(self, event: torch.cuda.Event) -> None:
        self.current_compute_stream().wait_event(event)

    def join_user_streams(self) -> None:
        compute = self.current_compute_stream()
        for number in self.observer.newly_used_streams(self.index) if self.observer is not None else ():
            if number != compute.stream_id:
                compute.wait_stream(
                    torch.cuda.Stream(
                        stream_id=number, device_index=self.index, device_type=compute.device_type
                    )
                )

    def wait_for_copies(self) -> None:
        for stream in (self.evict_stream, self.fetch_stream, self.demand_stream):
            stream.synchronize()

    def wait_until_idle(self) -> None:
        self.wait_for_copies()
        self.current_compute_stream().synchronize()

    def current_compute_stream(self) -> torch.cuda.Stream:
        """The current stream, behind what the last one was given.

        Asked for on the caller's thread and before any side stream is entered: inside one, it would be that
        side stream, and waiting for itself orders nothing.
        """
        stream = torch.cuda.current_stream(self.index)
        if stream == self._compute:
            return self._compute
        assert stream not in (self.evict_stream, self.fetch_stream, self.demand_stream), (
            "inside a side stream"
        )
        stream.wait_stream(self._compute)
        self._compute = stream
        return stream


# ---- the link

LOOK_BYTES = 128 * 2**20  # pinned
LOOK_COUNT = 4  # copies each way
LOOK_LEAST_BYTES = 2**20  # of the device's memory, each way
SMALL_BYTES = 4096


def measure_host_tier_link(
    device: CudaDevice, tier: HostTier, seconds: float, memory_bytes: int, progress: Callable[[str], None]
) -> LinkRates | str:
    """The link device <-> host, or why there is none to be measured. The places go back to the tier."""
    count = 2 * LOOK_COUNT
    most = min(min(LOOK_BYTES, tier.limit_bytes) // count, (memory_bytes - SMALL_BYTES) // 2)
    size = most // GRAIN_BYTES * GRAIN_BYTES
    places = [place for _ in range(count) if size and (place := tier.reserve(size)) is not None]
    taken = [device.allocate_scratch(each, min(each, LOOK_LEAST_BYTES)) for each in (SMALL_BYTES, size, size)]
    scratches = [each for each in taken if each is not None]
    try:
        if len(places) < count:
            limit = fmt_bytes(tier.limit_bytes)
            return str(tier.refused or f"{limit} are too little to measure a link with")
        if len(scratches) < len(taken):
            return f"the GPU has less than {fmt_bytes(2 * LOOK_LEAST_BYTES)} free to measure the link with"
        return _measure_host_rates(
            device, tier, seconds, places, [each.storage for each in scratches], progress
        )
    finally:
        for scratch in scratches:
            scratch.end()
        for place in places:
            tier.release(place)


def _measure_host_rates(
    device: CudaDevice,
    tier: HostTier,
    seconds: float,
    places: Sequence[PinnedBlock],
    storages: Sequence[torch.UntypedStorage],
    progress: Callable[[str], None],
) -> LinkRates:
    small, source, target = storages
    out = [
        partial(_start_copy, device, tier.copy_out_starter(place), source) for place in places[:LOOK_COUNT]
    ]
    into = [
        partial(_start_copy, device, tier.copy_in_starter(place), target) for place in places[LOOK_COUNT:]
    ]
    out_bytes, into_bytes = LOOK_COUNT * source.nbytes(), LOOK_COUNT * target.nbytes()

    def measure_rate(moves: Sequence[Callable[[], Ticket]], size: int) -> int:
        torch.cuda.synchronize(device.device)
        start, moved = time.monotonic(), 0
        while time.monotonic() - start < seconds / 2:
            for move in moves:
                move()
            device.wait_for_copies()
            moved += size
        return int(moved / (time.monotonic() - start))

    progress("device to host and back")
    measure_rate(out + into, 0)  # clocks and links of a sleeping GPU are slow for a moment
    evict, fetch = measure_rate(out, out_bytes), measure_rate(into, into_bytes)
    both = measure_rate(out + into, out_bytes + into_bytes) // 2
    latencies = []
    for start in (tier.copy_out_starter(places[0]), tier.copy_in_starter(places[0])):
        begun = time.monotonic_ns()
        for _ in range(16):
            _start_copy(device, start, small)
            device.wait_for_copies()
        latencies.append((time.monotonic_ns() - begun) // 16)
    torch.cuda.synchronize(device.device)
    return LinkRates("host", evict, fetch, both, both, *latencies)


def _start_copy(device: CudaDevice, start: Start, storage: torch.UntypedStorage) -> Ticket:
    return start(storage, device.mark_compute_stream())
