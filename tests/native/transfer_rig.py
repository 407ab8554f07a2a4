"""A test rig for the transfer engine: memory, files, faults, and the workload of the fault loops.

The rig has a copy of the expected bytes of each tensor. After any fault, a transfer must have read exactly
these bytes, or raised a StoreError. tests/long/transfer_faults.py uses this module, too.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teraio import _native
from teraio.errors import StoreError

BLOCK = 4096
KINDS = ("EIO", "ENOSPC", "short", "delay", "drop", "stall", "flip", "stale", "neighbour")
Piece = tuple[int, int, int]


class Memory:
    """A block of bytes that begins `skew` bytes after a 64-byte boundary, with guard bytes on both sides."""

    GUARD = 64

    def __init__(self, size: int, seed: int | None = None, skew: int = 0) -> None:
        self.size = size
        self.raw = ctypes.create_string_buffer(size + 4 * self.GUARD)
        base = ctypes.addressof(self.raw)
        self.start = (-base) % 64 + self.GUARD + skew
        self.address = base + self.start
        ctypes.memset(base, 0xA5, len(self.raw))
        if seed is not None:
            self.set(random.Random(seed).randbytes(size))

    def set(self, data: bytes) -> None:
        assert len(data) == self.size
        ctypes.memmove(self.address, data, self.size)

    def get(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def guards_intact(self) -> bool:
        whole = self.raw.raw
        return set(whole[: self.start]) | set(whole[self.start + self.size :]) == {0xA5}


def facts(caught: Any) -> Any:
    """Return the error that `pytest.raises` caught. The engine adds its numbers to the error as
    attributes."""
    return caught.value


def open_direct(path: Path, size: int = 0) -> int:
    """Open a file with O_DIRECT, or without it if the file system refuses O_DIRECT at open.

    If the file system refuses O_DIRECT only later, the engine handles the refusal.
    """
    flags = os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    if size:
        os.ftruncate(fd, size)
    return fd


class Rig:
    """A transfer engine with its files and with a FaultIo, which can make operations fail. The rig allocates
    extents in ascending order."""

    def __init__(
        self,
        folder: Path | None = None,
        files: int = 1,
        slab: int = 16 * BLOCK,
        slabs: int = 4,
        depth: int = 2,
        memory: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.slabs = _native.Slabs(slab, slabs)
        self.paths: list[Path] = []
        if folder is None:
            self.inner: Any = _native.MemoryIo(files=files, depth=depth, **(memory or {}))
        else:
            self.paths = [folder / f"store{i}" for i in range(files)]
            fds = [open_direct(path) for path in self.paths]
            self.inner = _native.ThreadIo([(fd, str(p)) for fd, p in zip(fds, self.paths)], threads=depth)
            for fd in fds:
                os.close(fd)
        self.fault = _native.FaultIo(self.inner)
        self.t = _native.Transfers(self.fault, self.slabs, **settings)
        self.next = [0] * files

    def extent(self, size: int, file: int = 0) -> Piece:
        offset = self.next[file]
        self.next[file] += (size + BLOCK - 1) // BLOCK * BLOCK
        return (file, offset, size)

    def pieces(self, size: int, stripe: int | None = None) -> list[Piece]:
        """Allocate stripes in all files in turn. If `stripe` is None, allocate one piece in file 0."""
        if stripe is None:
            return [self.extent(size)] if size else []
        at = range(0, size, stripe)
        return [self.extent(min(stripe, size - o), i % len(self.next)) for i, o in enumerate(at)]

    def out(
        self, memory: Memory, pieces: list[Piece], tag: int = 1, generation: int = 1, **more: Any
    ) -> None:
        assert self.t.wait(self.t.out(memory.address, memory.size, pieces, tag, generation, **more))

    def into(
        self, memory: Memory, pieces: list[Piece], tag: int = 1, generation: int = 1, **more: Any
    ) -> None:
        assert self.t.wait(self.t.into(memory.address, memory.size, pieces, tag, generation, **more))

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.t.close(0.2)


@dataclass
class Outcome:
    """The result of a run of the workload."""

    right: int = 0  # number of reads with the expected bytes
    errors: dict[str, int] | None = None  # number of errors by class name
    wrong: int = 0  # number of reads with wrong bytes, which must be 0
    hits: int = 0  # number of injected faults

    def error(self, e: StoreError) -> None:
        self.errors = self.errors or {}
        name = type(e).__name__
        self.errors[name] = self.errors.get(name, 0) + 1


SIZES = (1, BLOCK - 1, 5 * BLOCK + 17, 16 * BLOCK, 40 * BLOCK + 3)


def workload(
    rig: Rig, outcome: Outcome, first_tag: int = 1, deadline_s: float = 0.0
) -> list[tuple[Memory, bytes]]:
    """Evict and fetch a few tensors twice, with new contents the second time.

    Return a list of the targets of failed fetches, each with its bytes. The caller checks that no late read
    changes these bytes.
    """
    spoiled: list[tuple[Memory, bytes]] = []
    places = [rig.pieces(size, stripe=8 * BLOCK) for size in SIZES]
    for generation in (1, 2):
        sources = [Memory(size, seed=100 * generation + i, skew=i) for i, size in enumerate(SIZES)]
        targets = [Memory(size, skew=7 * i) for i, size in enumerate(SIZES)]
        tickets = [
            rig.t.out(m.address, m.size, p, first_tag + i, generation, deadline_s=deadline_s)
            for i, (m, p) in enumerate(zip(sources, places))
        ]
        kept = [settle(rig, ticket, outcome) for ticket in tickets]
        tickets = [
            rig.t.into(m.address, m.size, p, first_tag + i, generation, i % 2 == 0, deadline_s=deadline_s)
            for i, (m, p) in enumerate(zip(targets, places))
        ]
        for written, ticket, source, target in zip(kept, tickets, sources, targets):
            if settle(rig, ticket, outcome):
                same = written and target.get() == source.get()
                outcome.right += same
                outcome.wrong += not same
            else:
                spoiled.append((target, target.get()))
            outcome.wrong += not target.guards_intact()
    return spoiled


def settle(rig: Rig, ticket: int, outcome: Outcome) -> bool:
    try:
        return rig.t.wait(ticket)
    except StoreError as e:
        outcome.error(e)
        return False


def one_fault(rig: Rig, rule: dict[str, Any], deadline_s: float = 0.0) -> Outcome:
    """Run the workload with one fault rule, deliver late completions, and run the workload again without
    faults.

    The second run has the default deadline, so that a busy machine does not look like a lost completion.
    """
    outcome = Outcome()
    rig.fault.add(**rule)
    spoiled = workload(rig, outcome, deadline_s=deadline_s)
    outcome.hits = rig.fault.hits
    rig.fault.clear()
    late = rig.fault.deliver()
    while rig.t.stats()["late"] < late:
        rig.t.state(rig.t.out(0, 0, [], 0, 0))  # each call lets the driven engine run one operation
        time.sleep(0 if rig.folder is None else 0.001)
    outcome.wrong += sum(memory.get() != then for memory, then in spoiled)
    after = Outcome()
    workload(rig, after, first_tag=500)
    outcome.wrong += after.wrong
    usable = not after.errors and after.right == 2 * len(SIZES)
    stats = rig.t.stats()
    lost_all = stats["slabs_quarantined"] == rig.slabs.count
    assert usable or lost_all, (rule, after, stats)
    assert stats["unfinished"] == 0
    assert stats["slabs_free"] + stats["slabs_quarantined"] == rig.slabs.count
    return outcome


def fault_rules(kinds: tuple[str, ...] = KINDS) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        for op in ("read", "write"):
            for sticky in (False, True):
                yield {"kind": kind, "op": op, "sticky": sticky, "delay_s": 0.01}
