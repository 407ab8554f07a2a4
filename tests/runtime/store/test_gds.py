"""Tests of GPUDirect Storage without a GPU. teraio's adapter runs with a toy module `kvikio`, and with the
real kvikio on a stub driver."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tree

from teraio.errors import StoreError, StoreFullError, StoreReadError, StoreWriteError, TransferTimeoutError
from teraio.runtime.device import cuda, device
from teraio.runtime.device.pending_transfer import Mark
from teraio.runtime.store import gds

ROOT = tree.ROOT
SLAB = 16384


class Storage:
    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def nbytes(self) -> int:
        return len(self.data)

    def resize_(self, size: int) -> None:
        self.data = bytearray(size)


class Stage:
    """Slabs (buffers of transfers) in RAM instead of device memory. `marks` lists the mark of each copy,
    which is the point of the compute stream after which the copy may begin."""

    slab_bytes = SLAB

    def __init__(self, count: int = 2) -> None:
        self.slabs = [bytearray(SLAB) for _ in range(count)]
        self.marks: list[Mark] = []

    def copy_storage_to_slab(
        self, slab: bytearray, storage: Storage, at: int, size_bytes: int, mark: Mark
    ) -> None:
        self.marks.append(mark)
        slab[:size_bytes] = storage.data[at : at + size_bytes]

    def copy_slab_to_storage(
        self, slab: bytearray, storage: Storage, at: int, size_bytes: int, mark: Mark
    ) -> None:
        self.marks.append(mark)
        storage.data[at : at + size_bytes] = slab[:size_bytes]


class ToyFile:
    """A toy kvikio.CuFile with pread and pwrite.

    If `trouble` is an error, each operation raises it. If `trouble` is an event, each operation waits for it.
    """

    trouble: Any = None
    calls: list[tuple[str, int, int]]

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+", "any other mode creates or truncates the file"
        if kvikio_mode.refuse:
            raise RuntimeError("cuFile error: cuFileHandleRegister: 5008")
        self.fd = os.open(path, os.O_RDWR)
        self.calls = []

    def pwrite(self, slab: bytearray, size: int, offset: int, task_size: int) -> Any:
        return self._later("write", size, offset, lambda: os.pwrite(self.fd, memoryview(slab)[:size], offset))

    def pread(self, slab: bytearray, size: int, offset: int, task_size: int) -> Any:
        return self._later(
            "read", size, offset, lambda: os.preadv(self.fd, [memoryview(slab)[:size]], offset)
        )

    def _later(self, what: str, size: int, offset: int, move: Any) -> Any:
        assert size % 4096 == offset % 4096 == 0
        self.calls.append((what, offset, size))

        def get() -> int:
            if isinstance(ToyFile.trouble, Exception):
                raise ToyFile.trouble
            if ToyFile.trouble is not None:
                ToyFile.trouble.wait()
            return int(move())

        return SimpleNamespace(get=get)

    def close(self) -> None:
        os.close(self.fd)


kvikio_mode = SimpleNamespace(compat=None, refuse=False, cufile_falls_back=False)


@pytest.fixture(autouse=True)
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a toy module `kvikio`. It has only the parts that teraio's adapter for kvikio uses."""
    toy: Any = ModuleType("kvikio")
    toy.CuFile = ToyFile
    toy.CompatMode = SimpleNamespace(OFF="off", ON="on")

    @contextmanager
    def setting(config: dict[str, Any]) -> Iterator[None]:
        kvikio_mode.compat = config["compat_mode"]
        yield

    toy.defaults = SimpleNamespace(set=setting)
    toy.cufile_driver = SimpleNamespace(get=lambda name: kvikio_mode.cufile_falls_back)
    for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver"):
        monkeypatch.setitem(sys.modules, name, toy if name == "kvikio" else getattr(toy, name.split(".")[1]))
    monkeypatch.setattr(ToyFile, "trouble", None)
    kvikio_mode.refuse = kvikio_mode.cufile_falls_back = False
    yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "store"
    made.touch(0o600)
    os.truncate(made, 1 << 20)
    return made


def test_tensors_of_all_sizes_are_read_as_written(path: Path) -> None:
    file, offset, extents = gds.DirectFile(path, Stage()), 0, []
    path.unlink()
    for size in (1, 4095, 4096, 4097, SLAB, SLAB + 1, 5 * SLAB + 77):
        extents.append((offset, random.Random(size).randbytes(size)))
        offset += -(-size // 4096) * 4096
    for ticket in [file.copy_out_starter(at)(Storage(data), Mark()) for at, data in extents]:
        ticket.wait()
        assert ticket.done()
    for at, data in extents:
        came = Storage(bytes(len(data)))
        file.copy_in_starter(at)(came, Mark()).wait()
        assert came.data == data
    assert file.close()


def test_starters_work_with_an_ordered_device(path: Path) -> None:
    """The device's `begin_copy_out` and `begin_copy_in` accept the file's functions that start a copy. Each
    copy of a slab gets the mark that the device makes on its compute stream."""
    stage, cpu, storage = Stage(), device.OrderedDevice(), Storage(b"x" * 3 * SLAB)
    cpu.mark_compute_stream = lambda: Mark("event", 7)  # type: ignore[method-assign]
    file = gds.DirectFile(path, stage)
    cpu.end_copy_and_free(cpu.begin_copy_out(storage, file.copy_out_starter(0, "w")))
    assert storage.nbytes() == 0
    cpu.end_copy_in(cpu.begin_copy_in(storage, 3 * SLAB, file.copy_in_starter(0, "w")))
    assert storage.data == b"x" * 3 * SLAB
    assert stage.marks == [Mark("event", 7)] * 6
    assert file.close()


def test_neither_kvikio_nor_cufile_may_fall_back(path: Path) -> None:
    assert gds.open_direct_file(path, Stage()).close()
    assert kvikio_mode.compat == "off"
    kvikio_mode.cufile_falls_back = True
    with pytest.raises(Exception, match="allow_compat_mode"):
        gds.open_direct_file(path, Stage())
    kvikio_mode.refuse = True
    with pytest.raises(Exception, match=r"cuFile refuses .*5008"):
        gds.open_direct_file(path, Stage())


def test_a_demand_overtakes_prefetches(path: Path) -> None:
    gate = threading.Event()
    ToyFile.trouble = gate
    file = gds.DirectFile(path, Stage(1))
    tickets = [file.copy_in_starter(4096 * index)(Storage(bytes(4096)), Mark()) for index in range(4)]
    tickets.append(file.copy_in_starter(40960, demand=True)(Storage(bytes(4096)), Mark()))
    gate.set()
    for ticket in tickets:
        ticket.wait()
    offsets = [offset for _, offset, _ in file._file.calls]
    assert offsets.index(40960) <= 1
    assert file.close()


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("KvikIO failure: pwrite: ENOSPC", StoreFullError, errno.ENOSPC),
        ("POSIX error on pwrite: No space left on device", StoreFullError, errno.ENOSPC),
        ("Input/output error", StoreWriteError, errno.EIO),
        ("system call failed with errno = 27", StoreWriteError, errno.EFBIG),
        ("cuFile error: 5001", StoreWriteError, 0),
    ],
)
def test_an_error_has_the_class_and_number_of_its_text(
    path: Path, text: str, kind: type, number: int
) -> None:
    file = gds.DirectFile(path, Stage())
    ToyFile.trouble = RuntimeError(text)
    with pytest.raises(kind, match="tensor 'w1' could not be written at byte 4096") as caught:
        file.copy_out_starter(4096, "w1")(Storage(b"x"), Mark()).wait()
    assert isinstance(caught.value, StoreError)
    assert caught.value.errno == number
    ToyFile.trouble = None
    file.copy_out_starter(4096, "w1")(Storage(b"x"), Mark()).wait()
    assert file.close()


def test_a_short_read_is_an_error(path: Path) -> None:
    os.truncate(path, 4096)
    file = gds.DirectFile(path, Stage())
    with pytest.raises(StoreReadError, match="4096 of 8192 bytes"):
        file.copy_in_starter(0)(Storage(bytes(8000)), Mark()).wait()
    assert file.close()


def test_hung_transfer_times_out_and_its_slab_is_never_reused(path: Path) -> None:
    stage, gate = Stage(2), threading.Event()
    file = gds.DirectFile(path, stage, deadline_s=0.1)
    ToyFile.trouble = gate
    hanging = file.copy_in_starter(0, "w2")(Storage(bytes(4096)), Mark())
    with pytest.raises(TransferTimeoutError, match=r"read of tensor 'w2'.*within 0.1 s"):
        hanging.wait()
    assert not hanging.done()
    ToyFile.trouble = None
    file.deadline_s = 60.0  # in seconds; the next transfer succeeds within this time
    came = Storage(b"y" * 4096)
    file.copy_in_starter(4096)(came, Mark()).wait()
    assert came.data == bytes(4096)
    assert file.close(0.1) is False
    gate.set()


# ---- the trial that decides whether teraio uses GPUDirect Storage


def test_without_a_gpu_kvikio_is_not_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "reason_without_gpu", lambda: "the driver shows no GPU")
    monkeypatch.setattr(gds.importlib.util, "find_spec", lambda name: pytest.fail("looked for"))
    assert gds.reason_without_gds(tmp_path) == "no GPU (the driver shows no GPU)"


@pytest.mark.parametrize(
    ("printed", "code", "reason"),
    [
        ("", 0, None),
        ("cuFile refuses x", 1, "cuFile refuses x"),
    ],
)
def test_reason_is_the_output_of_the_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, code: int, reason: str | None
) -> None:
    monkeypatch.setattr(cuda, "reason_without_gpu", lambda: None)
    monkeypatch.setattr(gds.importlib.util, "find_spec", lambda name: object())
    done = subprocess.CompletedProcess([], code, printed, "")
    monkeypatch.setattr(gds.subprocess, "run", lambda *command, **options: done)
    assert gds.reason_without_gds(tmp_path) == reason


def test_hanging_trial_returns_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU, cuFile's function cuFileDriverOpen hangs, so the trial of cuFile has a time limit."""
    monkeypatch.setattr(cuda, "reason_without_gpu", lambda: None)
    monkeypatch.setattr(gds.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gds, "TRIAL_S", 0.01)
    assert "did not end within" in (gds.reason_without_gds(tmp_path) or "")


SHIPPED = """{
    // NOTE : comments // and trailing commas
    "logging": { "dir": "/var/log//cufile", },
    "properties": {
        "allow_compat_mode": true, // the default
        "use_pci_p2pdma": true,
    }
}"""


def test_cufile_configuration_changes_only_the_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_text(SHIPPED)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(theirs))
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", "")
    gds.install_strict_cufile_configuration(tmp_path)
    ours = json.loads(Path(os.environ["CUFILE_ENV_PATH_JSON"]).read_text())
    assert ours == {
        "logging": {"dir": "/var/log//cufile"},
        "properties": {"allow_compat_mode": False, "use_pci_p2pdma": True},
    }
    assert theirs.read_text() == SHIPPED


def test_the_adapter_fits_the_real_kvikio(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/io/kvikio_adapter.py"), "--venv", str(tmp_path / "venv")],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == 77:
        pytest.skip(ran.stdout.strip())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASS") == 5
