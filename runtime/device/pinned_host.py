"""The host tier of a GPU: blocks in pinned memory, and copies between these blocks and the device.

    block     a part of a segment; a tensor has a block while its bytes are in host memory
    segment   memory that the driver pinned; a segment is pinned for as long as the device is used

Pinning takes at least a tenth of a second per GiB. So a thread pins the next segment in advance, while the
last segment still has free blocks. At most one unused segment is pinned, because `limit_bytes` is an upper
limit and not a target.
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
GRAIN_BYTES = 64 * 1024  # block sizes are multiples of this, so that similar sizes can share a block
PIECE_BYTES = 16 * 2**20  # size of a copy's piece, which takes a third of a millisecond at 50 GB/s


class CopyStreams(Protocol):
    """A GPU with three streams for copies: (1) to evict, (2) to fetch and (3) to fetch on demand."""

    copier: _native.CudaCopier
    evict_stream: torch.cuda.ExternalStream
    fetch_stream: torch.cuda.ExternalStream
    demand_stream: torch.cuda.ExternalStream  # its copies overtake the queue of the fetch stream

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return pinned memory."""
        ...


class CopyTicket:
    """The ticket of an issued copy. Only the compute stream must wait for the copy, not the host."""

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
    """The pinned copies of tensors. In steady state each step reuses the previous step's blocks.

    A block may be released as soon as the host has ended the fetch from the block. The device may still run
    this fetch. The next copy into the block waits for a mark on the compute stream. Before this mark, the
    compute stream has waited for the fetch.
    """

    def __init__(self, device: CopyStreams, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self.refused: OSError | None = None  # the driver's error, if it refused to pin a segment
        self._segments: list[_native.Slabs] = []
        self._free: list[PinnedBlock] = []  # free blocks by address; neighbours in a segment are merged
        self._starts: set[int] = set()  # addresses of the segments
        self._largest_bytes = 0  # size of the largest block ever reserved
        self._thread = ThreadPoolExecutor(1, "teraio-pins")  # Python joins this thread at exit
        self._ahead: Future[_native.Slabs] | None = None  # the segment that the thread pins now

    def reserve(self, size_bytes: int) -> PinnedBlock | None:
        """Return a block cut from the smallest free block that fits, or None if the limit is reached."""
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
        for left in (at, at - 1):  # merge with the right neighbour, then with the left neighbour
            if 0 <= left < len(self._free) - 1:
                one, two = self._free[left : left + 2]
                if one.address + one.size_bytes == two.address and two.address not in self._starts:
                    self._free[left : left + 2] = [PinnedBlock(one.address, one.size_bytes + two.size_bytes)]

    def _smallest_fitting_block(self, size_bytes: int) -> PinnedBlock | None:
        fits = [block for block in self._free if block.size_bytes >= size_bytes]
        return min(fits, key=lambda block: (block.size_bytes, block.address)) if fits else None

    def _start_pinning_next_segment(self) -> None:
        """Let the thread pin the next segment in advance, if the free blocks are small.

        They are small if the largest one is below half a segment, or below the largest block reserved so
        far.
        """
        largest_free_bytes = max((block.size_bytes for block in self._free), default=0)
        if self._ahead is not None or largest_free_bytes >= max(SEGMENT_BYTES // 2, self._largest_bytes):
            return
        size = self._next_segment_bytes(self._largest_bytes)
        if size < GRAIN_BYTES:
            return
        try:
            self._ahead = self._thread.submit(self._pin_segment, size)
        except RuntimeError:  # at the process's end no thread starts, and `_add_segment_that_fits` pins
            self._ahead = None

    def _add_segment_that_fits(self, size_bytes: int) -> None:
        """Wait for the segment that the thread pins. If still no block fits, pin a segment on this thread."""
        if self._ahead is not None:
            self._add_segment_pinned_ahead()
            if self._smallest_fitting_block(size_bytes) is not None:
                return
        size = self._next_segment_bytes(size_bytes)
        if size >= size_bytes:
            self._add_segment(partial(self._pin_segment, size))

    def _next_segment_bytes(self, size_bytes: int) -> int:
        """Return the size of the next segment, at most the bytes that may still be pinned."""
        wanted = max(1, -(-size_bytes // SEGMENT_BYTES)) * SEGMENT_BYTES
        return min(wanted, (self.limit_bytes - self.pinned_bytes) // GRAIN_BYTES * GRAIN_BYTES)

    def _pin_segment(self, size: int) -> _native.Slabs:
        count = -(-size // SEGMENT_BYTES)  # a slab has at most 1 GiB, and slabs are contiguous
        return self.device.allocate_slabs(-(-size // count // 4096) * 4096, count)

    def _add_segment_pinned_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        self._add_segment(ahead.result)

    def _add_segment(self, pinned: Callable[[], _native.Slabs]) -> None:
        """Add the segment to the free blocks.

        If the driver refused to pin it, lower the limit to the bytes pinned so far.
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

        A demanded copy overtakes the prefetches.
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
    """Issue a copy on the stream, ordered after the mark.

    This function calls the driver and not torch. With torch, two tensor views and their `copy_` would take
    several times as long. torch need not record the copy, because the block does not come from torch's host
    allocator.
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

    A copy engine finishes its current copy before it serves a stream of higher priority. With pieces, a
    demanded fetch waits for one piece of a prefetch instead of a whole tensor.
    """
    last = max(0, size // PIECE_BYTES - 1) * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        yield start, start + PIECE_BYTES
    yield last, size
