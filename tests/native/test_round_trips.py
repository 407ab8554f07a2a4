"""Tests that a read returns the written bytes, for all sizes, alignments, stripings and page cache modes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transfer_rig import BLOCK, Memory, Rig

from teraio import _native

SLAB = 16 * BLOCK
SIZES = [1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, SLAB - 1, SLAB, SLAB + 1, 3 * SLAB + 4097, 11 * SLAB]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("where", ["threads", "memory"])
def test_every_size_and_alignment_is_read_back(tmp_path: Path, where: str, checksums: bool) -> None:
    with Rig(tmp_path if where == "threads" else None, checksums=checksums) as rig:
        for size in SIZES:
            for skew in (0, 1, 8, 13):
                source, target = Memory(size, seed=size, skew=skew), Memory(size, skew=64 - skew)
                pieces = rig.pieces(size)
                rig.out(source, pieces, tag=size)
                rig.into(target, pieces, tag=size)
                assert target.get() == source.get()
                assert target.guards_intact() and source.guards_intact()


@pytest.mark.parametrize("where", ["threads", "memory"])
def test_pieces_over_two_files_are_read_back_in_order(tmp_path: Path, where: str) -> None:
    with Rig(tmp_path if where == "threads" else None, files=2) as rig:
        source, target = Memory(9 * SLAB + 123, seed=1), Memory(9 * SLAB + 123)
        weighted, at = [], 0
        for i, size in enumerate([3 * SLAB, SLAB // 2, 5 * SLAB, SLAB // 2 + 123]):
            weighted.append(rig.extent(size, i % 2))
            at += size
        assert at == source.size
        rig.out(source, weighted)
        rig.into(target, weighted)
        assert target.get() == source.get()


def test_transfer_larger_than_all_slabs_streams_through_them(tmp_path: Path) -> None:
    with Rig(tmp_path, slabs=2, depth=4) as rig:
        source, target = Memory(64 * SLAB, seed=5), Memory(64 * SLAB)
        pieces = rig.pieces(source.size)
        rig.out(source, pieces)
        rig.into(target, pieces)
        assert target.get() == source.get()
        assert rig.t.stats()["flights_max"] <= 2


def test_empty_transfer_is_done_at_once() -> None:
    with Rig() as rig:
        ticket = rig.t.out(0, 0, [], 1, 1)
        assert rig.t.done(ticket) and rig.t.wait(ticket)


def test_file_without_o_direct_works_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "buffered"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    t = _native.Transfers(_native.ThreadIo([(fd, str(path))], threads=2), _native.Slabs(SLAB, 4))
    os.close(fd)
    source, target = Memory(5 * SLAB + 1, seed=2), Memory(5 * SLAB + 1)
    pieces = [(0, 0, source.size)]
    assert t.wait(t.out(source.address, source.size, pieces, 1, 1))
    assert t.wait(t.into(target.address, target.size, pieces, 1, 1))
    assert target.get() == source.get()
    assert t.stats()["buffered_files"] == 1
    assert t.close()


def test_tail_of_the_last_block_is_zeros() -> None:
    with Rig() as rig:
        rig.out(Memory(BLOCK, seed=1), rig.pieces(BLOCK))
        secret = rig.inner.peek(0, 0, BLOCK)
        rig.out(Memory(10, seed=2), [(0, BLOCK, 10)], tag=2)
        assert rig.inner.peek(0, BLOCK + 10, BLOCK - 10) == bytes(BLOCK - 10)
        assert rig.inner.peek(0, 0, BLOCK) == secret


def test_slabs_are_exact_aligned_and_on_huge_pages() -> None:
    slabs = _native.Slabs(3 * BLOCK, 5)
    assert slabs.address % (2 << 20) == 0 and slabs.arena_bytes == 15 * BLOCK and slabs.free == 5
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if mode.exists() and "[never]" not in mode.read_text():
        assert _native.Slabs(2 << 20, 4).page_bytes == 2 << 20


def test_slabs_can_use_memory_of_the_caller() -> None:
    arena = Memory(5 * BLOCK)
    start = (arena.address + BLOCK - 1) // BLOCK * BLOCK
    t = _native.Transfers(_native.MemoryIo(), _native.Slabs(BLOCK, 4, start))
    source, target = Memory(9 * BLOCK, seed=3), Memory(9 * BLOCK)
    assert t.wait(t.out(source.address, source.size, [(0, 0, source.size)], 1, 1))
    assert t.wait(t.into(target.address, target.size, [(0, 0, source.size)], 1, 1))
    assert target.get() == source.get() and arena.guards_intact()


@pytest.mark.parametrize("bad", [(1000, 3), (0, 3), (BLOCK, 0), (BLOCK, -1), (2 << 30, 1), (BLOCK, 5000)])
def test_invalid_slabs_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        _native.Slabs(*bad)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, 99)],
        [(0, 0, 101)],
        [(0, 1, 100)],
        [(1, 0, 100)],
        [(-1, 0, 100)],
        [(0, 0, 100), (0, 4096, 0)],
        [],
    ],
)
def test_pieces_that_do_not_cover_the_bytes_are_refused(pieces: list[tuple[int, int, int]]) -> None:
    with Rig() as rig:
        with pytest.raises(ValueError):
            rig.t.out(Memory(100).address, 100, pieces, 1, 1)
        assert rig.t.stats()["unfinished"] == 0


def test_lengths_that_overflow_are_refused() -> None:
    half = 1 << 63
    with Rig() as rig, pytest.raises(ValueError, match="out of range"):
        rig.t.out(1, half, [(0, 0, half)] * 3, 1, 1)


def test_engines_cannot_share_slabs_or_files() -> None:
    slabs = _native.Slabs(BLOCK, 2)
    first = _native.Transfers(_native.MemoryIo(), slabs)
    with pytest.raises(ValueError, match="another transfer engine"):
        _native.Transfers(_native.MemoryIo(), slabs)
    io = _native.MemoryIo()
    second = _native.Transfers(io, _native.Slabs(BLOCK, 2))
    with pytest.raises(ValueError, match="another transfer engine"):
        _native.Transfers(io, _native.Slabs(BLOCK, 2))
    assert second.close()
    assert first.close()
