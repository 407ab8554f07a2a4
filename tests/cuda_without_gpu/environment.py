"""The environment of the stand-in, which replaces the GPU's driver and computes on the CPU.

It contains Python 3.12 with the CUDA build of torch, the stand-in's two libraries, and teraio. All of it is
in build/cuda-without-gpu, which git ignores. A part is built again only if its sources changed. NVIDIA's
headers and libraries come with torch's own packages, so the repository contains none of them.

    STANDIN_DEVICES     number of GPUs                                                       1
    STANDIN_MIB         memory of each GPU                                                   4096
    STANDIN_LATE_US     largest random delay of one piece of a stream's work                   200
    STANDIN_KERNEL_US   least duration of a kernel                                           0
    STANDIN_COPY_GB_S   rate of a copy engine; 0: as fast as memory                          0
    STANDIN_COMPUTES    0: kernels only take their time, and numbers mean nothing            1
    STANDIN_REPORT      1: print launches and copies at the end of a process
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
PYTHON = "python3.12"  # the usual index has CUDA builds of this torch version only for Python 3.12
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
    """A failure to build the environment. The message names the command that failed."""


@dataclass(frozen=True, slots=True)
class Environment:
    python: Path
    site: Path  # site-packages
    libraries: Path
    torch_version: str

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment variables of a process that runs on the stand-in."""
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
            "TERAIO_PLANNING": "inline",  # so that a short training ends with a plan
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(BUILT / "inductor"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **more,
        }


def make(venv: Path | None = None) -> Environment:
    """Return the environment. Build its missing or outdated parts first.

    `venv` is an existing virtual environment with torch. If `venv` is None, make a virtual environment.
    """
    BUILT.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    venv = venv or _venv()
    python = venv / "bin" / "python"
    site, version = _about_torch(python)
    libraries = _libraries(python, site, version)
    _teraio(python, venv)
    print(f"the stand-in's environment is ready after {time.monotonic() - began:.0f} s", flush=True)
    return Environment(python, site, libraries, version)


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SetUpError(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def _once(what: str, key: str, folder: Path) -> bool:
    """Return True if `what` must be built in `folder`, because it was not yet built from sources with this
    key.
    """
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
        raise SetUpError(f"{PYTHON} is missing; install it, or add it to PATH")
    shutil.rmtree(venv, ignore_errors=True)
    _run(found, "-m", "venv", venv)
    _run(venv / "bin" / "pip", "install", "--quiet", TORCH, *PACKAGES)
    _made("packages", key, BUILT)
    return venv


def _about_torch(python: Path) -> tuple[Path, str]:
    answer = _run(python, "-c", "import torch; print(torch.__file__); print(torch.version.git_version)")
    file, version = answer.split()
    return Path(file).parents[1], version


def _imported(library: Path) -> set[str]:
    """Return the names of the libcudart functions that `library` imports."""
    lines = _run("nm", "-D", "--undefined-only", library).splitlines()
    names = (line.split()[-1].split("@") for line in lines)
    return {name for name, *version in names if version and version[-1].startswith("libcudart")}


def _of_triton(folder: Path) -> set[str]:
    """Return the names of the driver functions that Triton's launcher imports.

    If a header renames a function, such as `cuMemFree` to `cuMemFree_v2`, return the new name.
    """
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
    """Compile a shared library with these folders of headers, and with NVIDIA's headers."""
    nvidia = (site / "nvidia/cu13/include", site / "triton/backends/nvidia/include")
    found = [part for path in (*headers, *nvidia) for part in ("-isystem", path)]
    _run("g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", *found, *rest)


def _build_driver(sources: Path, folder: Path, site: Path) -> None:
    """Build the driver twice. The first build shows which functions the driver lacks. The second build has,
    for each of these functions, a function that stops the process.
    """
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
    """Write a C++ file with a function for each function that torch or Triton imports but the driver does not
    have. Each function stops the process. Return the file's path.
    """
    wanted = set().union(*(_imported(site / "torch" / "lib" / name) for name in TORCH_LIBRARIES))
    wanted |= _of_triton(site / "triton" / "backends" / "nvidia")
    exported = _exported(driver)
    lacking = sorted(name for name in wanted if name not in exported)
    lines = ['#include "stop.h"']
    lines += [
        f'STANDIN_EXPORT void {name}() {{ standin::stop("{name} is called, and is not modelled"); }}'
        for name in lacking
    ]
    source = folder / "stops.cpp"
    source.write_text("\n".join(lines) + "\n")
    print(f"the stand-in: {len(wanted)} functions are imported, {len(lacking)} of them stop", flush=True)
    return source


def _teraio(python: Path, venv: Path) -> None:
    """Install teraio in editable mode. Install it again if C++ files have changed. Changes of Python files
    need no new installation.
    """
    key = _key((path for path in (ROOT / "csrc").rglob("*") if path.is_file()), str(ROOT), str(venv))
    if _once("teraio", key, BUILT):
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ROOT)
        _made("teraio", key, BUILT)


if __name__ == "__main__":
    made = make(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(made.python)
