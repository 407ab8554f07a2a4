"""A check of runtime/store/gds.py against the real kvikio on a machine without a GPU.

    python benchmarks/io/kvikio_adapter.py [--venv DIR]

The script makes a virtual environment outside of the tree and installs kvikio in this environment. It omits
packages that kvikio never imports, which saves 1.25 GB. It builds a libcuda.so.1 whose functions return "not
initialized". With this driver kvikio treats every buffer as host memory, and kvikio's own fallback does the
I/O. The script then checks the signatures that gds.py calls, and moves bytes through the adapter. It does not
test the direct path, which needs a GPU. The script prints one line per check. Exit code 0 means passed, 1
failed, 77 skipped (kvikio could not be installed).
"""

from __future__ import annotations

import argparse
import inspect
import os
import resource
import signal
import site
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

SKIPPED = 77
PACKAGES = (
    "kvikio-cu13",
    "libkvikio-cu13",
    "nvidia-cufile",
    "rapids-logger",
    "cuda-pathfinder",
    "numpy",
    "packaging",
)
NOT_INITIALIZED = 3
# The functions that kvikio looks up when it loads the driver, besides cuInit and cuDriverGetVersion. The two
# must succeed: kvikio reports their errors through an object under construction, and then deadlocks.
DRIVER = """
cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister cuMemcpyHtoDAsync_v2
cuMemcpyDtoHAsync_v2 cuMemcpyAsync cuPointerGetAttribute cuPointerGetAttributes cuCtxCreate cuCtxCreate_v2
cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetCurrent
cuCtxGetDevice cuCtxGetDevice_v2 cuMemGetAddressRange_v2 cuDeviceGet cuDeviceGetCount cuDeviceGetAttribute
cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuStreamSynchronize cuStreamCreate cuStreamDestroy_v2
cuEventSynchronize cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuLaunchHostFunc
cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return inside(args.inside)
    with tempfile.TemporaryDirectory(prefix="teraio-kvikio-") as private:
        folder = args.venv or Path(private) / "venv"
        problem = prepare(folder)
        if problem:
            print(f"SKIP  {problem}")
            return SKIPPED
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "stub")}
        command = [str(folder / "bin/python"), os.path.abspath(__file__), "--inside", packages]
        # Set a time limit, because kvikio may hang instead of failing. cuFile writes its log to the working
        # directory.
        return subprocess.run(command, env=environment, cwd=private, timeout=60, check=False).returncode


def prepare(folder: Path) -> str:
    """Prepare the environment. Return an empty string, or the reason why the environment cannot be used."""
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)
    pip = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--retries",
        "0",
        "--timeout",
        "5",
    ]
    installed = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        return f"kvikio cannot be installed: {(installed.stderr.strip().splitlines() or ['?'])[-1]}"
    stub = folder / "stub"
    stub.mkdir(exist_ok=True)
    source = "\n".join(f"int {name}(void) {{ return {NOT_INITIALIZED}; }}" for name in DRIVER.split())
    source += "\nint cuInit(unsigned flags) { return 0; }"
    source += "\nint cuDriverGetVersion(int *version) { *version = 13000; return 0; }"
    source += "\n" + "\n".join(
        f'int {name}(int error, const char **text) {{ *text = "stub"; return 0; }}'
        for name in ("cuGetErrorName", "cuGetErrorString")
    )
    (stub / "stub.c").write_text(source)
    try:
        build = ["gcc", "-shared", "-fPIC", str(stub / "stub.c"), "-o", str(stub / "libcuda.so.1")]
        subprocess.run(build, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no C compiler for the stub driver: {error}"
    return ""


# ---- in the virtual environment


def inside(packages: Path) -> int:
    site.addsitedir(str(packages))  # teraio and other packages of the outer interpreter, after kvikio's own
    failed = 0
    for check in (signatures, round_trips, unlinked, the_end_of_the_file, a_full_disk):
        begun = time.monotonic()
        try:
            found = check()
            verdict = "PASS"
        except Exception as error:  # noqa: BLE001  every error is a finding about kvikio
            found, verdict, failed = f"{type(error).__name__}: {error}", "FAIL", 1
        print(f"{verdict}  {check.__name__:20} {found} ({time.monotonic() - begun:.2f} s)", flush=True)
    return failed


def signatures() -> str:
    """Check that kvikio's functions accept the arguments that gds.py passes."""
    import kvikio
    import kvikio.buffer
    import kvikio.cufile_driver
    import kvikio.defaults

    def takes(call: Any, *arguments: Any, **named: Any) -> None:
        inspect.signature(call).bind(*arguments, **named)

    takes(kvikio.CuFile, "path", "r+")
    for move in (kvikio.CuFile.pread, kvikio.CuFile.pwrite):
        takes(move, None, b"", 4096, 0, task_size=4096)
    takes(kvikio.CuFile.close, None)
    takes(kvikio.cufile.IOFuture.get, None)
    takes(kvikio.buffer.memory_register, None)
    takes(kvikio.buffer.memory_deregister, None)
    assert {"OFF", "ON"} <= set(kvikio.CompatMode.__members__)
    assert kvikio.cufile_driver.get("allow_compat_mode") in (True, False)
    with kvikio.defaults.set({"compat_mode": kvikio.CompatMode.OFF}):
        assert kvikio.defaults.get("compat_mode") == kvikio.CompatMode.OFF
    return f"kvikio {kvikio.__version__}, cuFile {kvikio.cufile_driver.libcufile_version()}"


class HostStorage:
    """A storage with only the methods that the adapter uses."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def nbytes(self) -> int:
        return len(self.data)


class HostStage:
    """A stage (the slabs through which the adapter copies) in RAM instead of device memory."""

    slab_bytes = 1 << 20

    def __init__(self, count: int = 3) -> None:
        import numpy

        self.slabs: list[Any] = [numpy.zeros(self.slab_bytes, dtype=numpy.uint8) for _ in range(count)]

    def copy_storage_to_slab(
        self, slab: Any, storage: HostStorage, at: int, size_bytes: int, mark: Any
    ) -> None:
        memoryview(slab)[:size_bytes] = memoryview(storage.data)[at : at + size_bytes]

    def copy_slab_to_storage(
        self, slab: Any, storage: HostStorage, at: int, size_bytes: int, mark: Any
    ) -> None:
        memoryview(storage.data)[at : at + size_bytes] = memoryview(slab)[:size_bytes]


def opened(size: int = 1 << 26) -> Any:
    from teraio.runtime.store import gds

    path = Path("store")
    path.touch(0o600)
    os.truncate(path, size)
    return gds.DirectFile(path, HostStage(), direct=False)


def round_trips() -> str:
    from teraio.runtime.device.pending_transfer import Mark

    file, offset, extents = opened(), 0, []
    for size in (1, 4095, 4096, 4097, 65536, (1 << 20) + 5, 3 * (1 << 20) + 77, 1 << 24):
        extents.append((offset, os.urandom(size)))
        offset += -(-size // 4096) * 4096
    for ticket in [file.copy_out_starter(at, "t")(HostStorage(data), Mark()) for at, data in extents]:
        ticket.wait()
    came = [HostStorage(bytes(len(data))) for _, data in extents]
    for ticket in [file.copy_in_starter(at, "t")(storage, Mark()) for (at, _), storage in zip(extents, came)]:
        ticket.wait()
    assert [bytes(storage.data) for storage in came] == [data for _, data in extents]
    assert file.close()
    return f"{len(extents)} tensors, {offset >> 20} MiB out and back, bit-equal"


def unlinked() -> str:
    from teraio.runtime.device.pending_transfer import Mark

    file, data = opened(), os.urandom(1 << 20)
    os.unlink("store")
    file.copy_out_starter(0, "t")(HostStorage(data), Mark()).wait()
    came = HostStorage(bytes(len(data)))
    file.copy_in_starter(0, "t")(came, Mark()).wait()
    assert bytes(came.data) == data
    assert file.close()
    return "the file may be unlinked once kvikio has opened it"


def the_end_of_the_file() -> str:
    return refused(
        lambda file, storage, mark: file.copy_in_starter(1 << 16, "late")(storage, mark),
        "StoreReadError",
        1 << 16,
    )


def a_full_disk() -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        return refused(
            lambda file, storage, mark: file.copy_out_starter(1 << 20, "big")(storage, mark),
            "StoreWriteError",
            1 << 16,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def refused(move: Any, wanted: str, size: int) -> str:
    """Check that the move raises an error of the class `wanted`, and that the file is usable afterwards."""
    from teraio.errors import StoreError
    from teraio.runtime.device.pending_transfer import Mark

    file = opened(size)
    try:
        move(file, HostStorage(bytes(4096)), Mark()).wait()
    except StoreError as error:
        assert type(error).__name__ == wanted, repr(error)
        found = f"{wanted}, errno {error.errno}: {str(error)[:90]}"
    else:
        raise AssertionError("no error")
    file.copy_out_starter(0, "after")(HostStorage(b"x" * 4096), Mark()).wait()
    assert file.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
