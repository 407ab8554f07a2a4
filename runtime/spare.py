"""Freed tensors' memory is kept for the next ones, within the budget: torch's allocator over ours.

What the system gives anew costs a fault per page, and clearing it: a fifth of a training step, if every
tensor's memory comes from the system and goes back there. So blocks that were freed are kept as long as they
and those in use fit in the budget together (`csrc/spare.h`). A user's budget is theirs to use: the process
stays within it, and beside what is not tensors takes no more than that.

torch asks a C++ class of its own for memory, which differs from version to version. Ours is 40 lines
(`spare_allocator.cpp`), built with the system's compiler against the torch that is here, in two seconds,
once. Without a compiler every tensor's memory goes back to the system at once, and that is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from teraio import _native
from teraio.cache import built_folder, untrusted

from . import memory

log = logging.getLogger("teraio")

SOURCE = Path(__file__).with_name("spare_allocator.cpp")
COMPILERS = ("g++", "clang++", "c++")
BUILD_S = 120  # a compiler that takes longer than this is stuck

OTHER = "another allocator of tensors is installed"


@cache
def install() -> str:
    """Tensors take their memory from here from now on; out: why not, or nothing. It stays until the process
    ends: blocks go back to whom they were taken from."""
    memory.return_freed_memory()  # what is not a tensor; without ours, everything
    reason = _install()
    if reason and reason != OTHER:
        log.warning(
            "teraio: freed memory goes back to the system at once, and the pages of every tensor are cleared "
            "anew: steps take up to a third longer (%s)",
            reason,
        )
    return reason


def _install() -> str:
    try:
        with contextlib.ExitStack() as ends:
            library = ctypes.CDLL(str(build(_folder(ends))))
    except (OSError, subprocess.SubprocessError) as error:
        return _told(error)
    library.teraio_install.restype = ctypes.c_bool
    if not library.teraio_install(*map(ctypes.c_void_p, _native.spare_functions())):
        return "" if _is_asked() else OTHER
    global OWN
    OWN = library.teraio_own
    OWN.argtypes = [ctypes.c_void_p]
    return ""


def _is_asked() -> bool:
    """Whether another allocator, as one that counts, takes its memory from ours."""
    block = torch.empty(2**20, dtype=torch.uint8)
    return _native.spare().holds(block.data_ptr())


OWN: ctypes._NamedFuncPointer | None = None


def own(storage: torch.UntypedStorage) -> None:
    """The bytes that it gets from now on are ours, whoever's it had before."""
    if OWN is not None:
        OWN(storage._cdata)


def _folder(ends: contextlib.ExitStack) -> Path:
    """Where it was built before; without such a place one that is gone when the library is loaded."""
    folder = built_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return folder
    return Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="teraio-built-")))


def build(folder: Path) -> Path:
    """The allocator for this torch: as it was built before, or now."""
    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:32]
    target = folder / f"allocator-{name}.so"
    if refused := untrusted(folder) or untrusted(target):
        raise OSError(refused)
    if not target.exists():
        handle, partial = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile(partial)
            os.rename(partial, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
    return target


def _compile(target: str) -> None:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}"
    found = os.environ.get("CXX", "").split() or [next(filter(shutil.which, COMPILERS), "")]
    if not found[0]:
        raise OSError(f"there is no C++ compiler: none of {', '.join(COMPILERS)}, and CXX is not set")
    command = [*found, "-O2", "-std=c++20", "-shared", "-fPIC", abi, f"-I{root}/include", str(SOURCE)]
    command += [f"-L{root}/lib", "-lc10", f"-Wl,-rpath,{root}/lib", "-o", target]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)


def _told(error: OSError | subprocess.SubprocessError) -> str:
    """One line of what a compiler has to say."""
    lines = str(getattr(error, "stderr", None) or error).splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)
