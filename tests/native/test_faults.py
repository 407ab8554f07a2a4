"""Tests of faults. Each operation of a workload fails in turn, in every way.

Each read returns the right bytes or raises a StoreError, and the engine can be used afterwards.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from children import ended
from transfer_rig import BLOCK, KINDS, Memory, Outcome, Rig, facts, fault_rules, one_fault, workload

from teraio import _native
from teraio.errors import (
    CorruptTensorError,
    StoreFullError,
    StoreReadError,
    StoreWriteError,
    TransferTimeoutError,
)

SLAB = 16 * BLOCK


@pytest.mark.parametrize(
    "rule", list(fault_rules()), ids=lambda r: f"{r['kind']}-{r['op']}-{'sticky' if r['sticky'] else 'once'}"
)
def test_fault_gives_no_wrong_bytes_and_no_hang(rule: dict[str, Any]) -> None:
    injected, errors, nth = 0, 0, 0
    while True:
        nth += 1
        with Rig(files=2, slabs=12, depth=3, memory={"jitter": 2.0, "seed": nth}) as rig:
            outcome = one_fault(rig, {**rule, "nth": nth})
        assert outcome.wrong == 0, (rule, nth, outcome)
        if outcome.hits == 0:
            break
        injected += outcome.hits
        errors += sum((outcome.errors or {}).values())
    assert nth > 10 and injected >= nth - 1
    harmless = rule["kind"] == "delay" or (rule["kind"] in ("EIO", "short") and not rule["sticky"])
    assert (errors == 0) == harmless, (rule, injected, errors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["read", "write"])
def test_fault_with_threads_gives_no_wrong_bytes_and_no_hang(tmp_path: Path, kind: str, op: str) -> None:
    for nth in (1, 4, 9):
        for sticky in (False, True):
            folder = tmp_path / f"{nth}-{sticky}"
            folder.mkdir()
            with Rig(folder, files=2, slabs=12, depth=3) as rig:
                began = time.monotonic()
                rule = {"kind": kind, "op": op, "nth": nth, "sticky": sticky, "delay_s": 0.003}
                outcome = one_fault(rig, rule, deadline_s=0.1 if kind in ("drop", "stall") else 0.0)
            assert outcome.wrong == 0 and outcome.hits > 0
            assert time.monotonic() - began < 50


def run_once(rule: dict[str, Any], size: int = SLAB, **settings: Any) -> Any:
    with Rig(slabs=4, **settings) as rig:
        source, target = Memory(size, seed=1), Memory(size)
        rig.fault.add(**rule)
        try:
            rig.out(source, [(0, 0, size)], tag=42, generation=5)
            rig.into(target, [(0, 0, size)], tag=42, generation=5)
        except (StoreFullError, StoreWriteError, StoreReadError, TransferTimeoutError) as e:
            return e
        assert target.get() == source.get()
        return rig.t.stats()


def test_eio_is_retried_once_for_writes_and_twice_for_reads() -> None:
    assert run_once({"kind": "EIO", "op": "write"})["retries"] == 1
    assert run_once({"kind": "EIO", "op": "read"})["retries"] == 1
    write = run_once({"kind": "EIO", "op": "write", "sticky": True})
    assert type(write).__name__ == "StoreWriteError" and write.errno == errno.EIO and write.retries == 1
    read = run_once({"kind": "EIO", "op": "read", "sticky": True})
    assert type(read).__name__ == "StoreReadError" and read.errno == errno.EIO and read.retries == 2
    assert (read.tag, read.generation, read.offset, read.bytes) == (42, 5, 0, SLAB)


def test_full_disk_is_reported_without_retry() -> None:
    error = run_once({"kind": "ENOSPC", "op": "write"})
    assert type(error).__name__ == "StoreFullError" and error.errno == errno.ENOSPC and error.retries == 0
    assert "copy in memory was kept" in str(error)


def test_short_operation_continues_at_its_end() -> None:
    stats = run_once({"kind": "short", "op": "write"})
    assert stats["continued"] == 1 and stats["writes"] == 2
    assert run_once({"kind": "short", "op": "read"})["continued"] == 1


def test_read_of_truncated_file_is_an_error(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        source, target = Memory(3 * SLAB, seed=1), Memory(3 * SLAB)
        rig.out(source, [(0, 0, 3 * SLAB)])
        os.truncate(rig.paths[0], SLAB + BLOCK)
        with pytest.raises(StoreReadError, match="end of the file"):
            rig.into(target, [(0, 0, 3 * SLAB)])


def test_file_size_limit_is_an_error_and_no_signal(tmp_path: Path) -> None:
    body = f"""
import os, resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from transfer_rig import Memory, Rig
from teraio.errors import StoreFullError
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * SLAB}, {4 * SLAB}))
with Rig(Path({str(tmp_path)!r})) as rig:
    fits = Memory(2 * {SLAB}, seed=1)
    rig.out(fits, [(0, 0, fits.size)])
    try:
        rig.out(fits, [(0, 3 * {SLAB}, fits.size)], tag=2)
    except StoreFullError as e:
        print("errno", e.errno)
    back = Memory(fits.size)
    rig.into(back, [(0, 0, fits.size)])
    print(back.get() == fits.get())
"""
    done = ended([sys.executable, "-c", body])
    assert done.stdout.split() == ["errno", str(errno.EFBIG), "True"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_write_to_dev_full_raises_store_full_error() -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    t = _native.Transfers(_native.ThreadIo([(fd, "/dev/full")], threads=2), _native.Slabs(SLAB, 2))
    os.close(fd)
    source = Memory(SLAB, seed=1)
    with pytest.raises(StoreFullError, match="/dev/full"):
        t.wait(t.out(source.address, SLAB, [(0, 0, SLAB)], 1, 1))
    assert t.close()


def test_write_to_read_only_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "readonly"
    path.write_bytes(bytes(SLAB))
    fd = os.open(path, os.O_RDONLY)
    t = _native.Transfers(_native.ThreadIo([(fd, str(path))], threads=2), _native.Slabs(SLAB, 2))
    os.close(fd)
    source = Memory(SLAB, seed=1)
    with pytest.raises(StoreWriteError) as caught:
        t.wait(t.out(source.address, SLAB, [(0, 0, SLAB)], 1, 1), name="w")
    assert facts(caught).errno == errno.EBADF and facts(caught).retries == 0
    assert t.close()


def test_failed_chunk_stops_other_chunks_of_its_transfer() -> None:
    with Rig(slabs=2, depth=1) as rig:
        source = Memory(50 * SLAB, seed=1)
        rig.fault.add("ENOSPC", "write", nth=2)
        with pytest.raises(StoreFullError):
            rig.out(source, rig.pieces(source.size))
        assert rig.fault.operations("write") == 2


@pytest.mark.parametrize("checksums", [True, False])
def test_failed_write_never_reads_as_valid(checksums: bool) -> None:
    with Rig(checksums=checksums) as rig:
        old, new = Memory(SLAB, seed=1), Memory(SLAB, seed=2)
        rig.out(old, [(0, 0, SLAB)], generation=1)
        rig.fault.add("EIO", "write", sticky=True)
        with pytest.raises(StoreWriteError):
            rig.out(new, [(0, 0, SLAB)], generation=2)
        rig.fault.clear()
        for generation, mismatch in ((1, "generation"), (2, "torn")):
            with pytest.raises(CorruptTensorError) as caught:
                rig.into(Memory(SLAB), [(0, 0, SLAB)], generation=generation)
            assert facts(caught).mismatch == mismatch


def test_workload_without_faults_is_right() -> None:
    with Rig(files=2, slabs=3, memory={"jitter": 5.0, "seed": 3}) as rig:
        outcome = Outcome()
        assert workload(rig, outcome) == []
        assert outcome.right == 10 and outcome.wrong == 0 and outcome.errors is None
