"""Tests of the store, which keeps evicted tensors on a drive. For each fault of the drive, a read returns the
written bytes or raises an error."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_rig import MIB, Faulty, Memory, at_rest, check_extents, churn, pressed_while_waiting

from teraio.errors import (
    CorruptTensorError,
    StoreError,
    StoreFullError,
    StoreReadError,
    StoreWriteError,
    TransferTimeoutError,
)
from teraio.runtime.store.extents import BLOCK
from teraio.runtime.store.slabs import HUGE_PAGE, slab_size_and_count
from teraio.runtime.store.space import Extent
from teraio.runtime.store.store import Store
from teraio.runtime.store.ticket import StoreTicket


def fetched(store: Store, extent: Extent, size: int) -> bytes:
    back = Memory(size)
    store.read(extent, back.address, extent.name, demand=True).wait()
    return back.get()


# ---- without faults


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("files", [1, 3])
def test_written_bytes_are_read_unchanged(root: Path, files: int, checksums: bool) -> None:
    store = Store([root] * files, 128 * MIB, checksums=checksums)
    memories = [Memory(size, seed=size) for size in (1, 4095, 4096, 4097, 3 * MIB + 5, 21 * MIB)]
    extents = [store.reserve(memory.size, f"t{memory.size}") for memory in memories]
    tickets = [store.write(e, m.address, e.name) for e, m in zip(extents, memories)]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done() and not ticket.cancel() and not ticket.promote_to_demand()
        ticket.wait()
    for extent, memory in zip(extents, memories):
        assert fetched(store, extent, memory.size) == memory.get()
    assert store.total_written_bytes == store.total_read_bytes == sum(memory.size for memory in memories)
    store.close()
    store.close()


def test_slabs_are_a_twentieth_of_memory_and_at_most_64_mib() -> None:
    for memory in (None, 0, 50 * MIB, 200 * MIB, 1 << 40):
        for files in (1, 2, 5, 16):
            size, count = slab_size_and_count(memory, files)
            assert size % BLOCK == 0
            assert size * count <= max(HUGE_PAGE, min(64 * MIB, (memory or 1 << 60) // 20), count * BLOCK)


def test_full_store_error_names_needed_and_free_bytes(root: Path) -> None:
    with Faulty(root, size_bytes=MIB) as rig:
        extent = rig.store.reserve(MIB - 10, "first")
        with pytest.raises(
            StoreFullError, match=r"'layers.0.wq'.* needs 4 KiB, 0 B of 1 MiB.*store_size"
        ) as got:
            rig.store.reserve(100, "layers.0.wq")
        assert got.value.tensor == "layers.0.wq" and str(root) in got.value.path
        rig.store.release(extent)
        assert rig.store.free_bytes == rig.store.capacity_bytes == MIB
        rig.store.reserve(MIB, "second")


def test_mixed_sizes_leak_no_descriptor_thread_or_block(root: Path) -> None:
    def counts() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))

    before = at_rest(counts)
    store = Store(root, 64 * MIB)
    churn(store, 20)
    running = counts()
    for seed in range(2):
        churn(store, 20, seed)
        assert counts() == running
    assert store.free_bytes == store.capacity_bytes
    assert store.space.transfers.stats()["blocks"] == 0 and not store.space.dropped
    store.close()
    assert at_rest(counts) == before
    assert not list(root.iterdir())


def test_a_prefetch_can_be_promoted_and_a_demand_overtakes(root: Path) -> None:
    with Faulty(root, "memory", size_bytes=64 * MIB) as rig:
        memory = Memory(4 * MIB, seed=1)
        extents = [rig.put(memory, f"t{number}") for number in range(8)]
        backs = [Memory(memory.size) for _ in extents]
        tickets = [rig.store.read(e, b.address, e.name) for e, b in zip(extents, backs)]
        assert tickets[-1].promote_to_demand()
        tickets[-1].wait()
        assert not all(ticket.done() for ticket in tickets)
        for ticket, back in zip(tickets, backs):
            ticket.wait()
            assert back.get() == memory.get()


def test_many_threads_may_wait_for_one_ticket(root: Path) -> None:
    with Faulty(root) as rig:
        memory = Memory(4 * MIB, seed=1)
        for number in range(5):
            rig.fault.add("EIO", "write", nth=1 + number % 2)
            rig.fault.add("delay", "any", delay_s=0.02)
            extent = rig.store.reserve(memory.size, "t")
            ticket = rig.store.write(extent, memory.address, "t")
            raised: list[BaseException] = []

            def wait(ticket: StoreTicket = ticket, raised: list[BaseException] = raised) -> None:
                try:
                    ticket.wait()
                except BaseException as error:  # noqa: BLE001 - the test checks it
                    raised.append(error)

            threads = [threading.Thread(target=wait) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not raised
            rig.fault.clear()
            assert fetched(rig.store, extent, memory.size) == memory.get()
            rig.store.release(extent)


# ---- tickets that are cancelled, dropped or interrupted


def test_cancelled_transfer_raises_and_extent_is_reusable(root: Path) -> None:
    with Faulty(root, "memory") as rig:
        memory = Memory(3 * MIB, seed=1)
        extent = rig.store.reserve(memory.size, "t")
        ticket = rig.store.write(extent, memory.address, "t")
        assert ticket.cancel()
        with pytest.raises(StoreError, match="cancelled"):
            ticket.wait()
        with pytest.raises(CorruptTensorError):
            fetched(rig.store, extent, memory.size)
        rig.store.write(extent, memory.address, "t").wait()
        assert fetched(rig.store, extent, memory.size) == memory.get()


def test_extent_released_with_dropped_ticket_is_reused_only_after_the_transfer(root: Path) -> None:
    with Faulty(root, size_bytes=2 * MIB) as rig:
        memory = Memory(2 * MIB, seed=1)
        rig.fault.add("stall", "write", sticky=True)
        extent = rig.store.reserve(memory.size, "t")
        rig.store.write(extent, memory.address, "t")
        rig.store.release(extent)
        with pytest.raises(StoreFullError):
            rig.store.reserve(BLOCK, "next")
        rig.fault.clear()
        deadline = time.monotonic() + 60
        while rig.store.free_bytes == 0 and time.monotonic() < deadline:
            rig.fault.deliver()
            time.sleep(0.02)
            rig.store.space.finish_transfers_without_ticket()
        assert rig.store.free_bytes == 2 * MIB and not rig.store.space.dropped


def test_ctrl_c_leaves_no_transfer_behind(root: Path) -> None:
    """After Ctrl-C, no transfer may use the tensor's memory, because the caller may free this memory."""
    with Faulty(root) as rig:
        memory = Memory(4 * MIB, seed=1)
        extent = rig.put(memory, "t")
        rig.fault.add("delay", "read", sticky=True, delay_s=0.3)
        back = Memory(memory.size)
        for _ in range(20):
            ticket = rig.store.read(extent, back.address, "t")
            if pressed_while_waiting(ticket, 0.1):
                break
            ticket.cancel()
        else:
            pytest.fail("no interrupt arrived during the wait for the ticket")
        assert ticket.done() and rig.store.space.transfers.stats()["unfinished"] == 0
        then = back.get()
        time.sleep(0.4)
        assert back.get() == then
        rig.fault.clear()
        assert fetched(rig.store, extent, memory.size) == memory.get()


def test_ctrl_c_at_any_moment_ends_the_transfer_and_the_store_goes_on(root: Path) -> None:
    random_ = random.Random(8)
    tried = interrupted = 0
    took_s = 3e-3
    with Faulty(root, size_bytes=32 * MIB) as rig:
        memory = Memory(MIB, seed=1)
        while tried < 80 or (interrupted <= 5 and tried < 1000):
            tried += 1
            extent = rig.store.reserve(memory.size, "t")
            ticket = rig.store.write(extent, memory.address, "t")
            if pressed_while_waiting(ticket, random_.uniform(1e-5, took_s)):
                interrupted += 1
            else:
                ticket.cancel()
            assert ticket.done() and rig.store.space.transfers.stats()["unfinished"] == 0
            began = time.perf_counter()
            rig.store.write(extent, memory.address, "t").wait()
            took_s = max(time.perf_counter() - began, 1e-4)
            assert fetched(rig.store, extent, memory.size) == memory.get()
            rig.store.release(extent)
        check_extents(rig.store.space.extents, [])
        assert rig.store.free_bytes == 32 * MIB
    assert interrupted > 5


# ---- with faults


@pytest.mark.parametrize("where", ["threads", "memory"])
def test_write_that_failed_with_eio_is_retried_at_other_pieces(root: Path, where: str) -> None:
    with Faulty(root, where, size_bytes=4 * MIB) as rig:
        memory = Memory(MIB, seed=1)
        rig.fault.add("EIO", "write", nth=1)
        rig.fault.add("EIO", "write", nth=2)
        extent = rig.store.reserve(memory.size, "t")
        first = extent.pieces
        ticket = rig.store.write(extent, memory.address, "t")
        while not ticket.done():
            pass
        ticket.wait()
        assert extent.pieces != first
        assert fetched(rig.store, extent, memory.size) == memory.get()
        assert rig.store.space.extents.dead_bytes > 0, "the failed block may be used again"
        check_extents(rig.store.space.extents, [extent.pieces])


def test_a_dead_drive_raises_once_names_the_tensor_and_costs_no_capacity(root: Path) -> None:
    with Faulty(root, size_bytes=4 * MIB) as rig:
        memory = Memory(MIB, seed=1)
        rig.fault.add("EIO", "write", sticky=True)
        extent = rig.store.reserve(memory.size, "layers.3.w")
        ticket = rig.store.write(extent, memory.address, "layers.3.w")
        with pytest.raises(StoreWriteError, match=r"'layers\.3\.w'.*EIO.*memory was kept") as got:
            ticket.wait()
        assert (
            got.value.tensor == "layers.3.w" and got.value.path == str(root) and got.value.errno == errno.EIO
        )
        assert memory.get() == Memory(MIB, seed=1).get()
        assert rig.store.capacity_bytes == 4 * MIB
        check_extents(rig.store.space.extents, [extent.pieces])
        rig.fault.clear()
        rig.store.write(extent, memory.address, "layers.3.w").wait()
        assert fetched(rig.store, extent, memory.size) == memory.get()


def test_enospc_in_mid_run_is_a_full_store_and_the_memory_copy_is_kept(root: Path) -> None:
    with Faulty(root) as rig:
        memory = Memory(MIB, seed=1)
        rig.fault.add("ENOSPC", "write", nth=1)
        extent = rig.store.reserve(memory.size, "t")
        with pytest.raises(StoreFullError, match="memory was kept"):
            rig.store.write(extent, memory.address, "t").wait()
        rig.store.write(extent, memory.address, "t").wait()
        assert fetched(rig.store, extent, memory.size) == memory.get()


def test_an_extent_never_yields_the_bytes_of_another(root: Path) -> None:
    """An extent is the place of one tensor in the store. The test lets two extents refer to the same bytes.

    A read by the wrong extent raises an error, because each written block contains the tag of its extent.
    """
    with Faulty(root) as rig:
        memory = Memory(MIB, seed=1)
        mine, other = rig.put(memory, "mine"), rig.put(memory, "other")
        other.pieces, kept = mine.pieces, other.pieces
        with pytest.raises(CorruptTensorError, match="'other'"):
            fetched(rig.store, other, memory.size)
        other.pieces = kept


def test_eio_on_read_is_retried_twice_then_names_the_tensor(root: Path) -> None:
    with Faulty(root, "memory") as rig:
        memory = Memory(100, seed=1)
        extent = rig.put(memory, "t")
        rig.fault.add("EIO", "read", nth=1)
        rig.fault.add("EIO", "read", nth=2)
        assert fetched(rig.store, extent, memory.size) == memory.get()
        rig.fault.add("EIO", "read", sticky=True)
        with pytest.raises(StoreReadError, match="'t'"):
            fetched(rig.store, extent, memory.size)


def test_hung_write_retires_only_its_own_blocks(root: Path) -> None:
    """A write that hung may still reach the drive later.

    The store therefore never uses the blocks of this write again, and the tensor gets other blocks.
    """
    with Faulty(root, "memory", size_bytes=8 * MIB) as rig:
        memory, other = Memory(3 * MIB, seed=1), Memory(3 * MIB, seed=2)
        rig.fault.add("drop", "write", nth=2)
        extent = rig.store.reserve(memory.size, "t")
        with pytest.raises(TransferTimeoutError):
            rig.store.write(extent, memory.address, "t").wait()
        lost = rig.store.space.transfers.lost()
        assert lost and rig.store.space.extents.dead_bytes == sum(size for _, _, size in lost)
        with pytest.raises(StoreError, match="last write failed"):
            rig.store.read(extent, other.address, "t")
        rig.store.write(extent, memory.address, "t").wait()
        extents = [rig.put(Memory(BLOCK, seed=3), "small") for _ in range(rig.store.free_bytes // BLOCK)]
        check_extents(rig.store.space.extents, [one.pieces for one in [extent, *extents]])
        assert rig.fault.deliver() == 1
        assert fetched(rig.store, extent, memory.size) == memory.get()
        assert all(fetched(rig.store, one, BLOCK) == Memory(BLOCK, seed=3).get() for one in extents)


def test_hung_write_without_ticket_retires_its_blocks(root: Path) -> None:
    with Faulty(root, "memory", size_bytes=8 * MIB, deadline_s=0.2) as rig:
        memory = Memory(MIB, seed=1)
        rig.fault.add("drop", "write", nth=1)
        rig.fault.add("delay", "write", nth=2, sticky=True, delay_s=0.15)
        extent = rig.store.reserve(memory.size, "t")
        rig.store.write(extent, memory.address, "t")
        lost_in = extent.pieces
        for _ in range(2):  # two other transfers; meanwhile the deadline of the lost write passes
            rig.store.release(rig.put(Memory(BLOCK, seed=2), "other"))
        rig.store.release(rig.store.reserve(BLOCK, "other"))
        assert not rig.store.space.dropped and extent.pieces == () != lost_in
        rig.store.write(extent, memory.address, "t").wait()
        assert rig.fault.deliver() == 1
        assert fetched(rig.store, extent, memory.size) == memory.get()


def scenario(rig: Faulty, wrong: list[str]) -> int:
    """Write and read three tensors twice.

    Return the number of completed reads, and append the names of tensors with wrong bytes to `wrong`.
    """
    right = 0
    for generation in range(2):
        for number, size in enumerate((5000, MIB // 4 + 1, MIB // 2)):
            memory, back = Memory(size, seed=10 * generation + number), Memory(size)
            try:
                extent = rig.store.reserve(size, f"t{number}")
            except StoreFullError:
                continue  # without its retired blocks, the store has no room for this tensor
            try:
                rig.store.write(extent, memory.address, "t").wait()
                rig.store.read(extent, back.address, "t", demand=True).wait()
                right += 1
                if back.get() != memory.get():
                    wrong.append(f"t{number}")
            except StoreError:
                pass
            rig.store.release(extent)
    return right


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "short", "drop", "flip", "stale", "neighbour"])
def test_every_operation_fails_in_turn_and_no_byte_is_wrong(root: Path, kind: Any) -> None:
    for op in ("read", "write"):
        for sticky in (False, True):
            nth = 1
            while True:
                with Faulty(root, "memory", size_bytes=4 * MIB, memory_bytes=1) as rig:
                    wrong: list[str] = []
                    rig.fault.add(kind, op, nth=nth, sticky=sticky)
                    scenario(rig, wrong)
                    hits = rig.fault.hits
                    rig.fault.clear()
                    rig.fault.deliver()
                    usable = rig.store._slabs.quarantined == 0
                    assert not usable or scenario(rig, wrong) == 6, (kind, op, sticky, nth)
                    assert not wrong, (kind, op, sticky, nth, wrong)
                    check_extents(rig.store.space.extents, [])
                if not hits:
                    break
                nth += 1
            assert nth > 4


# ---- a closed store


def test_closed_store_raises(root: Path) -> None:
    store = Store(root, 16 * MIB)
    extent = store.reserve(100, "t")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.reserve(100, "t")
    with pytest.raises(StoreError, match="closed"):
        store.read(extent, Memory(100).address, "t")
    store.release(extent)
