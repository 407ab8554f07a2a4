"""Part 1: does it build and load here, what do the links give, and do the native tests pass."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sections import ROOT, Figures, NotSupported, Room, Section

MIB = 2**20
TENSOR = 256 * MIB
REHEARSAL = bool(os.environ.get("REHEARSE"))
SOLVERS = ("ortools.sat.python.cp_model", "ortools.math_opt.python.mathopt")


def ran(
    command: list[str], room: Room, limit: float | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Output goes to the section's log as well, so that a failure is seen there. Past the limit, where it is:
    Python says so on SIGABRT. Files instead of pipes: a compiler's workers may outlive it and hold those."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, **settings)
        late = False
        try:
            child.wait(limit or room.seconds)
        except subprocess.TimeoutExpired:
            late = True
            child.send_signal(signal.SIGABRT)
            time.sleep(1)
            child.kill()
        code = child.wait()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, code, out.read(), err.read())
    print(" ".join(command), done.stdout, done.stderr, sep="\n")
    if late:
        raise TimeoutError(f"no end after {limit or room.seconds:.0f} s: {done.stderr[-2000:]}")
    return done


def torch_on_gpu() -> Any:
    """torch, where it sees a GPU."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise NotSupported(f"torch {torch.__version__} sees no CUDA device")
    return torch


def machine(room: Room) -> Figures:
    figures: Figures = {"memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    if shutil.which("nvidia-smi"):
        names = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
        asked = ran(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"], room)
        figures["gpu"] = dict(zip(names.split(","), asked.stdout.strip().split(", "), strict=False))
    torch = importlib.import_module("torch")
    figures |= {"torch": torch.__version__, "cuda": torch.version.cuda, "rehearsal": REHEARSAL}
    return figures | {"ortools": version_of("ortools"), "triton": version_of("triton")}


def version_of(package: str) -> str:
    """Without the solver the planner does with less, and says so; without Triton Inductor has no GPU."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def build(room: Room) -> Figures:
    """The package, csrc and all, with the build tools that are here or were carried; fetches nothing. What an
    earlier part built from the same sources is used again."""
    reused = room.site.is_dir()
    if not reused:
        partial = room.kept / f"site.{os.getpid()}"  # whole or not at all
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
        command += ["--no-compile", "--disable-pip-version-check", "--target", str(partial)]
        command += ["--config-settings", f"build-dir={room.scratch / 'build'}", str(ROOT)]
        if ran(command, room).returncode:
            raise RuntimeError("the build failed")
        partial.rename(room.site)
    native = next(path.name for path in (room.site / "teraio").glob("_native*.so"))
    return {"native": native, "reused": reused}


def imports(room: Room) -> Figures:
    """Dependencies and the face of the package: seconds that each import took, or what went wrong. Without
    the solver there is a planner still."""
    found: Figures = {}
    for name in ("teraio._native", "networkx", *SOLVERS, "torch", "teraio.backend"):
        start = time.perf_counter()
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  one that fails must not hide the next
            found[name] = repr(error)
            continue
        found[name] = round(time.perf_counter() - start, 3)
        assert name.split(".")[0] != "teraio" or Path(str(module.__file__)).is_relative_to(room.site), module
    if any(isinstance(entry, str) and name not in SOLVERS for name, entry in found.items()):
        raise RuntimeError(found)
    return {
        "seconds": found,
        "registered": "teraio" in importlib.import_module("torch").compiler.list_backends(),
    }


def rate(size_bytes: int, copy: Callable[[], None], repeats: int = 7) -> Figures:
    """Bytes per second of a call that moves so many bytes and returns when they have arrived."""
    copy()
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        copy()
        rates.append(round(size_bytes / (time.perf_counter() - start)))
    return {"median_bytes_per_s": round(statistics.median(rates)), "min": min(rates), "max": max(rates)}


def links(room: Room) -> Figures:
    """What plain pinned copies reach: the ceiling for everything that moves tensors. Both ways at once, each
    way moves as many bytes as alone, so full duplex shows as twice the rate."""
    torch = torch_on_gpu()
    size, rounds = 256 * MIB, 8
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(*directions: int) -> None:
        for _ in range(rounds):
            for way in directions:
                with torch.cuda.stream(streams[way]):
                    pair = (device[0], host[0]) if way == 0 else (host[1], device[1])
                    pair[0].copy_(pair[1], non_blocking=True)
        torch.cuda.synchronize()

    return {
        "host_to_device": rate(size * rounds, lambda: copy(0)),
        "device_to_host": rate(size * rounds, lambda: copy(1)),
        "both_at_once": rate(2 * size * rounds, lambda: copy(0, 1)),
    }


def disk(room: Room) -> Figures:
    """The native engine against one file in the temporary folder: 256 MiB tensors, 16 MiB slabs, depth 4."""
    count = int(min(8, shutil.disk_usage(room.scratch).free // 2 // TENSOR))
    if count == 0:
        raise NotSupported(f"less than {2 * TENSOR // MIB} MiB free in {room.scratch}")
    path = room.scratch / "disk.bin"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:  # a file system without it; the engine counts the file as buffered
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, TENSOR * count)
    return {
        "bytes": TENSOR * count,
        "with checksums": disk_rates(fd, path, count, checksums=True),
        "without checksums": disk_rates(fd, path, count, checksums=False),
    }


def disk_rates(fd: int, path: Path, count: int, *, checksums: bool) -> Figures:
    """`count` tensors out, then in again, all submitted at once. Random bytes, as drives may compress."""
    native = importlib.import_module("teraio._native")
    memory = mmap.mmap(-1, TENSOR)
    memory.write(os.urandom(MIB) * (TENSOR // MIB))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    slabs, io = native.Slabs(16 * MIB, 8), native.ThreadIo([(fd, str(path))], 4)
    transfers = native.Transfers(io, slabs, checksums=checksums)

    def move(submit: Callable[..., int]) -> None:
        tickets = [submit(address, TENSOR, [(0, i * TENSOR, TENSOR)], i + 1, 1) for i in range(count)]
        for ticket in tickets:
            transfers.wait(ticket)

    figures = {
        "write": rate(TENSOR * count, lambda: move(transfers.out), repeats=3),
        "read": rate(TENSOR * count, lambda: move(transfers.into), repeats=3),
        "buffered_files": io.buffered_files,
        "page_bytes": slabs.page_bytes,
    }
    transfers.close()
    return figures


class CuFileError(ctypes.Structure):
    _fields_ = (("file", ctypes.c_int), ("driver", ctypes.c_int))


def gds(room: Room) -> Figures:
    """Whether bytes could go between GPU and SSD directly, and what is missing if not."""
    torch_on_gpu()  # first of all: without a device, opening cuFile's driver never returns
    figures: Figures = {
        "nvidia_fs": Path("/proc/driver/nvidia-fs/version").exists(),
        "udev": Path("/run/udev").is_dir(),
        "temporary_folder": ran(["stat", "-f", "-c", "%T", str(room.scratch)], room).stdout.strip(),
    }
    try:
        figures["kvikio"] = importlib.import_module("kvikio").__version__
    except ImportError as error:
        figures["kvikio"] = f"absent: {error}"
    try:
        library = ctypes.CDLL("libcufile.so.0")
    except OSError as error:
        return figures | {"libcufile": f"absent: {error}", "direct": False}
    library.cuFileDriverOpen.restype = CuFileError
    opened = library.cuFileDriverOpen()
    figures["driver_open"] = {"cufile_error": opened.file, "cuda_error": opened.driver}
    return figures | {"direct": bool(opened.file == 0 and figures["nvidia_fs"])}


def native_tests(room: Room) -> Figures:
    """In this process alone: xdist's options in pyproject.toml are overridden, as no plugin is loaded."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = ran([*command, "-o", "addopts=-q", "tests/native"], room, cwd=ROOT)
    closing = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    if done.returncode:
        raise RuntimeError(closing or done.stderr[-1000:])
    return {"closing": closing}


def demo(room: Room) -> Figures:
    """A small Llama inside half of its device memory, bit for bit as without a budget."""
    torch_on_gpu()
    done = ran([sys.executable, "-m", "teraio", "demo", "--device", "cuda", "--json"], room, cwd=room.scratch)
    if done.returncode == 2 and "unrecognized arguments" in done.stderr:
        raise NotSupported("this version's demo runs on the CPU only")
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}")
    return {"output": done.stdout[-4000:]}


SECTIONS = (
    Section(machine, 60),
    Section(build, 180),
    Section(imports, 90),
    Section(links, 60),
    Section(demo, 90),
    Section(native_tests, 150),
    Section(disk, 90),
    Section(gds, 30),
)
