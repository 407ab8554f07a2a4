"""Tests of the order of transfers. Demand comes before prefetch, reads and writes take turns, queues are
bounded, and transfers can be cancelled."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transfer_rig import BLOCK, Memory, Rig

from teraio import _native

SLAB = 16 * BLOCK
TOY = {"latency_ns": 0, "ns_per_byte": 1.0}  # with these rates, writing or reading one slab takes SLAB ns


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_demand_fetch_waits_for_at_most_one_block_under_a_full_prefetch_queue(depth: int) -> None:
    with Rig(slabs=8, depth=depth, memory=TOY) as rig:
        source, one = Memory(200 * SLAB, seed=1), Memory(SLAB, seed=2)
        pieces, place = rig.pieces(source.size), rig.pieces(SLAB)
        rig.out(source, pieces)
        rig.out(one, place, tag=2)
        target, wanted = Memory(source.size), Memory(SLAB)
        prefetch = rig.t.into(target.address, target.size, pieces, 1, 1)
        for _ in range(5):
            assert not rig.t.done(prefetch)  # each call of done() lets one operation run
        began = rig.inner.now_ns
        rig.into(wanted, place, tag=2, demand=True)
        # First the running blocks end, in the time of one block. Then the demand fetch takes the time of one
        # block.
        assert rig.inner.now_ns - began <= 2 * SLAB
        assert wanted.get() == one.get()
        assert rig.t.wait(prefetch) and target.get() == source.get()


def test_wait_for_a_queued_prefetch_makes_it_a_demand() -> None:
    with Rig(slabs=8, depth=2, memory=TOY) as rig:
        memories = [Memory(10 * SLAB, seed=i) for i in range(6)]
        places = [rig.pieces(m.size) for m in memories]
        for i, (m, p) in enumerate(zip(memories, places)):
            rig.out(m, p, tag=i)
        targets = [Memory(10 * SLAB) for _ in memories]
        tickets = [rig.t.into(m.address, m.size, p, i, 1) for i, (m, p) in enumerate(zip(targets, places))]
        began = rig.inner.now_ns
        assert rig.t.wait(tickets[-1]) and targets[-1].get() == memories[-1].get()
        assert (
            rig.inner.now_ns - began <= (1 + 5) * SLAB
        )  # one running block, and then ten blocks on two lanes
        assert not rig.t.done(tickets[1])
        assert all(rig.t.wait(ticket) for ticket in tickets[:-1])


def test_many_queued_evictions_do_not_delay_a_fetch() -> None:
    with Rig(slabs=4, depth=1, memory=TOY) as rig:
        small = Memory(SLAB, seed=1)
        place = rig.pieces(SLAB)
        rig.out(small, place)
        backlog = Memory(50 * SLAB, seed=2)
        write = rig.t.out(backlog.address, backlog.size, rig.pieces(backlog.size), 2, 1)
        target = Memory(SLAB)
        read = rig.t.into(target.address, SLAB, place, 1, 1)
        began = rig.inner.now_ns
        while not rig.t.done(read):
            pass
        assert rig.inner.now_ns - began <= 3 * SLAB
        assert rig.t.wait(write) and rig.t.wait(read)


def test_demand_is_before_prefetch_with_threads(tmp_path: Path) -> None:
    with Rig(tmp_path, slabs=8, depth=2) as rig:
        source, one = Memory(100 * SLAB, seed=1), Memory(SLAB, seed=2)
        pieces, place = rig.pieces(source.size), rig.pieces(SLAB)
        rig.out(source, pieces)
        rig.out(one, place, tag=2)
        rig.fault.add("delay", "read", sticky=True, delay_s=0.05)
        target, wanted = Memory(source.size), Memory(SLAB)
        prefetch = rig.t.into(target.address, target.size, pieces, 1, 1)
        time.sleep(0.05)
        began = time.monotonic()
        rig.into(wanted, place, tag=2, demand=True)
        spent = time.monotonic() - began
        assert not rig.t.done(prefetch)
        assert spent < 1.5, spent  # on an idle machine, two blocks take 0.1 s and the whole queue takes 2.5 s
        assert wanted.get() == one.get()


def test_full_queue_raises_and_never_blocks() -> None:
    with Rig(max_transfers=10, slabs=2) as rig:
        memory = Memory(SLAB, seed=1)
        tickets = [rig.t.out(memory.address, SLAB, [(0, i * SLAB, SLAB)], i, 1) for i in range(10)]
        with pytest.raises(_native.QueueFull, match="max_transfers"):
            rig.t.out(memory.address, SLAB, [(0, 0, SLAB)], 1, 1)
        assert rig.t.wait(tickets[3])
        last = rig.t.out(memory.address, SLAB, [(0, 10 * SLAB, SLAB)], 1, 1)
        assert all(rig.t.wait(t) for t in [*tickets[:3], *tickets[4:], last])


def test_operations_in_flight_never_exceed_depth_or_slabs() -> None:
    for slabs, depth, most in ((8, 2, 4), (3, 4, 3)):
        with Rig(files=2, slabs=slabs, depth=depth) as rig:
            source = Memory(40 * SLAB, seed=1)
            rig.out(source, rig.pieces(source.size, stripe=SLAB))
            assert rig.t.stats()["flights_max"] == most
            assert rig.slabs.free == slabs


def test_cancel_before_the_first_operation_returns_true_and_runs_nothing() -> None:
    with Rig(depth=1, slabs=2) as rig:
        a, b = Memory(4 * SLAB, seed=1), Memory(4 * SLAB, seed=2)
        first = rig.t.out(a.address, a.size, [(0, 0, a.size)], 1, 1)
        second = rig.t.out(b.address, b.size, [(0, a.size, b.size)], 2, 1)
        assert rig.t.cancel(second) is True
        assert rig.t.state(second) == "cancelled"
        assert rig.t.wait(second) is False
        assert rig.t.wait(first) is True
        assert rig.fault.operations("write") == 4


def test_cancel_of_a_running_read_finishes_running_operations_only() -> None:
    with Rig(depth=1, slabs=2, memory=TOY) as rig:
        a = Memory(10 * SLAB, seed=1)
        rig.out(a, [(0, 0, a.size)])
        target = Memory(a.size)
        ticket = rig.t.into(target.address, a.size, [(0, 0, a.size)], 1, 1)
        for _ in range(3):
            rig.t.done(ticket)
        assert rig.t.cancel(ticket) is False
        assert rig.t.wait(ticket) is False
        assert rig.fault.operations("read") < 10 and rig.slabs.free == 2
        assert target.get()[-SLAB:] == bytes([0xA5]) * SLAB
        rig.into(target, [(0, 0, a.size)])
        assert target.get() == a.get()


def test_finished_transfer_cannot_be_cancelled() -> None:
    with Rig() as rig:
        a = Memory(SLAB, seed=1)
        ticket = rig.t.out(a.address, SLAB, [(0, 0, SLAB)], 1, 1)
        rig.t.wait(ticket, keep=True)
        assert rig.t.cancel(ticket) is False and rig.t.state(ticket) == "done"
        assert rig.t.wait(ticket) is True


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> tuple[int, ...]:
        with Rig(files=2, slabs=4, depth=3, memory={"jitter": 3.0, "seed": seed}) as rig:
            a, b = Memory(30 * SLAB, seed=1), Memory(30 * SLAB, seed=2)
            tickets = [
                rig.t.out(m.address, m.size, rig.pieces(m.size, stripe=SLAB), i, 1)
                for i, m in enumerate((a, b))
            ]
            for ticket in tickets:
                rig.t.wait(ticket, keep=True)
            return tuple(t for ticket in tickets for t in rig.t.times(ticket))

    assert run(1) == run(1) and len({run(seed) for seed in range(8)}) == 8
