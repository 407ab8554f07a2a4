"""The build of C++ sources against the installed torch, because torch's classes differ between versions.

In: a source. Out: a loaded library. A wheel has prebuilt libraries (`prebuilt`). If none of them was built
for the installed torch, the system's compiler compiles each source once, in a few seconds. The library is
then kept in a folder for later runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from teraio.formats.plan_cache import compiled_extension_folder, reason_to_distrust

from . import prebuilt

log = logging.getLogger("teraio")

COMPILERS = ("g++", "clang++", "c++")
BUILD_S = 120  # time limit of the compiler
# NDEBUG is part of torch's binary interface: without it, some classes have an additional member.
FLAGS = ("-O2", "-DNDEBUG", "-std=c++20", "-shared", "-fPIC")


def build_and_load(source: Path, libraries: Sequence[str]) -> ctypes.CDLL:
    """Load the prebuilt library of the source, or build the source and load the result. Raise OSError or
    SubprocessError if the build or the loading fails."""
    loaded, reason = prebuilt.load(source)
    if loaded is not None:
        return loaded
    if reason and not _compiler_command()[0]:
        known = ", ".join(prebuilt.releases(source))
        remedy = f"install g++ or torch {known}" if known else "install g++"
        raise OSError(f"{reason}; {_no_compiler(remedy)}")
    if reason:
        log.info("teraio: %s; %s is compiled once for this torch", reason, source.name)
    with contextlib.ExitStack() as ends:
        return ctypes.CDLL(str(build_unless_built(source, libraries, _folder_for_built_libraries(ends))))


def _folder_for_built_libraries(ends: contextlib.ExitStack) -> Path:
    """Return the folder in which compiled libraries are kept. If this folder cannot be used, return a
    temporary folder.

    The temporary folder is deleted after the library is loaded.
    """
    folder = compiled_extension_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return folder
    return Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="teraio-built-")))


def build_unless_built(source: Path, libraries: Sequence[str], folder: Path) -> Path:
    """Return the library for this torch, compiler and platform. Build the library if it is missing."""
    compiler, flags = _compiler_command(), _compiler_flags(libraries)
    about = (torch.__version__, platform.machine(), *compiler, *flags)
    # The headers are parts of the source.
    parts = [source.with_name(name) for name in prebuilt.parts_of(source)]
    digest = hashlib.sha256("\0".join(about).encode() + b"".join(part.read_bytes() for part in parts))
    name = digest.hexdigest()[:32]
    target = folder / f"{source.stem}-{name}.so"
    if refused := reason_to_distrust(folder) or reason_to_distrust(target):
        raise OSError(refused)
    if not target.exists():
        handle, partial = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile([*compiler, *flags[:-1], str(source), *flags[-1].split(), "-o", partial])
            os.rename(partial, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
    return target


def _compiler_command() -> list[str]:
    return os.environ.get("CXX", "").split() or [next(filter(shutil.which, COMPILERS), "")]


def _compiler_flags(libraries: Sequence[str]) -> list[str]:
    """Return the compiler's flags. The last element has the linker's flags, which must come after the source
    in the command."""
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}"
    linked = " ".join([f"-L{root}/lib", *(f"-l{name}" for name in libraries), f"-Wl,-rpath,{root}/lib"])
    return [*FLAGS, abi, f"-I{root}/include", linked]


def _compile(command: list[str]) -> None:
    if not command[0]:
        raise OSError(_no_compiler())
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)


def _no_compiler(remedy: str = "install g++") -> str:
    return f"there is no C++ compiler: none of {', '.join(COMPILERS)}, and CXX is not set; {remedy}"


def first_error_line(error: OSError | subprocess.SubprocessError) -> str:
    """Return the first line of the compiler's output that has an error."""
    lines = str(getattr(error, "stderr", None) or error).splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)
