"""The device whose memory is budgeted, and the order in which bytes leave it and come back.

A device's kernels run on its compute stream, in order and later than the host says so; copies run on side
streams or on threads of their own. Four waits keep them apart, and only this file makes them:

    evict   host      begin ............................. end: wait until issued     free
            compute   K1 (1)mark  K2    K3                       (2)wait             K4 may reuse the memory
            side             +--wait  copy out  event ...............^

    fetch   host      allocate, begin ................... end: (3)wait until issued
            compute   K1 (4)mark  K2    K3                       (2)wait             K4 reads the tensor
            side             +--wait  copy in   event ...............^

 1  K1 may still be writing the tensor: the copy waits for it.
 2  The compute stream waits for the copy before memory is used again, or for the first time.
 3  Waiting for an event that is not recorded yet is a silent no-op: so the host first waits until the
    transfer is issued. That is also where its errors are raised.
 4  Fresh memory may still be in use by kernels that were given before it was freed: the copy waits for them.

The storage is held by `Pending` until its end, so the source outlives its copy without `record_stream`. A
ticket without an event has nothing to order: when its `wait` returns, the bytes have arrived. On the CPU all
tickets are so.
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
    """Memory where tensors are, for a measurement."""

    address: int
    size_bytes: int
    fill: Callable[[bytes], None]  # puts these at its beginning
    end: Callable[[], None]  # gives it back to the system
    storage: Any = None  # of a tensor; None in RAM


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)  # what a tensor's memory is refused with


class Host(Protocol):
    """Copies of tensors in host memory, beside a device that has memory of its own."""

    def reserve(self, size_bytes: int) -> Any:
        """A place for a tensor; None where there is no room."""
        ...

    def release(self, place: Any) -> None:
        """What was fetched from there has ended on the host."""
        ...

    def copy_out_starter(self, place: Any) -> Start:
        """For `begin_copy_out`."""
        ...

    def copy_in_starter(self, place: Any, demand: bool = False) -> Start:
        """For `begin_copy_in`; on demand, not behind what is fetched ahead."""
        ...


class Device(MemoryCounts, Clock, Protocol):
    """All that the engine asks of a device. One end per begin, on the thread that launches the kernels."""

    kind: str
    device: torch.device  # whose memory it is, with its index
    observer: Observer | None  # sees reads of what is evicted

    @property
    def copier(self) -> _native.Copier | None:
        """For the store's `_native.Transfers`; None: tensors are in RAM."""
        ...

    def capacity_bytes(self) -> int:
        """All memory there is, for a machine file."""
        ...

    def available_bytes(self) -> int:
        """What a budget can be taken from."""
        ...

    def default_budget_bytes(self) -> int:
        """The budget where the user gives none."""
        ...

    def allocate_scratch(self, most_bytes: int, least_bytes: int) -> Scratch | None:
        """So many bytes to measure with, or by halves as many as there are; None if those are too few."""
        ...

    def limit_tensors_and_spare_memory(self, size_bytes: int) -> None:
        """Tensors have so many bytes: what was freed may be kept for others, but no more than that in all."""
        ...

    def release_unused_spare_memory(self) -> None:
        """What was kept and not needed goes back to the system."""
        ...

    def is_uncounted_in_used_bytes(self, storage: Any) -> bool:
        """Whether its bytes are not among those that `used_bytes` counts."""
        ...

    def make_host_tier(self, limit_bytes: int) -> Host | None:
        """Copies in host memory, of so many bytes in all; None where tensors are in it already."""
        ...

    def measure_host_link(self, host: Host, seconds: float, memory_bytes: int) -> LinkRates | str:
        """What it carries, measured with so much of the device's memory, or why there is none after all."""
        ...

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        """Slabs that the copier can use: on huge pages, and pinned where the device copies them itself."""
        ...

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        """Gives back slabs that no transfer uses any more."""
        ...

    def join_user_streams(self) -> None:
        """Orders what user code does now, on the stream that is current, behind all that was given so far;
        and what is given later behind that."""
        ...

    def wait_until_idle(self) -> None:
        """The host waits until kernels and copies given so far are over."""
        ...

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        """Starts the copy out. Until the end it may be read, not written."""
        ...

    def end_copy_and_free(self, pending: Pending) -> None:
        """Frees the storage in place once its copy is confirmed. If that failed: raises, frees nothing."""
        ...

    def end_copy_without_freeing(self, pending: Pending) -> None:
        """Ends an eviction without freeing: from here on the storage may be written again."""
        ...

    def drop_bytes(self, storage: Any, unwritten: bool = True) -> None:
        """Frees a storage in place whose bytes exist elsewhere unchanged, or, if not `unwritten`, are worth
        nothing."""
        ...

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        """Allocates in place and starts the copy in."""
        ...

    def end_copy_in(self, pending: Pending) -> bool:
        """From here on kernels may use the storage. A copy that failed raises and empties the storage.
        Returns whether its bytes are no longer the allocator's: they are where someone waited for them."""
        ...


class OrderedDevice(UncountedMemory, HostClock):
    """What is the same for all kinds of devices, over four primitives that each kind has its own of."""

    device = torch.device("cpu")
    observer: Observer | None = None  # sees reads of what is evicted

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
        """Kernels given from now on wait for `event`."""

    def join_user_streams(self) -> None:
        """Order what user code does now on the stream that is current behind all that was given so far."""

    def unpin_slabs(self, slabs: _native.Slabs) -> None:
        """Give back slabs that no transfer uses any more."""

    def wait_for_copies(self) -> None:
        """The host waits until no copy is running."""

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
        self.resize_storage(
            block, size_bytes
        )  # before the mark: it must stand behind whatever used this memory
        mark = self.mark_compute_stream()
        try:
            return Pending(storage, start(block, mark), mark, block)
        except BaseException:
            self.wait_for_copies()  # a part of the copy may have been given
            self.resize_storage(block, 0)
            raise

    def end_copy_in(self, pending: Pending) -> bool:
        try:
            self.wait_for_copy(pending.ticket)
        except BaseException:
            if not pending.ticket.done():  # Ctrl-C while waiting: the copy still runs, the end comes later
                raise
            self.wait_for_copies()
            self.resize_storage(pending.block, 0)
            raise
        return self.give_block_to_storage(pending)

    def give_block_to_storage(self, pending: Pending) -> bool:
        """Give the storage what was copied in. Return whether that is where someone waits for it."""
        copied = self.observer is not None and self.observer.give_block_to_storage(
            pending.storage, pending.block
        )
        if copied:
            self.resize_storage(pending.block, 0)
        return copied

    def wait_for_copy(self, ticket: Ticket) -> None:
        """Host first, then compute: the other way round the event may not be recorded yet."""
        ticket.wait()
        event = getattr(ticket, "event", None)  # asking isinstance of a protocol takes 90 us
        if event is not None:
            self.make_kernels_wait_for_event(event)


def is_same_memory(one: torch.device, other: torch.device) -> bool:
    """Return whether both have the same memory. RAM is the same by whatever index; `cuda` without an index is
    the current GPU."""
    return one.type == other.type and (one.type != "cuda" or _gpu_index(one) == _gpu_index(other))


def _gpu_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
