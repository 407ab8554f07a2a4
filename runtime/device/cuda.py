"""A GPU as the device: side streams, events, pinned memory.

device.py states the four waits between copies and kernels. This file implements them with CUDA events.

    compute stream    the current stream when a kernel is launched
    evict stream      device -> pinned memory                     |
    fetch stream      pinned memory -> device                     |  host tier: the caller's thread issues
    demand stream     pinned memory -> device, before prefetches  |  these copies
    copier's streams  device <-> pinned slabs <-> files              ssd tier: the transfer engine's threads
                                                                     issue these copies

The evict, fetch and demand streams are the side streams. Only this file and pinned_host.py use them. The
compute stream may change. A new compute stream first waits for the previous compute stream. The allocator
reuses freed memory only after the current compute stream has stopped using it.

Importing this file does nothing on the GPU. The first CudaDevice initializes CUDA.
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
_IDLE_STREAMS: dict[tuple[int, int], list[int]] = defaultdict(list)  # handles by GPU and priority


def gpu_names_from_driver() -> tuple[str, ...]:
    """Return the names of the GPUs that the driver shows. Do not use torch. Without a driver, return ()."""
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
    """Return why this process has no usable GPU, or None if it has one."""
    if torch.version.hip:
        return f"torch {torch.__version__} is built for ROCm, which is not supported"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "the driver shows no GPU"
    return None


VIRTUAL_MEMORY_MANAGEMENT = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # environment variables


def enable_expandable_segments() -> None:
    """Let torch allocate later tensors from expandable segments.

    In a segment of fixed size, torch splits a free block for a tensor only if at least 1 MiB of the block
    would remain. Otherwise the whole block counts as allocated. A step allocates hundreds of tensors, and
    each tensor may waste up to 1 MiB.

    If the user has changed allocator settings, this function changes nothing, because new settings would
    reset every setting that they do not name. Without expandable segments, the budget's reserve includes the
    wasted bytes.
    """
    if _has_user_allocator_settings():
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        log.warning(
            "teraio: torch %s has no way to change its allocator's settings: memory may fragment. Start with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            torch.__version__,
        )
    elif _can_expand_segments():
        change("expandable_segments:True")
    else:
        log.warning(
            "teraio: this GPU's driver cannot map memory piece by piece, as on virtual GPUs: torch's "
            "allocator keeps segments of fixed sizes, and the reserve takes more of the budget"
        )


def _has_user_allocator_settings() -> bool:
    """Return True if the user has changed allocator settings, either in the environment or at run time."""
    if any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        return True
    try:
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    except RuntimeError:  # an allocator that the user installed has no snapshot
        return True
    return any(settings.get(name) for name in ALLOCATOR_SETTINGS)


def _can_expand_segments() -> bool:
    """Return True if the current device supports expandable segments. torch does not check this."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        can, device = ctypes.c_int(1), ctypes.c_int(0)
        if driver.cuCtxGetDevice(ctypes.byref(device)) == 0:
            driver.cuDeviceGetAttribute(ctypes.byref(can), VIRTUAL_MEMORY_MANAGEMENT, device)
        return bool(can.value)
    except (OSError, AttributeError):
        return True


class CudaDevice(CudaMemory):
    """One GPU of this process: the GPU with the given index, or else the current GPU.

    The constructor creates the CUDA context if the process has none. Every call names this device, because
    user code may make another device current.
    """

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(torch.cuda.current_device() if index is None else index)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            enable_expandable_segments()
            self.copier = _native.CudaCopier()  # the copier uses the current CUDA context
        self.evict_stream, self.fetch_stream = self._private_stream(), self._private_stream()
        # A copy on this stream overtakes queued prefetches, because the copy engine serves all streams in
        # turn.
        self.demand_stream = self._private_stream(priority=-1)
        self._compute = torch.cuda.current_stream(self.index)
        self.observer = observer_of_process()

    def _private_stream(self, priority: int = 0) -> torch.cuda.ExternalStream:
        """Return a stream that user code cannot get from torch.

        torch has 32 streams of each priority. The 33rd request returns the first stream again. So user code
        could get the same stream as this device.

        The stream is never destroyed, and a later CudaDevice reuses the stream. When torch frees memory that
        was used on a stream, torch may query that stream. The query of a destroyed stream is undefined.
        """
        idle = _IDLE_STREAMS[self.index, priority]
        handle = idle.pop() if idle else self.copier.stream(priority)
        weakref.finalize(self, idle.append, handle)
        return torch.cuda.ExternalStream(handle, self.device)

    def resize_storage(self, storage: Any, size_bytes: int) -> None:
        """Resize the storage. Kernels reuse freed memory only after the current compute stream's work so far.

        torch's allocator gives freed memory to the stream on which the memory was allocated. If the current
        stream is a different stream, `record_stream` makes the allocator wait for the current stream too.
        """
        if size_bytes == 0 and storage.nbytes():
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            tensor.record_stream(self.current_compute_stream())
        storage.resize_(size_bytes)

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        self.join_user_streams()  # user code may still write the storage on any stream
        return super().begin_copy_out(storage, start)

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        self.join_user_streams()  # user code may still read the storage on any stream
        if self.observer is None:
            super().drop_bytes(storage, unwritten)
            return
        block = self.observer.make_empty_block(storage)
        self.observer.empty_storage(storage, unwritten, block)
        self.resize_storage(block, 0)

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        self.copier.unpin(slabs)

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return slabs on huge pages. The slabs are pinned until `unpin_slabs` is called or the copier ends.

        cudaHostAlloc does not report its page size, so the slabs are allocated first and then pinned.
        """
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
        """Return each moment as the sum of the times between neighbouring moments.

        The driver returns a time in milliseconds as a float with 24 bits. Over an hour, such a float is too
        coarse.
        """
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
        """Return the current stream, after it waits for the previous compute stream.

        Call this on the caller's thread, outside of the side streams. Inside a side stream, the current
        stream would be that side stream, and a stream that waits for itself orders nothing.
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

LOOK_BYTES = 128 * 2**20  # pinned memory for the measurement
LOOK_COUNT = 4  # copies in each direction
LOOK_LEAST_BYTES = 2**20  # least device memory for each direction
SMALL_BYTES = 4096


def measure_host_tier_link(
    device: CudaDevice, tier: HostTier, seconds: float, memory_bytes: int, progress: Callable[[str], None]
) -> LinkRates | str:
    """Return the rates of the link device <-> host, or the reason why it cannot be measured."""
    count = 2 * LOOK_COUNT
    most = min(min(LOOK_BYTES, tier.limit_bytes) // count, (memory_bytes - SMALL_BYTES) // 2)
    size = most // GRAIN_BYTES * GRAIN_BYTES
    blocks = [block for _ in range(count) if size and (block := tier.reserve(size)) is not None]
    taken = [device.allocate_scratch(each, min(each, LOOK_LEAST_BYTES)) for each in (SMALL_BYTES, size, size)]
    scratches = [each for each in taken if each is not None]
    try:
        if len(blocks) < count:
            limit = fmt_bytes(tier.limit_bytes)
            return str(tier.refused or f"{limit} are too little to measure a link with")
        if len(scratches) < len(taken):
            return f"the GPU has less than {fmt_bytes(2 * LOOK_LEAST_BYTES)} free to measure the link with"
        return _measure_host_rates(
            device, tier, seconds, blocks, [each.storage for each in scratches], progress
        )
    finally:
        for scratch in scratches:
            scratch.end()
        for block in blocks:
            tier.release(block)


def _measure_host_rates(
    device: CudaDevice,
    tier: HostTier,
    seconds: float,
    blocks: Sequence[PinnedBlock],
    storages: Sequence[torch.UntypedStorage],
    progress: Callable[[str], None],
) -> LinkRates:
    small, source, target = storages
    out = [
        partial(_start_copy, device, tier.copy_out_starter(block), source) for block in blocks[:LOOK_COUNT]
    ]
    into = [
        partial(_start_copy, device, tier.copy_in_starter(block), target) for block in blocks[LOOK_COUNT:]
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
    measure_rate(out + into, 0)  # warm-up, because the clocks and links of an idle GPU are slow at first
    evict, fetch = measure_rate(out, out_bytes), measure_rate(into, into_bytes)
    both = measure_rate(out + into, out_bytes + into_bytes) // 2
    latencies = []
    for start in (tier.copy_out_starter(blocks[0]), tier.copy_in_starter(blocks[0])):
        begun = time.monotonic_ns()
        for _ in range(16):
            _start_copy(device, start, small)
            device.wait_for_copies()
        latencies.append((time.monotonic_ns() - begun) // 16)
    torch.cuda.synchronize(device.device)
    return LinkRates("host", evict, fetch, both, both, *latencies)


def _start_copy(device: CudaDevice, start: Start, storage: torch.UntypedStorage) -> Ticket:
    return start(storage, device.mark_compute_stream())
