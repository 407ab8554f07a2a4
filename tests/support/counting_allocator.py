"""Exact byte counts of CPU tensors, by a counting allocator.

The system's compiler builds the allocator at its first use with a torch version. The allocator needs no part
of teraio, so a run without teraio can also be counted.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("counting_allocator.cpp")


class Counting:
    """The counting allocator. Install it at the start of the process, because it does not count storages that
    existed before.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("counting_alive", "counting_peak"):
            getattr(library, name).restype = ctypes.c_int64
        library.counting_install()

    def over(self, take: int, give: int) -> None:
        """Allocate memory by the C function at `take` from now on, and free memory by the one at `give`.
        teraio's own allocator has two such functions.
        """
        self._library.counting_over(ctypes.c_void_p(take), ctypes.c_void_p(give))

    def alive_bytes(self) -> int:
        return int(self._library.counting_alive())

    def peak_bytes(self) -> int:
        return int(self._library.counting_peak())

    def reset_peak(self) -> None:
        self._library.counting_reset_peak()


def build() -> Path:
    """Return the path of the compiled allocator. Compile it only if the temporary directory has no build for
    this version of torch and of the source.
    """
    directory = Path(tempfile.gettempdir()) / f"teraio-test-allocator-{torch.__version__}"
    target = directory / f"allocator-{SOURCE.stat().st_mtime_ns}.so"
    if not target.exists():
        directory.mkdir(exist_ok=True)
        root = Path(torch.__file__).parent
        partial = target.with_suffix(f".{id(target)}.tmp")
        subprocess.run(
            [
                "g++",
                "-O2",
                "-std=c++20",
                "-shared",
                "-fPIC",
                f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}",
                f"-I{root}/include",
                str(SOURCE),
                f"-L{root}/lib",
                "-lc10",
                f"-Wl,-rpath,{root}/lib",
                "-o",
                str(partial),
            ],
            check=True,
        )
        partial.rename(target)
    return target


def install() -> Counting:
    return Counting(ctypes.CDLL(str(build())))


def install_over_ours() -> Counting:
    """Install the counting allocator over teraio's own allocator, from which tensors get their memory in a
    user's process.
    """
    from teraio import _native  # a late import, because runs without teraio may lack this module

    counting = install()
    counting.over(*_native.spare_functions())
    return counting
