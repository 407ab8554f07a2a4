"""The allocator of CPU tensors. It keeps the memory of freed tensors for later tensors.

For each new page, the system handles a page fault and clears the page. Suppose that each new tensor took new
pages. Then faults and clearing would take a fifth of a training step. So this allocator keeps freed blocks.
Kept blocks and blocks in use together must fit in the budget (`csrc/allocator/spare_blocks.h`).

torch allocates through a C++ class that differs between torch's versions. teraio's class has 40 lines
(`allocator.cpp`). The system's compiler builds this class against the installed torch, in two seconds.
Without a compiler, the memory of each freed tensor is returned to the system immediately, and a warning is
logged.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from functools import cache
from pathlib import Path

import torch

from teraio import _native

from . import build

log = logging.getLogger("teraio")

SOURCE = Path(__file__).with_name("allocator.cpp")
OTHER = "another allocator of tensors is installed"


@cache
def install() -> str:
    """Install the allocator for all tensors that are made from now on. Return "" if torch now uses this
    allocator, otherwise the reason why not.

    The allocator remains installed until the process ends, because it must free the blocks that it allocated.
    """
    reason = _build_and_install()
    if reason and reason != OTHER:
        log.warning(
            "teraio: freed memory goes back to the system at once, and the pages of every tensor are cleared "
            "anew: steps take up to a third longer (%s)",
            reason,
        )
    return reason


def _build_and_install() -> str:
    try:
        library = build.build_and_load(SOURCE, ["c10"])
    except (OSError, subprocess.SubprocessError) as error:
        return build.first_error_line(error)
    library.teraio_install.restype = ctypes.c_bool
    if not library.teraio_install(*map(ctypes.c_void_p, _native.spare_functions())):
        return "" if _is_behind_other_allocator() else OTHER
    return ""


def _is_behind_other_allocator() -> bool:
    """Return True if torch uses another allocator that takes its memory from teraio's allocator. An example
    is an allocator that counts allocations."""
    block = torch.empty(2**20, dtype=torch.uint8)
    return _native.spare().holds(block.data_ptr())
