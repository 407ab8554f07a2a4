"""Tests of deadlines. A lost completion raises an error with the request's numbers.

A late operation may still use its slab and its extent, so the engine and the store never use these two again.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transfer_rig import BLOCK, Memory, Rig, facts

from teraio.errors import TransferTimeoutError

pytestmark = pytest.mark.alone

SLAB = 16 * BLOCK


def test_lost_read_raises_an_error_with_the_request() -> None:
    with Rig(deadline_s=60) as rig:
        source, target = Memory(4 * SLAB, seed=1), Memory(4 * SLAB)
        rig.out(source, [(0, 0, 4 * SLAB)])
        rig.fault.add("drop", "read", nth=2)
        began = rig.inner.now_ns
        with pytest.raises(TransferTimeoutError) as caught:
            ticket = rig.t.into(target.address, target.size, [(0, 0, 4 * SLAB)], 1, 1)
            rig.t.wait(ticket, name="w")
        assert 60e9 <= rig.inner.now_ns - began < 61e9
        e = facts(caught)
        assert (e.kind, e.offset, e.bytes, e.deadline_s, e.tensor) == ("timeout", SLAB, SLAB, 60.0, "w")
        assert rig.t.stats()["slabs_quarantined"] == 1 and rig.t.lost() == []


def test_late_completion_touches_no_memory_in_use() -> None:
    with Rig(slabs=4, depth=4) as rig:
        a, b = Memory(SLAB, seed=1), Memory(SLAB, seed=2)
        rig.out(a, [(0, 0, SLAB)], tag=1)
        rig.out(b, [(0, SLAB, SLAB)], tag=2)
        rig.fault.add("drop", "read")
        target = Memory(SLAB, seed=3)
        then = target.get()
        with pytest.raises(TransferTimeoutError):
            rig.into(target, [(0, 0, SLAB)], tag=1)
        # Other transfers use all remaining slabs, while the late read writes to its own slab.
        assert rig.fault.deliver() == 1
        for _ in range(3):
            big, back = Memory(9 * SLAB, seed=4), Memory(9 * SLAB)
            rig.out(big, [(0, 4 * SLAB, big.size)], tag=3)
            rig.into(back, [(0, 4 * SLAB, big.size)], tag=3)
            assert back.get() == big.get()
        assert rig.t.stats()["late"] == 1 and target.get() == then
        assert rig.t.stats()["slabs_quarantined"] == 1 and rig.slabs.free == 3


def test_extent_of_lost_write_is_reported_and_late_bytes_are_found() -> None:
    with Rig() as rig:
        rig.fault.add("drop", "write")
        with pytest.raises(TransferTimeoutError):
            rig.out(Memory(SLAB, seed=1), [(0, 0, SLAB)], tag=1)
        assert rig.t.lost() == [(0, 0, SLAB)]
        good = Memory(SLAB, seed=2)
        # The store never writes to a lost extent. This test writes to one, so the read below fails.
        rig.out(good, [(0, 0, SLAB)], tag=2)
        rig.fault.deliver()
        rig.out(Memory(SLAB, seed=3), [(0, SLAB, SLAB)], tag=3)
        rig.out(Memory(SLAB, seed=3), [(0, SLAB, SLAB)], tag=3)
        assert rig.t.stats()["late"] == 1
        with pytest.raises(RuntimeError, match="digest"):
            rig.into(Memory(SLAB), [(0, 0, SLAB)], tag=2)


def test_request_that_begins_after_its_deadline_does_nothing() -> None:
    with Rig(slabs=4, depth=2) as rig:
        rig.out(Memory(SLAB, seed=9), [(0, 8 * SLAB, SLAB)], tag=9)
        rig.fault.add("stall", "write")
        with pytest.raises(TransferTimeoutError):
            rig.out(Memory(SLAB, seed=1), [(0, 0, SLAB)], tag=1)
        # The engine stores the lost transfer and this new transfer in the same record. When the lost request
        # begins late, it reads the record.
        other = Memory(SLAB, seed=2)
        ticket = rig.t.out(other.address, SLAB, [(0, 4 * SLAB, SLAB)], 2, 1)
        assert rig.fault.deliver() == 1
        assert rig.t.wait(ticket)
        rig.out(other, [(0, 5 * SLAB, SLAB)], tag=3)
        assert rig.t.stats()["late"] == 1
        assert rig.inner.peek(0, 0, SLAB) == bytes(SLAB)


def test_late_completion_frees_the_lane_and_not_the_slab() -> None:
    with Rig(slabs=4, depth=1) as rig:
        a = Memory(SLAB, seed=1)
        rig.fault.add("drop", "write")
        with pytest.raises(TransferTimeoutError):
            rig.out(a, [(0, 0, SLAB)])
        with pytest.raises(
            TransferTimeoutError, match="not started"
        ):  # the only lane is lost, so the transfer fails instead of waiting forever
            rig.out(a, [(0, SLAB, SLAB)])
        rig.fault.deliver()
        assert (
            not rig.t.done(rig.t.out(a.address, SLAB, [(0, SLAB, SLAB)], 1, 1)) or rig.t.stats()["late"] == 1
        )
        rig.out(a, [(0, 2 * SLAB, SLAB)])
        assert rig.slabs.quarantined == 1


def test_transfers_fail_at_once_if_every_slab_is_lost() -> None:
    with Rig(slabs=3, depth=8) as rig:
        a = Memory(SLAB, seed=1)
        rig.fault.add("drop", "write", sticky=True)
        tickets = [rig.t.out(a.address, SLAB, [(0, i * SLAB, SLAB)], i, 1) for i in range(10)]
        for ticket in tickets:
            with pytest.raises(TransferTimeoutError):
                rig.t.wait(ticket)
        assert rig.slabs.quarantined == 3 and rig.t.stats()["unfinished"] == 0
        with pytest.raises(TransferTimeoutError):
            rig.out(a, [(0, 0, SLAB)])
        assert rig.fault.deliver() == 3
        while rig.t.stats()["late"] < 3:
            rig.t.state(rig.t.out(0, 0, [], 0, 0))
        # The late operations have freed their lanes, but not their slabs.
        with pytest.raises(TransferTimeoutError):
            rig.out(a, [(0, 0, SLAB)])


def test_deadline_counts_from_the_drive_and_not_from_the_queue() -> None:
    # One lane runs 100 operations of 1 ms each, and the deadline is 5 ms. The last operation waits in the
    # queue for 99 ms. Its deadline is still kept, because a deadline counts from the operation's start on the
    # drive.
    with Rig(slabs=2, depth=1, deadline_s=0.005, memory={"latency_ns": 1_000_000, "ns_per_byte": 0}) as rig:
        source = Memory(100 * SLAB, seed=1)
        rig.out(source, rig.pieces(source.size))
        assert rig.inner.now_ns == 100_000_000


def test_transfer_can_have_its_own_deadline(tmp_path: Path) -> None:
    with Rig(tmp_path, deadline_s=60) as rig:
        rig.fault.add("drop", "write")
        began = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            rig.out(Memory(SLAB, seed=1), [(0, 0, SLAB)], deadline_s=0.05)
        assert 0.05 <= time.monotonic() - began < 20


def test_operation_that_ends_after_its_deadline_is_late(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        source, target = Memory(SLAB, seed=1), Memory(SLAB, seed=9)
        rig.out(source, [(0, 0, SLAB)])
        then = target.get()
        rig.fault.add("delay", "read", delay_s=2.0)
        with pytest.raises(TransferTimeoutError):
            rig.into(target, [(0, 0, SLAB)], deadline_s=0.05)
        until = time.monotonic() + 60
        while rig.t.stats()["late"] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert rig.t.stats()["late"] == 1 and target.get() == then
        rig.into(target, [(0, 0, SLAB)])
        assert target.get() == source.get()
