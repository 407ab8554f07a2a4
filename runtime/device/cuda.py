"""A GPU as the device whose memory the budget limits: streams, events, pinned memory.

device.py describes four waits, which order copies and kernels. This file implements the waits with CUDA
events.

    compute stream    the current stream when a kernel is launched
    evict stream      device -> pinned memory                     |
    fetch stream      pinned memory -> device                     |  host tier: the caller's thread issues
    demand stream     pinned memory -> device, before prefetches  |  these copies
    copier's streams  device <-> pinned slabs <-> files              ssd tier: the transfer engine's threads
                                                                     issue these copies

The evict, fetch and demand streams are the side streams. Only this file and pinned_host.py use side streams.
User code may change the current stream, and then the compute stream changes. A new compute stream first waits
for the previous compute stream. torch's allocator reuses freed memory only after the compute stream has
stopped using this memory.

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
_IDLE_STREAMS: dict[tuple[int, int], list[int]] = defaultdict(list)  # (GPU, priority) -> unused streams


def gpu_names_from_driver() -> tuple[str, ...]:
    """Return the names of all GPUs, from the driver and without torch. Without a driver, return ()."""
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
    """Return the reason why this process can use no GPU, or None if it can use a GPU."""
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
    """Let torch allocate later tensors from expandable segments, to waste less memory.

    In a segment of fixed size, a tensor may get a free block that is larger than the tensor. In this case
    the allocator splits the block, but only if at least 1 MiB would remain. So each of the hundreds of
    tensors of a step may waste up to 1 MiB. The budget's reserve must then include these bytes.

    If the user has changed any allocator setting, this function changes nothing. New settings would reset all
    settings that they do not name.
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
    """Return True if the user has changed torch's allocator settings, in the environment or at run time."""
    if any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        return True
    try:
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    except RuntimeError:  # the user has installed another allocator, which has no snapshot
        return True
    return any(settings.get(name) for name in ALLOCATOR_SETTINGS)


def _can_expand_segments() -> bool:
    """Return True if the current GPU supports expandable segments. torch itself has no such check."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        can, device = ctypes.c_int(1), ctypes.c_int(0)
        if driver.cuCtxGetDevice(ctypes.byref(device)) == 0:
            driver.cuDeviceGetAttribute(ctypes.byref(can), VIRTUAL_MEMORY_MANAGEMENT, device)
        return bool(can.value)
    except (OSError, AttributeError):
        return True


class CudaDevice(CudaMemory):
    """One GPU of this process: the GPU with the given index, or the current GPU if `index` is None.

    The constructor creates the CUDA context if the process has none. Later, user code may make another GPU
    current. So every call of torch in this class names its GPU.
    """

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(torch.cuda.current_device() if index is None else index)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            enable_expandable_segments()
            self.copier = _native.CudaCopier()  # it takes the context that is current at its construction
        self.evict_stream, self.fetch_stream = self._private_stream(), self._private_stream()
        # A copy on this stream overtakes prefetches that are queued on the fetch stream. The copy engine
        # takes copies from all streams in turn.
        self.demand_stream = self._private_stream(priority=-1)
        self._compute = torch.cuda.current_stream(self.index)
        self.observer = observer_of_process()

    def _private_stream(self, priority: int = 0) -> torch.cuda.ExternalStream:
        """Return a stream that user code cannot get from torch.

        torch has 32 streams of each priority, and the 33rd request returns the first stream again. A stream
        from torch could therefore also be a stream of user code.

        The returned stream is never destroyed. A later CudaDevice reuses it. When torch frees memory, torch
        may query the streams that used the memory, and the query of a destroyed stream is undefined.
        """
        idle = _IDLE_STREAMS[self.index, priority]
        handle = idle.pop() if idle else self.copier.stream(priority)
        weakref.finalize(self, idle.append, handle)
        return torch.cuda.ExternalStream(handle, self.device)

    def resize_storage(self, storage: Any, size_bytes: int) -> None:
        """Resize the storage. Freed memory is reused only after all work launched on the compute stream so
        far.

        torch's allocator reuses freed memory on the stream on which the memory was allocated. The compute
        stream may be another stream. `record_stream` makes the allocator wait for the compute stream too.

        A small storage may be on the CPU, such as an optimizer's step counter. No stream uses it.
        """
        if size_bytes == 0 and storage.nbytes() and storage.device.type == "cuda":
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            tensor.record_stream(self.current_compute_stream())
        storage.resize_(size_bytes)

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        self.join_user_streams()  # user code may still write the storage on any stream
        return super().begin_copy_out(storage, start)

    def begin_copy_out_of_block(self, block: Any, start: Start) -> Pending:
        self.join_user_streams()  # user code may have written the bytes on any stream
        return super().begin_copy_out_of_block(block, start)

    def free_block(self, block: Any) -> None:
        self.join_user_streams()  # user code may still read the bytes on any stream
        super().free_block(block)

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        self.join_user_streams()  # user code may still read the storage on any stream
        if self.observer is None:
            super().drop_bytes(storage, unwritten)
        else:
            self.drop_bytes_through_block(storage, unwritten)

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        self.copier.unpin(slabs)

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return slabs (pinned host memory) on huge pages.

        The slabs are pinned until `unpin_slabs` is called or the copier ends. cudaHostAlloc does not report
        the size of its pages. So this method first allocates huge pages, and then pins them.
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
        """Wait until all moments have passed, and return their times in ns. The first time is 0.

        Each time is the sum of the times between neighbouring moments. The driver returns the time between
        two events in milliseconds, as a float with 24 bits. For a time of an hour, such a float is too
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
        """Return the current stream. If it has changed, make it wait for the previous compute stream.

        Call this method on the thread that launches kernels, while no side stream is current. A side stream
        would then count as the compute stream, and a stream that waits for itself orders nothing.
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

LOOK_BYTES = 128 * 2**20  # pinned memory for a measurement of the link
LOOK_COUNT = 4  # number of copies in each direction
LOOK_LEAST_BYTES = 2**20  # with less device memory in each direction, the link is not measured
SMALL_BYTES = 4096


def measure_host_tier_link(
    device: CudaDevice, tier: HostTier, seconds: float, memory_bytes: int, progress: Callable[[str], None]
) -> LinkRates | str:
    """Return the rates of the link between device and host, or the reason why the link cannot be measured."""
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
    measure_rate(out + into, 0)  # warm-up: at first, the clocks and links of an idle GPU are slow
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
