"""GPUDirect Storage through kvikio: transfers between device memory and a file without a copy in RAM. A slab
is a buffer in device memory.

    evict   compute --mark--> side stream: tensor -> registered device slab --> cuFile writes the slab
    fetch   cuFile reads into a slab --> side stream, after the mark: slab -> tensor

GPUDirect is used only after a trial has shown that transfers bypass RAM. Three silent fallbacks would copy
through RAM. This module prevents each of them:

    1  kvikio's fallback: CompatMode.OFF turns it into an error.
    2  cuFile's fallback: a private copy of its configuration switches `allow_compat_mode` off. The driver's
       value is then checked.
    3  The fallback for a file system without cuFile support: the trial transfers a block in the same folder.

The trial runs in a separate process with a time limit, because `cuFileDriverOpen` spins forever if the
machine has no device.

kvikio is imported only inside functions. kvikio's I/O ignores streams, so its caller must synchronize the
stream before each transfer. These transfers have no checksums, because the host never has the bytes.
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

BLOCK = 4096  # Alignment of offset, size and address. If it is violated, cuFile uses a bounce buffer.
SLAB_BYTES, SLABS = 16 * 2**20, 4
DEADLINE_S = 60.0
TRIAL_S = 10.0  # Time limit of the trial. The start of Python, torch and the driver takes 4 to 6 s of it.
TRIAL_BYTES = 2**20
LAST = 2  # Priority of the request that ends a thread. Fetches on demand have priority 0, and prefetches 1.


class Stage(Protocol):
    """Slabs (buffers in device memory) for kvikio. Also the copies between storages and slabs, which return
    only when they are complete."""

    slabs: list[Any]
    slab_bytes: int

    def copy_storage_to_slab(self, slab: Any, storage: Any, at: int, size_bytes: int, mark: Mark) -> None:
        """Copy storage[at : at + size_bytes] to the slab. Begin after the device has reached `mark`."""
        ...

    def copy_slab_to_storage(self, slab: Any, storage: Any, at: int, size_bytes: int, mark: Mark) -> None:
        """Copy the slab to storage[at : at + size_bytes]. Begin after the device has reached `mark`."""
        ...


class Arena:
    """Device memory that comes from the driver, and not from torch's allocator.

    To register a block of torch's allocator, kvikio registers the whole segment of the block. When torch
    frees registered memory, the kernel module can hang.
    """

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
    """Slabs (buffers) in the memory of a CUDA device. kvikio registers the slabs when they are allocated. The
    budget includes the bytes of the slabs."""

    def __init__(self, device: Any, slab_bytes: int = SLAB_BYTES, count: int = SLABS) -> None:
        import kvikio.buffer
        import torch

        self.device = device.device
        self.slab_bytes = slab_bytes
        self.device_bytes = slab_bytes * count
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            self._arena = Arena(self.device_bytes)  # allocated in the current CUDA context
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
    """The ticket of a transfer that a thread of DirectFile runs. The ticket has no CUDA event, so `wait`
    blocks until the bytes have arrived."""

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
                f"{self._deadline_s:g} s; its slab is not used again. See the kernel's log (dmesg)",
                tensor=self._name,
                path=self._path,
            ) from None


class DirectFile:
    """One file of the store, with transfers through GPUDirect. `copy_out_starter` and `copy_in_starter`
    return functions that begin a transfer. `Device.begin_copy_out` and `begin_copy_in` call these
    functions."""

    def __init__(
        self, path: Path, stage: Stage, *, direct: bool = True, deadline_s: float = DEADLINE_S
    ) -> None:
        """Open an existing file of the store by its name. After this, the file may be unlinked.

        With `direct=False`, which only tests use, kvikio copies through RAM.
        """
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
        # The threads are daemons, because a hanging drive must not block the interpreter's exit.
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
            except BaseException as error:  # noqa: BLE001  the ticket's `wait` raises the error
                future.set_exception(error)
            else:
                future.set_result(None)

        self._orders.put((int(not demand), next(self._count), run_transfer))
        what = "write" if move == self._write_through_slab else "read"
        return DirectTicket(future, what, self.path, name, self.deadline_s)

    def _run_queued_transfers(self, slab: Any) -> None:
        """Run queued transfers with this slab as the buffer. Each slab has its own thread, so a hanging
        transfer blocks only one slab."""
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
        """Transfer `size` bytes, rounded up to whole blocks, in one task of kvikio. The extent has room for
        the rounded size."""
        padded = -(-size // BLOCK) * BLOCK
        try:
            moved = call(slab, padded, offset, task_size=padded).get()
        except (RuntimeError, OSError, ValueError) as error:
            raise self._store_error_from_text(kind, name, offset, str(error)) from error
        if moved != padded:
            raise self._store_error_from_text(kind, name, offset, f"{moved} of {padded} bytes")

    def _store_error_from_text(self, kind: type[StoreError], name: str, offset: int, text: str) -> StoreError:
        """Make the store's error for an error of kvikio with this text. kvikio's error has no errno, so find
        the errno in the text."""
        number = errno_named_in_text(text)
        if kind is StoreWriteError and number in (errno.ENOSPC, errno.EDQUOT):
            kind = StoreFullError
        verb = "read" if kind is StoreReadError else "written"
        return kind(
            f"tensor '{name}' could not be {verb} at byte {offset} of {self.path}: {text.strip()[:300]}. "
            "Uninstall kvikio to transfer through host memory",
            errno=number,
            tensor=name,
            path=self.path,
        )

    def close(self, within_s: float = 5.0) -> bool:
        """Finish all submitted transfers, end the threads and close the file.

        If a transfer hangs, return False. The file then remains open, and the transfer's thread continues to
        run.
        """
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
    """Return the errno that the text contains as a symbol, a number or words. Return 0 if the text contains
    none."""
    symbol = re.search(r"\b(E[A-Z0-9]{3,})\b", text)
    if symbol and hasattr(errno, symbol[1]):
        return int(getattr(errno, symbol[1]))
    number = re.search(r"errno[ =:]*(\d+)", text)
    if number:
        return int(number[1])
    return next((code for code in errno.errorcode if os.strerror(code).lower() in text.lower()), 0)


# ---- the trial


def reason_without_gds(folder: Path) -> str | None:
    """Return the reason why GPUDirect does not work in `folder`, or None if the trial succeeded.

    The trial runs in a separate process. If torch can use no GPU, no trial runs.
    """
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
    """Write to `folder` a copy of cuFile's configuration that forbids the fallback through host memory.

    Call this function before cuFile is loaded. cuFile also writes its log to `folder` then, instead of the
    working directory.
    """
    source = Path(os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json"))
    found = parse_cufile_json(source.read_text()) if source.exists() else {}
    found.setdefault("properties", {})["allow_compat_mode"] = False
    copy = folder / "cufile.json"
    copy.write_text(json.dumps(found))
    os.environ["CUFILE_ENV_PATH_JSON"] = str(copy)
    os.environ.setdefault("CUFILE_LOGFILE_PATH", str(folder / "cufile.log"))


def parse_cufile_json(text: str) -> dict[str, Any]:
    """Parse cufile.json, which is JSON with `//` comments and with commas before closing brackets."""
    plain = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda match: match[1] or "", text)
    found = json.loads(re.sub(r",(\s*[}\]])", r"\1", plain))
    if not isinstance(found, dict):
        raise ValueError("cufile.json is no object")
    return found


def open_direct_file(path: Path, stage: Stage) -> DirectFile:
    """Open the file for GPUDirect. Raise StoreError if kvikio refuses the file, or if cuFile may copy through
    host memory."""
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
    """Write a block of device memory to a private file, and read the file back. Return None if the bytes are
    equal, otherwise the fault."""
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
            return None if same else "the trial read other bytes than it had written"
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
