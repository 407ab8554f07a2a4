"""Exact bytes of CPU tensors, by an allocator that counts: built once per torch version with the system's
compiler. It needs nothing of the product: others are counted by it too, where that is not installed."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("counting_allocator.cpp")


class Counting:
    """Installed at process start: storages made before it are not counted."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("counting_alive", "counting_peak"):
            getattr(library, name).restype = ctypes.c_int64
        library.counting_install()

    def over(self, take: int, give: int) -> None:
        """Takes memory from these functions from now on, as the product's allocator does."""
        self._library.counting_over(ctypes.c_void_p(take), ctypes.c_void_p(give))

    def alive_bytes(self) -> int:
        return int(self._library.counting_alive())

    def peak_bytes(self) -> int:
        return int(self._library.counting_peak())

    def reset_peak(self) -> None:
        self._library.counting_reset_peak()


def build() -> Path:
    """The compiled allocator, from the temporary directory if this version was built before."""
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
    """Counts what the product's allocator gives, as in a process of a user's."""
    from teraio import _native  # not everywhere

    counting = install()
    counting.over(*_native.spare_functions())
    return counting
