"""What the stand-in needs: Python 3.12 with the CUDA build of torch, its two libraries, and teraio.

All of it lies in build/cuda-without-gpu, which git ignores, and is made anew only where its sources changed.
NVIDIA's headers and libraries come with torch's own packages; none of them is kept here.

    STANDIN_DEVICES     GPUs, each with                                                       1
    STANDIN_MIB         so much memory                                                        4096
    STANDIN_LATE_US     a piece of a stream's work begins up to so much later than it could   200
    STANDIN_KERNEL_US   a kernel takes at least so long                                       0
    STANDIN_COPY_GB_S   a copy engine carries so much; 0: what memory carries                 0
    STANDIN_COMPUTES    0: kernels only take their time, and numbers mean nothing             1
    STANDIN_REPORT      1: at the end of a process, what was launched and copied
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "cuda-without-gpu"
PYTHON = "python3.12"  # for other versions there is no CUDA build of that torch where wheels usually are
TORCH = "torch==2.11.0"
PACKAGES = ("numpy", "networkx", "ortools", "nanobind", "scikit-build-core", "ninja", "cmake")
DRIVER = ("streams.cpp", "memory.cpp", "device.cpp", "runtime.cpp", "driver.cpp")
OPERATORS = ("operators.cpp", "tensors.h")
TORCH_LIBRARIES = (
    "libtorch_cuda.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libtorch_cuda_linalg.so",
    "libtorch_cpu.so",
)


class SetUpError(RuntimeError):
    """The environment could not be made; says which command failed."""


@dataclass(frozen=True, slots=True)
class Environment:
    python: Path
    site: Path  # site-packages
    libraries: Path
    torch_version: str

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a process that runs on the stand-in."""
        paths = [
            str(path) for path in (self.libraries, HERE, ROOT / "benchmarks" / "gpu", HERE.parent / "support")
        ]
        return {
            **os.environ,
            "LD_PRELOAD": str(self.libraries / "libcuda.so.1"),
            "TRITON_LIBCUDA_PATH": str(self.libraries),
            "STANDIN_TORCH": self.torch_version,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",
            "PYTHONFAULTHANDLER": "1",
            "TERAIO_CACHE_DIR": "off",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(BUILT / "inductor"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **more,
        }


def make(venv: Path | None = None) -> Environment:
    """The environment, made where it is not there yet. `venv`: one that has torch already."""
    BUILT.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    venv = venv or _venv()
    python = venv / "bin" / "python"
    site, version = _about_torch(python)
    libraries = _libraries(python, site, version)
    _teraio(python, venv)
    print(f"the stand-in's environment is there after {time.monotonic() - began:.0f} s", flush=True)
    return Environment(python, site, libraries, version)


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SetUpError(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def _once(what: str, key: str, folder: Path) -> bool:
    """Whether `what` is still to be made in `folder` from sources with this key."""
    stamp = folder / f"{what}.key"
    if stamp.exists() and stamp.read_text() == key:
        return False
    print(f"the stand-in: making {what}", flush=True)
    return True


def _made(what: str, key: str, folder: Path) -> None:
    (folder / f"{what}.key").write_text(key)


def _key(files: Iterable[Path], *more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _venv() -> Path:
    venv = BUILT / "venv"
    if not _once("packages", key := " ".join((TORCH, *PACKAGES)), BUILT):
        return venv
    found = shutil.which(PYTHON)
    if found is None:
        raise SetUpError(f"{PYTHON} is not there; install it, or name it with PATH")
    shutil.rmtree(venv, ignore_errors=True)
    _run(found, "-m", "venv", venv)
    _run(venv / "bin" / "pip", "install", "--quiet", TORCH, *PACKAGES)
    _made("packages", key, BUILT)
    return venv


def _about_torch(python: Path) -> tuple[Path, str]:
    told = _run(python, "-c", "import torch; print(torch.__file__); print(torch.version.git_version)")
    file, version = told.split()
    return Path(file).parents[1], version


def _imported(library: Path) -> set[str]:
    """What a library wants of libcudart."""
    lines = _run("nm", "-D", "--undefined-only", library).splitlines()
    names = (line.split()[-1].split("@") for line in lines)
    return {name for name, *version in names if version and version[-1].startswith("libcudart")}


def _of_triton(folder: Path) -> set[str]:
    """What Triton's launcher wants of the driver; its header renames what its source calls."""
    called = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", (folder / "driver.c").read_text()))
    header = (folder / "include" / "cuda.h").read_text()
    renamed = dict(re.findall(r"^#define (cu[A-Z]\w+)\s+(cu[A-Z]\w+_v\d)\s*$", header, re.MULTILINE))
    return {renamed.get(name, name) for name in called if re.search(rf"CUDAAPI\s+{name}\b", header)}


def _exported(library: Path) -> set[str]:
    lines = _run("nm", "-D", "--defined-only", library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def _libraries(python: Path, site: Path, torch_version: str) -> Path:
    folder = BUILT / "libraries"
    folder.mkdir(exist_ok=True)
    sources = HERE / "driver"
    operators = [sources / name for name in OPERATORS]
    driver = [path for path in sources.iterdir() if path not in operators]
    if _once("driver", key := _key(driver, torch_version), folder):
        _build_driver(sources, folder, site)
        _made("driver", key, folder)
    if _once("operators", key := _key(operators, torch_version), folder):
        _build_operators(sources / OPERATORS[0], folder, python, site)
        _made("operators", key, folder)
    return folder


def _compile(site: Path, headers: Sequence[str | Path], *rest: str | Path) -> None:
    """Build a shared library with NVIDIA's headers and these."""
    nvidia = (site / "nvidia/cu13/include", site / "triton/backends/nvidia/include")
    found = [part for path in (*headers, *nvidia) for part in ("-isystem", path)]
    _run("g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", *found, *rest)


def _build_driver(sources: Path, folder: Path, site: Path) -> None:
    """Build it twice: what it lacks is known once it is there."""
    driver = folder / "libcuda.so.1"
    linked: tuple[str | Path, ...] = ("-o", driver, "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread")
    own = [sources / name for name in DRIVER]
    _compile(site, (), *own, *linked)
    _compile(site, (), *own, _stops(folder, site, driver), "-I", sources, *linked)


def _build_operators(source: Path, folder: Path, python: Path, site: Path) -> None:
    of_python = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('include'))").strip()
    torch = site / "torch"
    headers = (torch / "include", torch / "include/torch/csrc/api/include", of_python)
    named = ("-w", "-DTORCH_EXTENSION_NAME=operators")
    libraries = [f"-l{name}" for name in ("torch_python", "torch_cuda", "torch_cpu", "c10_cuda", "c10")]
    target: tuple[str | Path, ...] = (
        "-o",
        folder / "operators.so",
        f"-L{torch / 'lib'}",
        *libraries,
        folder / "libcuda.so.1",
    )
    _compile(site, headers, *named, source, *target)


def _stops(folder: Path, site: Path, driver: Path) -> Path:
    """For each function that torch or Triton wants and the driver lacks, one that stops by name."""
    wanted = set().union(*(_imported(site / "torch" / "lib" / name) for name in TORCH_LIBRARIES))
    wanted |= _of_triton(site / "triton" / "backends" / "nvidia")
    there = _exported(driver)
    lacking = sorted(name for name in wanted if name not in there)
    lines = ['#include "stop.h"']
    lines += [
        f'STANDIN_EXPORT void {name}() {{ standin::stop("{name} is called, and is not modelled"); }}'
        for name in lacking
    ]
    source = folder / "stops.cpp"
    source.write_text("\n".join(lines) + "\n")
    print(f"the stand-in: {len(wanted)} functions are wanted, {len(lacking)} of them stop", flush=True)
    return source


def _teraio(python: Path, venv: Path) -> None:
    """As an editable installation: changed Python files count at once, changed C++ files build it anew."""
    key = _key((path for path in (ROOT / "csrc").rglob("*") if path.is_file()), str(ROOT), str(venv))
    if _once("teraio", key, BUILT):
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ROOT)
        _made("teraio", key, BUILT)


if __name__ == "__main__":
    made = make(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(made.python)
