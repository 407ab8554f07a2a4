"""The allocator of CPU tensors. It keeps the memory of freed tensors for later tensors.

For each page of new memory, the system handles a page fault and clears the page. If each tensor's memory came
from the system and were returned to the system, this would take a fifth of a training step. So this allocator
keeps freed blocks, as long as the kept blocks and the blocks in use together fit in the budget
(`csrc/allocator/spare_blocks.h`). Kept blocks never take the process above the budget.

torch allocates through a C++ class that differs between torch's versions. Our class has 40 lines
(`allocator.cpp`). The system's compiler builds this class against the installed torch, in two seconds.
Without a compiler, the memory of each freed tensor is returned to the system immediately, and a
warning is logged.
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
    """Install the allocator for later tensors. Return "" if torch now allocates tensors with this allocator,
    else the reason against it.

    The allocator is installed until the process ends, because it must free the blocks that it allocated.
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
    """Return True if torch uses another allocator that takes its memory from ours. An example is a counter of
    allocations."""
    block = torch.empty(2**20, dtype=torch.uint8)
    return _native.spare().holds(block.data_ptr())
