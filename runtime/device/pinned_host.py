"""The host tier of a GPU: places in pinned memory, and the copies between them and the device.

    a place    a part of a segment; a tensor has one while its bytes are in host memory
    a segment  memory that the driver pinned. It stays pinned for as long as the device is used

Pinning takes a tenth of a second per GiB and more. So a thread pins the next segment while there is room in
the last one. At most one segment more than is used is pinned: `limit_bytes` is a limit, and not a wish.
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

SEGMENT_BYTES = 2**30  # pinned memory grows by this much at a time, or by what one tensor needs
GRAIN_BYTES = 64 * 1024  # of places in pinned memory, so that equal sizes with small differences share them
PIECE_BYTES = 16 * 2**20  # a third of a millisecond of a link that carries 50 GB/s


class CopyStreams(Protocol):
    """A GPU with streams for copies, one per way."""

    copier: _native.CudaCopier
    evict_stream: torch.cuda.ExternalStream
    fetch_stream: torch.cuda.ExternalStream
    demand_stream: torch.cuda.ExternalStream  # before what the fetch stream has queued

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return pinned memory."""
        ...


class CopyTicket:
    """A copy that was issued when this was made: the host has nothing to wait for, the compute stream has."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Return whether the compute stream would not wait either."""
        return bool(self.event.query())

    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True, order=True)
class PinnedBlock:
    """Bytes of pinned memory."""

    address: int
    size_bytes: int


class HostTier:
    """Pinned copies of tensors. In steady state nothing is allocated: the places of one step serve the next.

    A place may be given back as soon as the fetch from it has ended on the host: what is copied there next
    waits for a mark on the compute stream, which has waited for that fetch.
    """

    def __init__(self, device: CopyStreams, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self.refused: OSError | None = None  # why there is less than the limit
        self._segments: list[_native.Slabs] = []
        self._free: list[PinnedBlock] = []  # by address; neighbours within a segment are merged
        self._starts: set[int] = set()
        self._largest_bytes = 0  # of all places that were reserved
        self._thread = ThreadPoolExecutor(1, "teraio-pins")  # Python waits for it before the process ends
        self._ahead: Future[_native.Slabs] | None = None  # the segment that the thread pins

    def reserve(self, size_bytes: int) -> PinnedBlock | None:
        """Return the smallest free place that fits; None when the limit is reached."""
        size_bytes = -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
        if self._ahead is not None and self._ahead.done():
            self._add_segment_pinned_ahead()
        found = self._smallest_fitting_place(size_bytes)
        if found is None:
            self._add_segment_that_fits(size_bytes)
            if (found := self._smallest_fitting_place(size_bytes)) is None:
                return None
        self._free.remove(found)
        if found.size_bytes > size_bytes:
            insort(self._free, PinnedBlock(found.address + size_bytes, found.size_bytes - size_bytes))
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        self._start_pinning_next_segment()
        return PinnedBlock(found.address, size_bytes)

    def release(self, place: PinnedBlock) -> None:
        insort(self._free, place)
        at = self._free.index(place)
        for left in (at, at - 1):  # with the right neighbour, then with the left one
            if 0 <= left < len(self._free) - 1:
                one, two = self._free[left : left + 2]
                if one.address + one.size_bytes == two.address and two.address not in self._starts:
                    self._free[left : left + 2] = [PinnedBlock(one.address, one.size_bytes + two.size_bytes)]

    def _smallest_fitting_place(self, size_bytes: int) -> PinnedBlock | None:
        fits = [place for place in self._free if place.size_bytes >= size_bytes]
        return min(fits, key=lambda place: (place.size_bytes, place.address)) if fits else None

    def _start_pinning_next_segment(self) -> None:
        """Have the thread pin one more segment if the largest free place is too small for what may come."""
        room_bytes = max((place.size_bytes for place in self._free), default=0)
        if self._ahead is not None or room_bytes >= max(SEGMENT_BYTES // 2, self._largest_bytes):
            return
        size = self._next_segment_bytes(self._largest_bytes)
        if size < GRAIN_BYTES:
            return
        try:
            self._ahead = self._thread.submit(self._pin_segment, size)
        except RuntimeError:  # no more threads, as the process ends: `_add_segment_that_fits` pins
            self._ahead = None

    def _add_segment_that_fits(self, size_bytes: int) -> None:
        """Take the segment that is being pinned; if the place still does not fit, pin one here and now."""
        if self._ahead is not None:
            self._add_segment_pinned_ahead()
            if self._smallest_fitting_place(size_bytes) is not None:
                return
        size = self._next_segment_bytes(size_bytes)
        if size >= size_bytes:
            self._add_segment(partial(self._pin_segment, size))

    def _next_segment_bytes(self, size_bytes: int) -> int:
        """Return how large the next segment is; the last one is cut to what the limit leaves."""
        wanted = max(1, -(-size_bytes // SEGMENT_BYTES)) * SEGMENT_BYTES
        return min(wanted, (self.limit_bytes - self.pinned_bytes) // GRAIN_BYTES * GRAIN_BYTES)

    def _pin_segment(self, size: int) -> _native.Slabs:
        count = -(-size // SEGMENT_BYTES)  # a slab is at most 1 GiB; they lie side by side
        return self.device.allocate_slabs(-(-size // count // 4096) * 4096, count)

    def _add_segment_pinned_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        self._add_segment(ahead.result)

    def _add_segment(self, pinned: Callable[[], _native.Slabs]) -> None:
        """Add a segment to the free places. If the driver refused it, what is pinned stays in use."""
        try:
            segment = pinned()
        except OSError as error:  # there will be no more of it
            self.limit_bytes, self.refused = self.pinned_bytes, error
            return
        self._segments.append(segment)
        self._starts.add(segment.address)
        self.pinned_bytes += segment.arena_bytes
        insort(self._free, PinnedBlock(segment.address, segment.arena_bytes))

    def copy_out_starter(self, place: PinnedBlock) -> Start:
        """Return what `begin_copy_out` calls: a copy of the storage into the place."""
        device = self.device
        stream = device.evict_stream
        return lambda storage, mark: _issue_copy(device.copier, stream, mark, storage, place, out=True)

    def copy_in_starter(self, place: PinnedBlock, demand: bool = False) -> Start:
        """Return what `begin_copy_in` calls: a copy of the place into the storage. A demanded copy does not
        queue behind the prefetches."""
        device = self.device
        stream = device.demand_stream if demand else device.fetch_stream
        return lambda storage, mark: _issue_copy(device.copier, stream, mark, storage, place, out=False)


def _issue_copy(
    copier: _native.CudaCopier,
    stream: torch.cuda.Stream,
    mark: Mark,
    storage: torch.UntypedStorage,
    place: PinnedBlock,
    out: bool,
) -> CopyTicket:
    """Give the stream a copy behind the mark.

    The driver is asked, not torch: a tensor over the place, one over the storage and their `copy_` take
    several times as long, and allocate nothing either. Torch's own host allocator need not know of the copy.
    """
    size = storage.nbytes()
    assert size <= place.size_bytes, f"{size} bytes and a place of {place.size_bytes}"
    stream.wait_event(mark.event)
    on_device, handle = storage.data_ptr(), stream.cuda_stream
    for start, end in piece_bounds(size):
        error = copier.give_to(handle, on_device + start, place.address + start, end - start, out)
        if error != 0:
            raise RuntimeError(
                f"the CUDA driver refuses a copy of {fmt_bytes(size)} {'from' if out else 'to'} the device "
                f"(error {error}): an earlier kernel or copy has failed. Nothing on this device can go on"
            )
    event = torch.cuda.Event()
    event.record(stream)
    return CopyTicket(event)


def piece_bounds(size: int) -> Iterator[tuple[int, int]]:
    """Yield where each piece of a copy starts and ends. The last one is less than two.

    A copy engine ends the copy that it is in before it takes one of a stream with a higher priority. So a
    demanded fetch waits for one piece of what is fetched ahead, and not for a whole tensor.
    """
    last = max(0, size // PIECE_BYTES - 1) * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        yield start, start + PIECE_BYTES
    yield last, size
