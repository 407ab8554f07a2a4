"""The device with the budgeted memory, and the order of its kernels and copies.

A device's kernels run on its compute stream, in the order of their launches. A kernel may run long after the
host launched the kernel. Copies run on side streams or on threads. Four waits order kernels and copies. The
pictures show where this file issues each wait. In the pictures, K1 to K4 are kernels, and time runs to the
right:

    evict   host      begin ............................. end: wait until issued     free
            compute   K1 (1)mark  K2    K3                       (2)wait             K4 may reuse the memory
            side             +--wait  copy out  event ...............^

    fetch   host      allocate, begin ................... end: (3)wait until issued
            compute   K1 (4)mark  K2    K3                       (2)wait             K4 reads the tensor
            side             +--wait  copy in   event ...............^

    1  K1 may still write the tensor, so the copy waits for K1.
    2  The compute stream waits for the copy before a kernel uses the memory.
    3  A wait for an event that is not recorded yet is a silent no-op. So the host first waits until the
       transfer is issued. This host wait also raises the transfer's errors.
    4  K1 may still use the new memory, which was freed after K1 was launched. So the copy waits for K1.

`Pending` holds the storage until the end, so the source of a copy is kept allocated until the copy has ended.
`record_stream` is not needed for this. A ticket without an event needs no ordering: when its `wait` returns,
the bytes have arrived. On the CPU no ticket has an event.
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
    """Memory of the device for a measurement."""

    address: int
    size_bytes: int
    fill: Callable[[bytes], None]  # writes the bytes to the start of the memory
    end: Callable[[], None]  # returns the memory to the system
    storage: Any = None  # the storage of a tensor on a GPU; None in RAM


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)  # raised when a tensor cannot be allocated


class Host(Protocol):
    """The host tier: copies of tensors in host memory, for a device with memory of its own."""

    def reserve(self, size_bytes: int) -> Any:
        """Return a block for a tensor, or None if no free block is large enough."""
        ...

    def release(self, block: Any) -> None:
        """Free the block. Call this method only after the host has ended the fetch from the block."""
        ...

    def copy_out_starter(self, block: Any) -> Start:
        """Return the function that `begin_copy_out` calls."""
        ...

    def copy_in_starter(self, block: Any, demand: bool = False) -> Start:
        """Return the function that `begin_copy_in` calls. A demanded fetch overtakes prefetches."""
        ...


class Device(MemoryCounts, Clock, Protocol):
    """The engine's interface to a device.

    Each copy is begun once and ended once. The thread that launches the kernels makes both calls.
    """

    kind: str
    device: torch.device  # the torch device of the budgeted memory, with its index
    observer: Observer | None  # sees reads of evicted storages

    @property
    def copier(self) -> _native.Copier | None:
        """Return the copier for the store's `_native.Transfers`, or None if tensors are in RAM."""
        ...

    def capacity_bytes(self) -> int:
        """Return the device's total memory, which a machine file records."""
        ...

    def available_bytes(self) -> int:
        """Return the memory that a budget can use."""
        ...

    def default_budget_bytes(self) -> int:
        """Return the budget in bytes that teraio uses if the user gives no budget."""
        ...

    def allocate_scratch(self, most_bytes: int, least_bytes: int) -> Scratch | None:
        """Allocate `most_bytes` for a measurement. If the allocation fails, halve the size and try again.

        Return None if even an allocation of `least_bytes` fails.
        """
        ...

    def limit_tensors_and_spare_memory(self, size_bytes: int) -> None:
        """Limit the sum of tensors and spare memory. Spare memory is kept from freed tensors for later
        tensors."""
        ...

    def release_unused_spare_memory(self) -> None:
        """Free spare memory that no tensor has used in the last two intervals between calls of this
        method."""
        ...

    def is_uncounted_in_used_bytes(self, storage: Any) -> bool:
        """Return True if `used_bytes` excludes the storage's bytes."""
        ...

    def make_host_tier(self, limit_bytes: int) -> Host | None:
        """Return a host tier of at most `limit_bytes`, or None if the device is itself in host memory."""
        ...

    def measure_host_link(self, host: Host, seconds: float, memory_bytes: int) -> LinkRates | str:
        """Measure the link device <-> host with `memory_bytes` of device memory, and return its rates.

        If this link cannot be measured, return the reason.
        """
        ...

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Return slabs for the copier, on huge pages. If the device has memory of its own, the slabs are
        pinned."""
        ...

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        """Unpin slabs that no transfer uses any more."""
        ...

    def join_user_streams(self) -> None:
        """Order user code between earlier and later work of the compute stream.

        Work that user code launches on the current stream waits for all earlier work of the compute stream.
        Later work of the compute stream waits for user code's work.
        """
        ...

    def wait_until_idle(self) -> None:
        """Block the host until all kernels and copies launched so far have ended."""
        ...

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        """Start the copy out of the storage. Until the copy ends, kernels may read the storage but not write
        it."""
        ...

    def end_copy_and_free(self, pending: Pending) -> None:
        """Wait for the copy and free the storage's bytes. If the copy failed, raise its error instead."""
        ...

    def end_copy_without_freeing(self, pending: Pending) -> None:
        """Wait for the copy and keep the storage's bytes. After this, kernels may write the storage."""
        ...

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        """Free the storage's bytes without a copy.

        With `unwritten`, the bytes must exist unchanged in another tier. Otherwise, no code needs the bytes.
        """
        ...

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        """Allocate memory for the storage and start the copy into this memory."""
        ...

    def end_copy_in(self, pending: Pending) -> bool:
        """Wait for the copy and let kernels use the storage. If the copy failed, empty the storage and raise.

        Return True if the bytes were copied to an address at which a thread waited for them. The memory at
        this address belongs to the observer, not to the allocator.
        """
        ...


class OrderedDevice(UncountedMemory, HostClock):
    """The shared part of all devices. Each device overrides only a few primitives."""

    device = torch.device("cpu")
    observer: Observer | None = None  # sees reads of evicted storages

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
        """Make kernels that are launched from now on wait for `event`."""

    def join_user_streams(self) -> None:
        """Do nothing: this device has no streams."""

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        """Do nothing: slabs in RAM are not pinned."""

    def wait_for_copies(self) -> None:
        """Block the host until no copy is running."""

    def wait_until_idle(self) -> None:
        self.wait_for_copies()

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
        else:
            self.observer.empty_storage(storage, unwritten)

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        block = storage if self.observer is None else self.observer.make_empty_block(storage)
        # Allocate before the mark, because the mark must follow all kernels that used this memory.
        self.resize_storage(block, size_bytes)
        mark = self.mark_compute_stream()
        try:
            return Pending(storage, start(block, mark), mark, block)
        except BaseException:
            self.wait_for_copies()  # a part of the copy may have been issued
            self.resize_storage(block, 0)
            raise

    def end_copy_in(self, pending: Pending) -> bool:
        try:
            self.wait_for_copy(pending.ticket)
        except BaseException:
            if not pending.ticket.done():  # after Ctrl-C the copy still runs, and a later call ends it
                raise
            self.wait_for_copies()
            self.resize_storage(pending.block, 0)
            raise
        return self.give_block_to_storage(pending)

    def give_block_to_storage(self, pending: Pending) -> bool:
        """Give the fetched bytes to the storage.

        Return True if the bytes were copied to an address at which a thread waits for them.
        """
        copied = self.observer is not None and self.observer.give_block_to_storage(
            pending.storage, pending.block
        )
        if copied:
            self.resize_storage(pending.block, 0)
        return copied

    def wait_for_copy(self, ticket: Ticket) -> None:
        """Wait for the copy on the host, and then make the compute stream wait for the copy's event.

        Before the host's wait has ended, the event may not be recorded yet.
        """
        ticket.wait()
        event = getattr(ticket, "event", None)  # isinstance() with a protocol takes 90 us
        if event is not None:
            self.make_kernels_wait_for_event(event)


def is_same_memory(one: torch.device, other: torch.device) -> bool:
    """Return True if both devices have the same memory.

    RAM is the same for every index. `cuda` without an index is the current GPU.
    """
    return one.type == other.type and (one.type != "cuda" or _gpu_index(one) == _gpu_index(other))


def _gpu_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
