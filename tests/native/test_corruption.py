"""Tests of corrupt blocks. A read returns the bytes that were written, or raises CorruptTensorError.

A corrupt block has a flipped bit, or is stale, misplaced or unwritten.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from transfer_rig import BLOCK, Memory, Rig, facts

from teraio import _native
from teraio.errors import CorruptTensorError

SLAB = 16 * BLOCK


def fails(rig: Rig, target: Memory, pieces: list, tag: int = 1, generation: int = 1) -> Any:
    with pytest.raises(CorruptTensorError) as caught:
        rig.into(target, pieces, tag, generation)
    return facts(caught)


def test_flipped_bit_is_found() -> None:
    draw = random.Random(7)
    with Rig() as rig:
        source = Memory(3 * SLAB + 1001, seed=1)
        pieces = rig.pieces(source.size)
        rig.out(source, pieces)
        for _ in range(500):
            bit = draw.randrange(source.size * 8)
            old = rig.inner.peek(0, bit // 8, 1)
            rig.inner.poke(0, bit // 8, bytes([old[0] ^ 1 << bit % 8]))
            error = fails(rig, Memory(source.size), pieces)
            assert error.mismatch == "digest" and error.offset == bit // 8 // SLAB * SLAB
            rig.inner.poke(0, bit // 8, old)
        target = Memory(source.size)
        rig.into(target, pieces)
        assert target.get() == source.get()


def test_swapped_sectors_are_found() -> None:
    with Rig() as rig:
        source = Memory(SLAB, seed=1)
        rig.out(source, rig.pieces(SLAB))
        first, second = rig.inner.peek(0, 0, 512), rig.inner.peek(0, 512, 512)
        rig.inner.poke(0, 0, second + first)
        assert fails(rig, Memory(SLAB), [(0, 0, SLAB)]).mismatch == "digest"


def test_wrong_bookkeeping_is_found_before_any_read() -> None:
    with Rig() as rig:
        source, target = Memory(100, seed=1), Memory(100)
        rig.out(source, [(0, 0, 100)], tag=7, generation=3)
        reads = rig.t.stats()["reads"]
        assert fails(rig, target, [(0, 0, 100)], 8, 3).mismatch == "tag"
        assert fails(rig, target, [(0, 0, 100)], 7, 2).mismatch == "generation"
        assert fails(rig, target, [(0, 0, 100)], 7, 4).mismatch == "generation", (
            "this generation was never written"
        )
        assert fails(rig, target, [(0, BLOCK, 100)], 7, 3).mismatch == "unwritten"
        assert fails(rig, Memory(99), [(0, 0, 99)], 7, 3).mismatch == "length"
        rig.t.forget([(0, 0, 100)])
        assert fails(rig, target, [(0, 0, 100)], 7, 3).mismatch == "unwritten"
        assert rig.t.stats()["reads"] == reads


def test_block_overwritten_by_another_tensor_is_unwritten() -> None:
    with Rig() as rig:
        rig.out(Memory(2 * SLAB, seed=1), [(0, 0, 2 * SLAB)], tag=1)
        rig.out(Memory(BLOCK, seed=2), [(0, SLAB + BLOCK, BLOCK)], tag=2)
        assert fails(rig, Memory(2 * SLAB), [(0, 0, 2 * SLAB)], tag=1).mismatch == "unwritten"


def test_read_during_its_write_is_refused() -> None:
    with Rig() as rig:
        source, target = Memory(100, seed=1), Memory(100)
        write = rig.t.out(source.address, 100, [(0, 0, 100)], 1, 1)
        read = rig.t.into(target.address, 100, [(0, 0, 100)], 1, 1)
        with pytest.raises(CorruptTensorError, match="not completed"):
            rig.t.wait(read)
        assert rig.t.wait(write)


def test_bookkeeping_is_checked_without_checksums() -> None:
    with Rig(checksums=False) as rig:
        rig.out(Memory(100, seed=1), [(0, 0, 100)], tag=7)
        assert fails(rig, Memory(100), [(0, 0, 100)], tag=8).mismatch == "tag"


def test_corruption_message_names_tensor_place_and_remedy() -> None:
    with Rig() as rig:
        rig.out(Memory(100, seed=1), [(0, 0, 100)])
        rig.inner.poke(0, 5, b"\xff\x00\xff")
        target = Memory(100)
        ticket = rig.t.into(target.address, 100, [(0, 0, 100)], 1, 1)
        with pytest.raises(CorruptTensorError) as caught:
            rig.t.wait(ticket, name="layers.0.wq")
        text = str(caught.value)
        for part in (
            "'layers.0.wq'",
            "generation 1",
            "100 bytes at offset 0",
            "memory:0",
            "digest",
            "checkpoint",
        ):
            assert part in text
        assert facts(caught).tensor == "layers.0.wq" and facts(caught).path == "memory:0"
        assert facts(caught).file == 0 and facts(caught).bytes == 100


def test_digest_changes_with_every_byte_and_with_length() -> None:
    memory = Memory(1000, seed=4, skew=3)
    whole = _native.digest(memory.address, 1000)
    data = bytearray(memory.get())
    seen = {whole}
    for i in range(1000):
        data[i] ^= 0x80
        memory.set(bytes(data))
        seen.add(_native.digest(memory.address, 1000))
        data[i] ^= 0x80
    assert len(seen) == 1001
    zeros = Memory(1000)
    zeros.set(bytes(1000))
    assert len({_native.digest(zeros.address, n) for n in range(1001)}) == 1001


@pytest.mark.parametrize("size", [1, 64, 1000, 300_000, 1_000_003])
@pytest.mark.parametrize("skew", [0, 1, 8])
def test_copy_digest_equals_digest(size: int, skew: int) -> None:
    source, target = Memory(size, seed=size, skew=skew), Memory(size, skew=8 - skew)
    assert _native.copy_digest(target.address, source.address, size) == _native.digest(source.address, size)
    assert target.get() == source.get() and target.guards_intact()
    plain = Memory(size, skew=skew)
    _native.copy(plain.address, source.address, size)
    assert plain.get() == source.get() and plain.guards_intact()
