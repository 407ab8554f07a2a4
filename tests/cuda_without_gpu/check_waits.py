"""Checks of each wait of teraio's CUDA device. With the wait, the bytes must be right. Without the wait, they
must be wrong.

Each stream is up to 30 ms late. So an operation without its wait nearly always runs too early.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import plants
import torch

from teraio.runtime.device.cuda import CudaDevice
from teraio.runtime.device.pending_transfer import Mark
from teraio.runtime.store.store import Store

VARIABLES = {"STANDIN_LATE_US": "30000"}
BYTES = 4 << 20
BEFORE, OLD, NEW = 3, 7, 9
ATTEMPTS = 8


class Bench:
    """A CUDA device with a block of pinned memory, and methods that make tensors of bytes."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.host = self.device.make_host_tier(64 << 20)
        place = self.host.reserve(BYTES)
        assert place is not None
        self.place = place
        self.used: list[int] = []  # keys of the storages that the observer has seen
        torch.cuda.synchronize()

    def full_of(self, value: int) -> torch.Tensor:
        """Return a tensor that a kernel fills with `value`. This kernel may still be running.

        Until it ends, the tensor contains `BEFORE`, so neither `OLD` nor `NEW`.
        """
        tensor = torch.empty(BYTES, dtype=torch.uint8, device="cuda").fill_(BEFORE)
        torch.cuda.synchronize()
        return tensor.fill_(value)

    def in_freed(self, value: int) -> torch.Tensor:
        """Return a tensor in the memory that was freed last, filled with `value`.

        Do not wait for kernels that still use this memory.
        """
        return torch.empty(BYTES, dtype=torch.uint8, device="cuda").fill_(value)

    def forget(self) -> None:
        """Let the observer forget the storages of a scene, because the storages of the next scene may have
        the same addresses.
        """
        assert self.device.observer is not None
        for key in self.used:
            self.device.observer.forget_storage(key, alive=False)
        self.used.clear()

    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return the tensor's storage. Note its key, so that `forget` can later remove it from the
        observer.
        """
        storage = tensor.untyped_storage()
        self.used.append(storage._cdata)
        return storage

    def begin_copy_out(self, tensor: torch.Tensor) -> Any:
        return self.device.begin_copy_out(self.storage(tensor), self.host.copy_out_starter(self.place))

    def begin_copy_in(self, tensor: torch.Tensor) -> Any:
        return self.device.begin_copy_in(
            tensor.untyped_storage(), BYTES, self.host.copy_in_starter(self.place)
        )

    def fill_place(self, value: int) -> None:
        ctypes.memset(self.place.address, value, BYTES)

    def in_place(self) -> set[int]:
        """Return the set of byte values in the block of pinned memory."""
        return set(ctypes.string_at(self.place.address, BYTES))

    def emptied(self) -> torch.Tensor:
        """Return a tensor whose bytes were freed. The allocator may give this memory to the next tensor of
        the same size.
        """
        tensor = self.full_of(NEW)
        torch.cuda.synchronize()
        self.device.drop_bytes(self.storage(tensor), unwritten=False)
        return tensor


def evict(bench: Bench) -> bool:
    pending = bench.begin_copy_out(bench.full_of(OLD))
    bench.device.end_copy_and_free(pending)
    torch.cuda.synchronize()
    return bench.in_place() == {OLD}


def evict_frees(bench: Bench) -> bool:
    tensor = bench.full_of(OLD)
    torch.cuda.synchronize()
    bench.device.end_copy_and_free(bench.begin_copy_out(tensor))
    taken = bench.in_freed(NEW)
    torch.cuda.synchronize()
    del taken
    return bench.in_place() == {OLD}


def keep_and_write(bench: Bench) -> bool:
    tensor = bench.full_of(OLD)
    torch.cuda.synchronize()
    bench.device.end_copy_without_freeing(bench.begin_copy_out(tensor))
    tensor.fill_(NEW)
    torch.cuda.synchronize()
    return bench.in_place() == {OLD}


def fetch_into_used(bench: Bench) -> bool:
    bench.fill_place(OLD)
    tensor = bench.emptied()
    used = bench.in_freed(NEW)  # its kernel may still be running when the fetch reuses the memory
    del used
    bench.device.end_copy_in(bench.begin_copy_in(tensor))
    torch.cuda.synchronize()
    return set(tensor.cpu().tolist()) == {OLD}


def fetch_and_read(bench: Bench) -> bool:
    bench.fill_place(OLD)
    tensor = bench.emptied()
    bench.device.end_copy_in(bench.begin_copy_in(tensor))
    read = tensor + 0
    torch.cuda.synchronize()
    return set(read.cpu().tolist()) == {OLD}


def other_stream(bench: Bench) -> bool:
    tensor = bench.full_of(OLD)
    bench.device.mark_compute_stream()  # as each slot does in a training
    with torch.cuda.stream(torch.cuda.Stream()):
        pending = bench.begin_copy_out(tensor)
        bench.device.end_copy_without_freeing(pending)
    torch.cuda.synchronize()
    return bench.in_place() == {OLD}


class _Fails:
    """A ticket (handle of a transfer) for a fetch that failed after some of its copies were issued."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise OSError("a part of it could not be read")


def failed_fetch(bench: Bench) -> bool:
    bench.fill_place(OLD)
    tensor = bench.emptied()

    def start(storage: Any, mark: Mark) -> _Fails:
        bench.host.copy_in_starter(bench.place)(storage, mark)
        return _Fails()

    pending = bench.device.begin_copy_in(bench.storage(tensor), BYTES, start)
    try:
        bench.device.end_copy_in(pending)
    except OSError:
        taken = bench.in_freed(NEW)
    torch.cuda.synchronize()
    return set(taken.cpu().tolist()) == {NEW}


def broken_off_fetch(bench: Bench) -> bool:
    """Interrupt a fetch that has already issued its copy by Ctrl-C. Return True if no byte is wrong."""
    bench.fill_place(OLD)
    tensor = bench.emptied()

    def start(storage: Any, mark: Mark) -> Any:
        bench.host.copy_in_starter(bench.place)(storage, mark)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        bench.device.begin_copy_in(bench.storage(tensor), BYTES, start)
    taken = bench.in_freed(NEW)
    torch.cuda.synchronize()
    return set(taken.cpu().tolist()) == {NEW}


def evict_of_another_streams_memory(bench: Bench) -> bool:
    """Evict a weight that was allocated on the default stream, while the training runs on another stream.

    Return True if the evicted bytes are right.
    """
    tensor = bench.full_of(OLD)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        bench.device.end_copy_and_free(bench.begin_copy_out(tensor))
    taken = bench.in_freed(NEW)  # as a next batch would be, made on the default stream
    torch.cuda.synchronize()
    del taken
    return bench.in_place() == {OLD}


def drop_of_another_streams_memory(bench: Bench) -> bool:
    tensor = bench.full_of(OLD)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        read = tensor + 0
        bench.device.drop_bytes(bench.storage(tensor))
    taken = bench.in_freed(NEW)
    torch.cuda.synchronize()
    del taken
    return set(read.cpu().tolist()) == {OLD}


def host_reads(bench: Bench) -> bool:
    tensor = bench.full_of(OLD)
    bench.device.end_copy_without_freeing(bench.begin_copy_out(tensor))
    bench.device.wait_until_idle()
    return bench.in_place() == {OLD}


@contextmanager
def stored(bench: Bench) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(
            folder,
            size_bytes=16 << 20,
            device=bench.device,
        )
        try:
            yield store
        finally:
            store.close()


def store_evict(bench: Bench) -> bool:
    with stored(bench) as store:
        extent, tensor = store.reserve(BYTES, "t"), bench.full_of(OLD)
        storage = bench.storage(tensor)
        address = storage.data_ptr()
        pending = bench.device.begin_copy_out(
            storage, lambda _, mark: store.write(extent, address, "t", event=mark.handle)
        )
        bench.device.end_copy_and_free(pending)
        back = torch.empty_like(tensor)
        store.read(extent, back.data_ptr(), "t").wait()
        return set(back.cpu().tolist()) == {OLD}


def store_fetch(bench: Bench) -> bool:
    with stored(bench) as store:
        extent, tensor = store.reserve(BYTES, "t"), bench.full_of(OLD)
        torch.cuda.synchronize()
        storage = bench.storage(tensor)
        store.write(extent, storage.data_ptr(), "t").wait()
        bench.device.drop_bytes(storage, unwritten=False)
        bench.full_of(NEW)  # this new tensor gets the freed memory
        pending = bench.device.begin_copy_in(
            storage, BYTES, lambda to, mark: store.read(extent, to.data_ptr(), "t", event=mark.handle)
        )
        bench.device.end_copy_in(pending)
        read = tensor + 0
        right = set(read.cpu().tolist()) == {OLD}
        pending.ticket.wait()
        return right


def wrong_again(bench: Bench, scene: Callable[[Bench], bool]) -> bool:
    torch.cuda.synchronize()
    bench.fill_place(BEFORE)
    try:
        return not scene(bench)
    finally:
        bench.forget()


def left_out(scene: Callable[[Bench], bool], plant: Callable[[], None]) -> dict[str, Any]:
    """Check that the scene's bytes are right in all attempts with the wait, and wrong in some attempts
    without it.
    """
    bench = Bench()
    wrong = sum(wrong_again(bench, scene) for _ in range(ATTEMPTS))
    assert not wrong, f"{wrong} of {ATTEMPTS} are wrong with the wait in place"
    plant()
    wrong = sum(wrong_again(bench, scene) for _ in range(ATTEMPTS))
    torch.cuda.synchronize()
    assert wrong, "the bytes are right without the wait"
    return {"wrong_without": wrong, "of": ATTEMPTS}


CASES = {
    "evict_waits_for_kernels": partial(left_out, evict, plants.evict_waits_not),
    "memory_is_freed_after_the_copy": partial(left_out, evict_frees, plants.freed_before_copied),
    "kept_is_written_after_the_copy": partial(left_out, keep_and_write, plants.written_while_copied),
    "fetch_waits_for_kernels": partial(left_out, fetch_into_used, plants.fetch_waits_not),
    "kernels_wait_for_the_fetch": partial(left_out, fetch_and_read, plants.used_before_fetched),
    "a_new_stream_waits_for_the_last": partial(left_out, other_stream, plants.streams_not_joined),
    "a_failed_fetch_is_drained": partial(left_out, failed_fetch, plants.failed_fetch_not_drained),
    "a_fetch_that_is_broken_off_is_drained": partial(
        left_out, broken_off_fetch, plants.failed_fetch_not_drained
    ),
    "evicted_memory_is_held_until_the_current_stream_is_done": partial(
        left_out, evict_of_another_streams_memory, plants.freed_to_another_stream
    ),
    "dropped_memory_is_held_until_the_current_stream_is_done": partial(
        left_out, drop_of_another_streams_memory, plants.freed_to_another_stream
    ),
    "the_host_waits_until_idle": partial(left_out, host_reads, plants.not_idle),
    "a_store_waits_for_kernels": partial(left_out, store_evict, plants.store_waits_not),
    "kernels_wait_for_a_store": partial(left_out, store_fetch, plants.store_fetch_not_awaited),
}
