"""The device whose memory the budget limits, and the order of its kernels and copies.

A device's kernels run on its compute stream, in the order of their launches. A kernel may run long after its
launch. Copies run on side streams or on threads. Four waits, (1) to (4), order kernels and copies. The
pictures show when this file issues the waits. K1 to K4 are kernels, a mark is an event, and time runs to the
right:

    evict   host      begin ............................. end: wait until issued     free
            compute   K1 (1)mark  K2    K3                       (2)wait             K4 may reuse the memory
            side             +--wait  copy out  event ...............^

    fetch   host      allocate, begin ................... end: (3)wait until issued
            compute   K1 (4)mark  K2    K3                       (2)wait             K4 reads the tensor
            side             +--wait  copy in   event ...............^

    1  K1 may still write the tensor, so the copy waits for K1.
    2  The compute stream waits for the copy before a kernel uses the memory.
    3  A stream's wait for an event that is not recorded yet does nothing. So the host first waits until the
       copy is issued and its event is recorded. This wait of the host also raises the copy's errors.
    4  The fetch may allocate memory that was freed after the launch of K1. K1 may still use this memory,
       so the copy waits for K1.

`Pending` is a copy in flight. It holds a reference to the storage, so the memory of the copy is not freed
early, and `record_stream` is not necessary. A ticket without an event needs no ordering: when its `wait`
returns, the bytes have arrived. On the CPU, no ticket has an event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from teraio import _native

from ..torch_extension.observer import Observer
from .clock import Clock, HostClock
from .link_rates import LinkRates
from .memory_counts import MemoryCounts, UncountedMemory
from .pending_transfer import Mark, Pending, Start, Ticket


@dataclass(slots=True)
class Scratch:
    """Memory of the device that a measurement uses for a short time."""

    address: int
    size_bytes: int
    fill: Callable[[bytes], None]  # writes the bytes to the start of the memory
    end: Callable[[], None]  # returns the memory to the system
    storage: Any = None  # on a GPU: the torch storage that has this memory; None in RAM


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)  # torch raises one of these if it cannot allocate


class Host(Protocol):
    """The host tier: copies of tensors in host memory, for a device whose memory is not host memory."""

    def reserve(self, size_bytes: int) -> Any:
        """Return a block for a tensor, or None if no free block is large enough."""
        ...

    def release(self, block: Any) -> None:
        """Free the block. Call this method only after the call that ended the fetch from the block."""
        ...

    def copy_out_starter(self, block: Any) -> Start:
        """Return the function that copies a storage into the block. `begin_copy_out` calls this function."""
        ...

    def copy_in_starter(self, block: Any, demand: bool = False) -> Start:
        """Return the function that copies the block into a storage. `begin_copy_in` calls this function.

        If `demand` is True, the copy overtakes prefetches.
        """
        ...


class Device(MemoryCounts, Clock, Protocol):
    """The engine's interface to a device.

    For each copy, the engine calls one method that begins the copy, and one method that ends it. The thread
    that launches the kernels makes both calls.
    """

    kind: str
    device: torch.device  # the torch device whose memory the budget limits, with its index
    observer: Observer | None  # detects reads of evicted storages

    @property
    def copier(self) -> _native.Copier | None:
        """Return the copier between the device and the store's host buffers. Return None if the device is
        RAM, because the store then uses its own copier for RAM."""
        ...

    def capacity_bytes(self) -> int:
        """Return the bytes of the device's total memory, as a machine file states them."""
        ...

    def available_bytes(self) -> int:
        """Return the largest number of bytes that a budget can have now."""
        ...

    def default_budget_bytes(self) -> int:
        """Return the budget in bytes for a run whose user gives no budget."""
        ...

    def allocate_scratch(self, most_bytes: int, least_bytes: int) -> Scratch | None:
        """Allocate `most_bytes` for a measurement. If the allocation fails, halve the size and try again.

        Return None if even an allocation of `least_bytes` fails.
        """
        ...

    def limit_tensors_and_spare_memory(self, size_bytes: int) -> None:
        """Limit the bytes of tensors and spare memory together. Spare memory is memory of freed tensors, kept
        for later tensors."""
        ...

    def release_unused_spare_memory(self) -> None:
        """Free the spare memory that no tensor has used for two intervals between calls of this method."""
        ...

    def is_uncounted_in_used_bytes(self, storage: Any) -> bool:
        """Return True if `used_bytes` does not include the storage's bytes."""
        ...

    def make_host_tier(self, limit_bytes: int) -> Host | None:
        """Return a host tier of at most `limit_bytes`. Return None if the device is RAM itself."""
        ...

    def measure_host_link(self, host: Host, seconds: float, memory_bytes: int) -> LinkRates | str:
        """Measure the link between device and host, and return its rates.

        The measurement may use `memory_bytes` of device memory. If it is impossible, return the reason.
        """
        ...

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return slabs: host memory on huge pages, through which the copier moves bytes. If the device is a
        GPU, the slabs are pinned."""
        ...

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        """Unpin slabs that no transfer uses any more."""
        ...

    def join_user_streams(self) -> None:
        """Order work on the streams of user code between earlier and later work of the compute stream.

        User code's work on the current stream waits for all earlier work of the compute stream. Later work of
        the compute stream waits for the work that user code has launched.
        """
        ...

    def wait_until_idle(self) -> None:
        """Block the host until all kernels and copies launched so far have ended."""
        ...

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        """Start the copy of an eviction. Until the copy ends, kernels may read the storage, but not write
        it."""
        ...

    def begin_copy_out_of_block(self, block: Any, start: Start) -> Pending:
        """Start the copy of an eviction from a block that belongs to no tensor."""
        ...

    def end_copy_and_free(self, pending: Pending) -> None:
        """Wait for the copy of an eviction, and free the storage's bytes. If the copy failed, only raise its
        error."""
        ...

    def end_copy_without_freeing(self, pending: Pending) -> None:
        """Wait for the copy of an eviction, and keep the storage's bytes. Kernels may then write them."""
        ...

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        """Free the storage's bytes without a copy.

        If `unwritten` is True, another tier must have the same bytes. If it is False, no code may need the
        bytes any more.
        """
        ...

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        """Start the copy of a fetch: allocate memory for the storage, and copy the bytes into this memory."""
        ...

    def withhold_bytes(self, storage: Any, unwritten: bool) -> Any:
        """Move the storage's bytes into a block that belongs to no tensor, and return the block. From now
        on, the observer detects each read of the storage.

        Raise InUseError if code uses the storage. With `unwritten`, raise WrittenError if the storage was
        written since its copy began.
        """
        ...

    def return_bytes(self, storage: Any, block: Any) -> bool:
        """Give the bytes of a block back to the storage. Return True as `end_copy_in` does."""
        ...

    def free_block(self, block: Any) -> None:
        """Free the bytes of a block that belongs to no tensor."""
        ...

    def end_copy_in_to_block(self, pending: Pending) -> None:
        """Wait for the copy of a fetch, like `end_copy_in`, but leave the bytes in the block of `pending`.
        Run the scalings of the bytes that are owed."""
        ...

    def end_copy_in(self, pending: Pending) -> bool:
        """Wait for the copy of a fetch, and let kernels use the storage. If the copy failed, free the new
        memory and raise the copy's error.

        Return True if a thread of user code waited for the bytes at the storage's old address. In this case
        the bytes are at that address, in memory of the observer and not of the allocator.
        """
        ...


class OrderedDevice(UncountedMemory, HostClock):
    """The shared part of all devices: the order of copies and kernels. A device overrides a few methods."""

    device = torch.device("cpu")
    observer: Observer | None = None  # detects reads of evicted storages

    def resize_storage(self, storage: Any, size_bytes: int) -> None:
        storage.resize_(size_bytes)

    def limit_tensors_and_spare_memory(self, size_bytes: int) -> None:
        pass

    def release_unused_spare_memory(self) -> None:
        pass

    def is_uncounted_in_used_bytes(self, storage: Any) -> bool:
        return False

    def make_host_tier(self, limit_bytes: int) -> Host | None:
        return None

    def measure_host_link(self, host: Host, seconds: float, memory_bytes: int) -> LinkRates | str:
        return f"a {type(self).__name__} has none"

    def mark_compute_stream(self) -> Mark:
        return Mark()

    def make_kernels_wait_for_event(self, event: Any) -> None:
        """Make later kernels wait for `event`. Without streams, there is nothing to do."""

    def join_user_streams(self) -> None:
        """Do nothing, because a device without streams has nothing to order."""

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        """Do nothing, because slabs are pinned only for a GPU."""

    def wait_for_copies(self) -> None:
        """Block the host until no copy runs. Without streams, there is nothing to do."""

    def wait_until_idle(self) -> None:
        self.wait_for_copies()

    def begin_copy_out_of_block(self, block: Any, start: Start) -> Pending:
        mark = self.mark_compute_stream()
        return Pending(block, start(block, mark), mark)

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        mark = self.mark_compute_stream()
        if self.observer is None:
            return Pending(storage, start(storage, mark), mark)
        self.observer.begin_write_watch(storage)
        try:
            return Pending(storage, start(storage, mark), mark)
        finally:
            self.observer.arm_write_watch(storage)

    def end_copy_and_free(self, pending: Pending) -> None:
        self.wait_for_copy(pending.ticket)
        self.drop_bytes(pending.storage)

    def end_copy_without_freeing(self, pending: Pending) -> None:
        self.wait_for_copy(pending.ticket)

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        if self.observer is None:
            self.resize_storage(storage, 0)
        elif unwritten and self.observer.is_asked(storage):
            self.drop_bytes_through_block(storage, unwritten)
        else:
            self.observer.empty_storage(storage, unwritten)

    def drop_bytes_through_block(self, storage: Any, unwritten: bool) -> None:
        """Free the storage's bytes like `drop_bytes`. Before, compute the norms that user code will ask of
        them."""
        assert self.observer is not None
        block = self.withhold_bytes(storage, unwritten)
        if unwritten:
            self.observer.answer_from_block(storage, block)
        self.resize_storage(block, 0)

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        block = storage if self.observer is None else self.observer.make_empty_block(storage)
        # Allocate before the mark, because the mark must be after all kernels that used the new memory.
        self.resize_storage(block, size_bytes)
        mark = self.mark_compute_stream()
        try:
            return Pending(storage, start(block, mark), mark, block)
        except BaseException:
            self.wait_for_copies()  # `start` may have issued a part of the copy before it failed
            self.resize_storage(block, 0)
            raise

    def end_copy_in(self, pending: Pending) -> bool:
        self._wait_for_copy_in(pending)
        return self.return_bytes(pending.storage, pending.block)

    def end_copy_in_to_block(self, pending: Pending) -> None:
        self._wait_for_copy_in(pending)
        if self.observer is not None:
            self.observer.scale_block(pending.storage, pending.block, withheld=True)

    def _wait_for_copy_in(self, pending: Pending) -> None:
        """Wait for the copy of a fetch. If it failed, free the block and raise the copy's error."""
        try:
            self.wait_for_copy(pending.ticket)
        except BaseException:
            if not pending.ticket.done():  # Ctrl-C ended only the wait; a later call ends the copy
                raise
            self.wait_for_copies()
            self.resize_storage(pending.block, 0)
            raise

    def withhold_bytes(self, storage: Any, unwritten: bool) -> Any:
        assert self.observer is not None
        block = self.observer.make_empty_block(storage)
        self.observer.empty_storage(storage, unwritten, block)
        return block

    def free_block(self, block: Any) -> None:
        self.resize_storage(block, 0)

    def return_bytes(self, storage: Any, block: Any) -> bool:
        """Give the bytes of the block to the storage.

        A thread of user code may wait for the bytes at the storage's old address. In this case copy the bytes
        to that address, free the block, and return True.
        """
        copied = self.observer is not None and self.observer.give_block_to_storage(storage, block)
        if copied:
            self.resize_storage(block, 0)
        return copied

    def wait_for_copy(self, ticket: Ticket) -> None:
        """Make the host wait for the ticket, and then make the compute stream wait for the copy's event.

        The host waits first, because the event may not be recorded before.
        """
        ticket.wait()
        event = getattr(ticket, "event", None)  # isinstance(ticket, StreamTicket) would take 90 us
        if event is not None:
            self.make_kernels_wait_for_event(event)


def is_same_memory(one: torch.device, other: torch.device) -> bool:
    """Return True if both devices have the same memory.

    All CPU devices have the same RAM, whatever their index. `cuda` without an index is the current GPU.
    """
    return one.type == other.type and (one.type != "cuda" or _gpu_index(one) == _gpu_index(other))


def _gpu_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
