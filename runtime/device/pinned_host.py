"""The host tier of a GPU: blocks in pinned memory, and copies between these blocks and the device.

    segment   memory that the driver has pinned; a segment remains pinned until the run ends
    block     a part of a segment; a tensor has a block while its bytes are in host memory

Pinning takes at least a tenth of a second per GiB. So a thread pins the next segment in advance, while the
last segment still has free blocks. At most one segment is pinned in advance. The tier may therefore be
smaller than its limit `limit_bytes`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from teraio import _native
from teraio.units import fmt_bytes

from .pending_transfer import Mark, Start

SEGMENT_BYTES = 2**30  # size of a segment, unless a tensor needs a larger segment
GRAIN_BYTES = 64 * 1024  # all sizes of blocks are multiples, so tensors of similar size can reuse a block
PIECE_BYTES = 16 * 2**20  # a long copy is issued in pieces; one takes a third of a millisecond at 50 GB/s


class CopyStreams(Protocol):
    """A GPU with three streams for copies: (1) to evict, (2) to fetch and (3) to fetch on demand."""

    copier: _native.CudaCopier
    evict_stream: torch.cuda.ExternalStream
    fetch_stream: torch.cuda.ExternalStream
    demand_stream: torch.cuda.ExternalStream  # copies on this stream overtake copies on the fetch stream

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return pinned memory."""
        ...


class CopyTicket:
    """The ticket of an issued copy. The compute stream waits for the copy's event. The host does not wait."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Return True if the copy has ended on its stream."""
        return bool(self.event.query())

    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True, order=True)
class PinnedBlock:
    """A range of pinned memory."""

    address: int
    size_bytes: int


class HostTier:
    """The pinned copies of tensors. After the first steps, each step reuses the previous step's blocks.

    A block may be released while the GPU still copies from it. The host must only have issued the wait of the
    compute stream for this copy. The next copy into the block waits for a later mark on the compute stream,
    so the two copies do not overlap.
    """

    def __init__(self, device: CopyStreams, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self.refused: OSError | None = None  # the error, if the driver has refused to pin a segment
        self._segments: list[_native.Slabs] = []
        self._free: list[PinnedBlock] = []  # free blocks by address; neighbours in one segment are merged
        self._starts: set[int] = set()  # addresses of the segments
        self._largest_bytes = 0  # size of the largest block that was reserved so far
        self._thread = ThreadPoolExecutor(1, "teraio-pins")  # it pins segments; Python joins it at exit
        self._ahead: Future[_native.Slabs] | None = None  # the segment that the thread pins in advance

    def reserve(self, size_bytes: int) -> PinnedBlock | None:
        """Return a block of the tier, or None if the tier has no room up to its limit.

        The block is cut from the smallest free block that is large enough.
        """
        size_bytes = -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
        if self._ahead is not None and self._ahead.done():
            self._add_segment_pinned_ahead()
        found = self._smallest_fitting_block(size_bytes)
        if found is None:
            self._add_segment_that_fits(size_bytes)
            if (found := self._smallest_fitting_block(size_bytes)) is None:
                return None
        self._free.remove(found)
        if found.size_bytes > size_bytes:
            insort(self._free, PinnedBlock(found.address + size_bytes, found.size_bytes - size_bytes))
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        self._start_pinning_next_segment()
        return PinnedBlock(found.address, size_bytes)

    def release(self, block: PinnedBlock) -> None:
        insort(self._free, block)
        at = self._free.index(block)
        for left in (at, at - 1):  # merge the block with its right neighbour, then with its left neighbour
            if 0 <= left < len(self._free) - 1:
                one, two = self._free[left : left + 2]
                if one.address + one.size_bytes == two.address and two.address not in self._starts:
                    self._free[left : left + 2] = [PinnedBlock(one.address, one.size_bytes + two.size_bytes)]

    def _smallest_fitting_block(self, size_bytes: int) -> PinnedBlock | None:
        fits = [block for block in self._free if block.size_bytes >= size_bytes]
        return min(fits, key=lambda block: (block.size_bytes, block.address)) if fits else None

    def _start_pinning_next_segment(self) -> None:
        """Let the thread pin the next segment in advance, if all free blocks are small.

        A free block is small if it is below half a segment, or below the largest block reserved so far.
        """
        largest_free_bytes = max((block.size_bytes for block in self._free), default=0)
        if self._ahead is not None or largest_free_bytes >= max(SEGMENT_BYTES // 2, self._largest_bytes):
            return
        size = self._next_segment_bytes(self._largest_bytes)
        if size < GRAIN_BYTES:
            return
        try:
            self._ahead = self._thread.submit(self._pin_segment, size)
        except RuntimeError:  # the process ends, and no thread can start; the next `reserve` pins by itself
            self._ahead = None

    def _add_segment_that_fits(self, size_bytes: int) -> None:
        """Add the segment that the thread pins now. If then still no free block is large enough, pin another
        segment on the calling thread."""
        if self._ahead is not None:
            self._add_segment_pinned_ahead()
            if self._smallest_fitting_block(size_bytes) is not None:
                return
        size = self._next_segment_bytes(size_bytes)
        if size >= size_bytes:
            self._add_segment(partial(self._pin_segment, size))

    def _next_segment_bytes(self, size_bytes: int) -> int:
        """Return the size of the next segment: full segments for `size_bytes`, but at most the bytes left up
        to the limit."""
        wanted = max(1, -(-size_bytes // SEGMENT_BYTES)) * SEGMENT_BYTES
        return min(wanted, (self.limit_bytes - self.pinned_bytes) // GRAIN_BYTES * GRAIN_BYTES)

    def _pin_segment(self, size: int) -> _native.Slabs:
        count = -(-size // SEGMENT_BYTES)  # a slab has at most 1 GiB; slabs of one call are contiguous
        return self.device.allocate_slabs(-(-size // count // 4096) * 4096, count)

    def _add_segment_pinned_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        self._add_segment(ahead.result)

    def _add_segment(self, pinned: Callable[[], _native.Slabs]) -> None:
        """Add the segment that `pinned` returns to the free blocks.

        If the driver refuses to pin the segment, lower the tier's limit to the bytes pinned so far.
        """
        try:
            segment = pinned()
        except OSError as error:
            self.limit_bytes, self.refused = self.pinned_bytes, error
            return
        self._segments.append(segment)
        self._starts.add(segment.address)
        self.pinned_bytes += segment.arena_bytes
        insort(self._free, PinnedBlock(segment.address, segment.arena_bytes))

    def copy_out_starter(self, block: PinnedBlock) -> Start:
        """Return the function that `begin_copy_out` calls to copy the storage into the block."""
        device = self.device
        stream = device.evict_stream
        return lambda storage, mark: _issue_copy(device.copier, stream, mark, storage, block, out=True)

    def copy_in_starter(self, block: PinnedBlock, demand: bool = False) -> Start:
        """Return the function that `begin_copy_in` calls to copy the block into the storage.

        If `demand` is True, the copy overtakes prefetches.
        """
        device = self.device
        stream = device.demand_stream if demand else device.fetch_stream
        return lambda storage, mark: _issue_copy(device.copier, stream, mark, storage, block, out=False)


def _issue_copy(
    copier: _native.CudaCopier,
    stream: torch.cuda.Stream,
    mark: Mark,
    storage: torch.UntypedStorage,
    block: PinnedBlock,
    out: bool,
) -> CopyTicket:
    """Issue a copy on the stream. The copy waits for the mark.

    The function calls the driver directly. With torch, the copy would need two views and a `copy_`. Then the
    call would take several times as long. The block does not come from torch's host allocator. So this
    allocator need not record the copy.
    """
    size = storage.nbytes()
    assert size <= block.size_bytes, f"{size} bytes and a block of {block.size_bytes}"
    stream.wait_event(mark.event)
    on_device, handle = storage.data_ptr(), stream.cuda_stream
    for start, end in piece_bounds(size):
        error = copier.give_to(handle, on_device + start, block.address + start, end - start, out)
        if error != 0:
            raise RuntimeError(
                f"the CUDA driver refuses a copy of {fmt_bytes(size)} {'from' if out else 'to'} the device "
                f"(error {error}): an earlier kernel or copy has failed. Restart the process"
            )
    event = torch.cuda.Event()
    event.record(stream)
    return CopyTicket(event)


def piece_bounds(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each piece of a copy. The last piece is shorter than 2 * PIECE_BYTES.

    A copy engine ends its current copy before it serves a stream of higher priority. So a fetch on demand
    waits for one piece of a prefetch, and not for a whole tensor.
    """
    last = max(0, size // PIECE_BYTES - 1) * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        yield start, start + PIECE_BYTES
    yield last, size
