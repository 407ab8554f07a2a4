"""GPUDirect Storage through kvikio: bytes between device memory and a file without a copy in RAM.

    evict   compute --mark--> side stream: tensor -> device slab (registered once) --> cuFile writes the slab
    fetch   cuFile reads into a slab --> side stream, behind the mark: slab -> tensor

Used only where it is really direct, which is tried and never assumed. Three things would make it quietly
something else, and each is shut: kvikio's own fallback (CompatMode.OFF makes it an error), cuFile's
(`allow_compat_mode` is switched off in a private copy of its configuration, and read back), and a file system
that cuFile cannot serve (a block is written and read back through a file in the same place). The trial runs
in a process of its own with a time limit: `cuFileDriverOpen` spins forever where there is no device.

kvikio is imported inside functions only. Its I/O knows no streams: whoever calls it has synchronized before.
There are no checksums here: the host never sees the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Protocol

from teraio.errors import (
    StoreError,
    StoreFullError,
    StoreReadError,
    StoreWriteError,
    TransferTimeoutError,
    UnsupportedError,
)

from ..device.pending_transfer import Mark, Start

BLOCK = 4096  # offset, size and device address: else cuFile goes through a bounce buffer
SLAB_BYTES, SLABS = 16 * 2**20, 4
DEADLINE_S = 60.0
TRIAL_S = 10.0  # start of Python, torch and the driver takes 4 to 6 s
TRIAL_BYTES = 2**20
LAST = 2  # after demands (0) and prefetches (1): the thread ends


class Stage(Protocol):
    """The device's side: slabs that kvikio takes, and copies to and from them that are over on return."""

    slabs: list[Any]
    slab_bytes: int

    def copy_storage_to_slab(self, slab: Any, storage: Any, at: int, size_bytes: int, mark: Mark) -> None:
        """storage[at : at + size_bytes] -> slab, after the mark."""
        ...

    def copy_slab_to_storage(self, slab: Any, storage: Any, at: int, size_bytes: int, mark: Mark) -> None:
        """slab -> storage[at : at + size_bytes], after the mark."""
        ...


class Arena:
    """Device memory from the driver. Not the allocator's: kvikio would register the whole segment around it,
    and memory that is given back while it is registered can hang the kernel module."""

    def __init__(self, size_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        found = ctypes.c_uint64()
        error = self._driver.cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(size_bytes))
        if error != 0 or found.value % BLOCK != 0:
            raise UnsupportedError(
                f"no {size_bytes >> 20} MiB of device memory for GPUDirect (error {error})"
            )
        self._address = found
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (found.value, False), "version": 3,
        }  # fmt: skip

    def free(self) -> None:
        self._driver.cuMemFree_v2(self._address)


class CudaStage:
    """Device slabs, registered once. Their bytes count in the budget."""

    def __init__(self, device: Any, slab_bytes: int = SLAB_BYTES, count: int = SLABS) -> None:
        import kvikio.buffer
        import torch

        self.device = device.device
        self.slab_bytes = slab_bytes
        self.device_bytes = slab_bytes * count
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            self._arena = Arena(self.device_bytes)  # in the context that is current
        self._bytes = torch.as_tensor(self._arena, device=self.device)
        self.slabs = list(self._bytes.split(slab_bytes))
        self._streams: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(count):
            self._streams.put(torch.cuda.Stream(self.device))
        kvikio.buffer.memory_register(self._bytes)

    def copy_storage_to_slab(self, slab: Any, storage: Any, at: int, size_bytes: int, mark: Mark) -> None:
        self._copy_and_wait(slab[:size_bytes], self._view_of_storage(storage, at, size_bytes), mark)

    def copy_slab_to_storage(self, slab: Any, storage: Any, at: int, size_bytes: int, mark: Mark) -> None:
        self._copy_and_wait(self._view_of_storage(storage, at, size_bytes), slab[:size_bytes], mark)

    def _view_of_storage(self, storage: Any, at: int, size_bytes: int) -> Any:
        import torch

        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[at : at + size_bytes]

    def _copy_and_wait(self, target: Any, source: Any, mark: Mark) -> None:
        import torch

        stream = self._streams.get()
        try:
            stream.wait_event(mark.event)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()
        finally:
            self._streams.put(stream)

    def close(self) -> None:
        import kvikio.buffer

        kvikio.buffer.memory_deregister(self._bytes)
        self._arena.free()


class DirectTicket:
    """A transfer by one of our threads. When `wait` returns, the bytes have arrived: there is no event."""

    def __init__(self, future: Future[None], what: str, path: str, name: str, deadline_s: float) -> None:
        self._future = future
        self._what, self._path, self._name, self._deadline_s = what, path, name, deadline_s

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        try:
            self._future.result(self._deadline_s)
        except FutureTimeoutError:
            raise TransferTimeoutError(
                f"the {self._what} of tensor '{self._name}' at {self._path} did not end within "
                f"{self._deadline_s:g} s; its slab is not used again. The kernel's log tells about the drive",
                tensor=self._name,
                path=self._path,
            ) from None


class DirectFile:
    """One file of the store. `copy_out_starter` and `copy_in_starter` return what `Device.begin_copy_out` and
    `begin_copy_in` take."""

    def __init__(
        self, path: Path, stage: Stage, *, direct: bool = True, deadline_s: float = DEADLINE_S
    ) -> None:
        """`path` exists, is ours, and may be unlinked when this returns: kvikio opens it by name, twice, now.
        Not `direct`: with kvikio's own fallback through RAM, for tests."""
        import kvikio
        import kvikio.defaults

        mode = kvikio.CompatMode.OFF if direct else kvikio.CompatMode.ON
        with kvikio.defaults.set({"compat_mode": mode}):
            self._file = kvikio.CuFile(str(path), "r+")
        self.path = str(path)
        self.stage = stage
        self.deadline_s = deadline_s
        self._count = itertools.count()
        self._orders: queue.PriorityQueue[tuple[int, int, Callable[[Any], None]]] = queue.PriorityQueue()
        # Daemons: a drive that hangs must not keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=self._run_queued_transfers, args=(slab,), name="teraio-gds", daemon=True)
            for slab in stage.slabs
        ]
        for thread in self._threads:
            thread.start()

    def copy_out_starter(self, offset: int, name: str = "", demand: bool = False) -> Start:
        return lambda storage, mark: self._queue_transfer(
            self._write_through_slab, offset, storage, mark, name, demand
        )

    def copy_in_starter(self, offset: int, name: str = "", demand: bool = False) -> Start:
        return lambda storage, mark: self._queue_transfer(
            self._read_through_slab, offset, storage, mark, name, demand
        )

    def _queue_transfer(
        self, move: Callable[..., None], offset: int, storage: Any, mark: Mark, name: str, demand: bool
    ) -> DirectTicket:
        assert offset % BLOCK == 0, f"offset {offset} is no multiple of {BLOCK}"
        future: Future[None] = Future()

        def run_transfer(slab: Any) -> None:
            try:
                self._transfer_slab_by_slab(move, slab, offset, storage, mark, name)
            except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
                future.set_exception(error)
            else:
                future.set_result(None)

        self._orders.put((int(not demand), next(self._count), run_transfer))
        what = "write" if move == self._write_through_slab else "read"
        return DirectTicket(future, what, self.path, name, self.deadline_s)

    def _run_queued_transfers(self, slab: Any) -> None:
        """One thread per slab: one that hangs keeps its slab, and nobody else ever gets it."""
        while True:
            urgency, _, order = self._orders.get()
            if urgency == LAST:
                return
            order(slab)

    def _transfer_slab_by_slab(
        self, move: Callable[..., None], slab: Any, offset: int, storage: Any, mark: Mark, name: str
    ) -> None:
        for at in range(0, total := storage.nbytes(), self.stage.slab_bytes):
            move(slab, storage, at, min(self.stage.slab_bytes, total - at), offset + at, mark, name)

    def _write_through_slab(
        self, slab: Any, storage: Any, at: int, size: int, offset: int, mark: Mark, name: str
    ) -> None:
        self.stage.copy_storage_to_slab(slab, storage, at, size, mark)
        self._transfer_whole_blocks(self._file.pwrite, slab, size, offset, StoreWriteError, name)

    def _read_through_slab(
        self, slab: Any, storage: Any, at: int, size: int, offset: int, mark: Mark, name: str
    ) -> None:
        self._transfer_whole_blocks(self._file.pread, slab, size, offset, StoreReadError, name)
        self.stage.copy_slab_to_storage(slab, storage, at, size, mark)

    def _transfer_whole_blocks(
        self, call: Callable[..., Any], slab: Any, size: int, offset: int, kind: type[StoreError], name: str
    ) -> None:
        """Whole blocks, in one task: the extent is taken up to the next multiple of 4096 behind the bytes."""
        padded = -(-size // BLOCK) * BLOCK
        try:
            moved = call(slab, padded, offset, task_size=padded).get()
        except (RuntimeError, OSError, ValueError) as error:
            raise self._store_error_from_text(kind, name, offset, str(error)) from error
        if moved != padded:
            raise self._store_error_from_text(kind, name, offset, f"{moved} of {padded} bytes")

    def _store_error_from_text(self, kind: type[StoreError], name: str, offset: int, text: str) -> StoreError:
        """kvikio raises RuntimeError with a text and no errno: the number is read from the text."""
        number = errno_named_in_text(text)
        if kind is StoreWriteError and number in (errno.ENOSPC, errno.EDQUOT):
            kind = StoreFullError
        verb = "read" if kind is StoreReadError else "written"
        return kind(
            f"tensor '{name}' could not be {verb} at byte {offset} of {self.path}: {text.strip()[:300]}. "
            "Without kvikio, teraio goes through host memory",
            errno=number,
            tensor=name,
            path=self.path,
        )

    def close(self, within_s: float = 5.0) -> bool:
        """Ends when everything submitted has. False: something hangs; it and the file are left behind."""
        for _ in self._threads:
            self._orders.put((LAST, next(self._count), lambda slab: None))
        ends = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._file.close()
        return True


def errno_named_in_text(text: str) -> int:
    """The system's error number that a text names by symbol, by number or in words; 0 if it names none."""
    symbol = re.search(r"\b(E[A-Z0-9]{3,})\b", text)
    if symbol and hasattr(errno, symbol[1]):
        return int(getattr(errno, symbol[1]))
    number = re.search(r"errno[ =:]*(\d+)", text)
    if number:
        return int(number[1])
    return next((code for code in errno.errorcode if os.strerror(code).lower() in text.lower()), 0)


# ---- is it direct?


def reason_without_gds(folder: Path) -> str | None:
    """Why files in `folder` cannot be reached directly; None if one was, just now. Tried in a process of its
    own, and only where torch has a device."""
    from ..device import cuda

    missing = cuda.reason_without_gpu()
    if missing is not None:
        return f"no GPU ({missing})"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed (pip install 'teraio[gds-cu13]', or gds-cu12)"
    try:
        ran = subprocess.run(
            [sys.executable, "-m", __name__, str(folder)],
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the trial did not end within {TRIAL_S:.0f} s: the cuFile driver hangs"
    if ran.returncode == 0:
        return None
    return ran.stdout.strip() or (ran.stderr.strip().splitlines() or ["the trial crashed"])[-1]


def install_strict_cufile_configuration(folder: Path) -> None:
    """Lets cuFile read a copy of its configuration in which going through host memory is not allowed; to be
    called before it is loaded. Its log goes to `folder` too, and not to wherever this process was started."""
    source = Path(os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json"))
    found = parse_cufile_json(source.read_text()) if source.exists() else {}
    found.setdefault("properties", {})["allow_compat_mode"] = False
    copy = folder / "cufile.json"
    copy.write_text(json.dumps(found))
    os.environ["CUFILE_ENV_PATH_JSON"] = str(copy)
    os.environ.setdefault("CUFILE_LOGFILE_PATH", str(folder / "cufile.log"))


def parse_cufile_json(text: str) -> dict[str, Any]:
    """cufile.json is JSON with `//` comments and, as it is shipped, commas before closing brackets."""
    plain = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda match: match[1] or "", text)
    found = json.loads(re.sub(r",(\s*[}\]])", r"\1", plain))
    if not isinstance(found, dict):
        raise ValueError("cufile.json is no object")
    return found


def open_direct_file(path: Path, stage: Stage) -> DirectFile:
    """The file, tried: a block goes out and comes back. StoreError tells what is not direct about it."""
    import kvikio.cufile_driver

    try:
        file = DirectFile(path, stage)
    except (RuntimeError, OSError) as error:
        raise StoreError(f"cuFile refuses {path}: {error}", path=str(path)) from error
    if kvikio.cufile_driver.get("allow_compat_mode"):
        file.close()
        raise StoreError(f"cuFile may go through host memory for {path} (allow_compat_mode)", path=str(path))
    return file


def try_gds_round_trip(folder: Path) -> str | None:
    """Writes and reads a block of device memory in a private file; what went wrong, or None."""
    import torch

    from ..device.cuda import CudaDevice

    with tempfile.TemporaryDirectory(prefix="teraio-gds-") as private:
        install_strict_cufile_configuration(Path(private))
        device = CudaDevice()
        stage = CudaStage(device, TRIAL_BYTES, 1)
        handle, name = tempfile.mkstemp(prefix="teraio-", dir=folder)
        try:
            os.ftruncate(handle, TRIAL_BYTES)
            file = open_direct_file(Path(name), stage)
            os.unlink(name)
            sent = torch.randint(0, 255, (TRIAL_BYTES,), dtype=torch.uint8, device=device.device)
            came = torch.zeros_like(sent)
            for start, tensor in (
                (file.copy_out_starter(0, "trial"), sent),
                (file.copy_in_starter(0, "trial"), came),
            ):
                start(tensor.untyped_storage(), device.mark_compute_stream()).wait()
            same = bool(torch.equal(sent, came))
            file.close()
            stage.close()
            return None if same else "the bytes that came back are others"
        except StoreError as error:
            return str(error)
        finally:
            os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


if __name__ == "__main__":
    WRONG = try_gds_round_trip(Path(sys.argv[1]))
    sys.stdout.write(WRONG or "")
    sys.exit(WRONG is not None)
