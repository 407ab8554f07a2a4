"""Freed tensors' memory is kept for the next ones, within the budget: torch's allocator over ours.

What the system gives anew costs a fault per page, and clearing it: a fifth of a training step, if every
tensor's memory comes from the system and goes back there. So blocks that were freed are kept as long as they
and those in use fit in the budget together (`csrc/allocator/spare_blocks.h`). A user's budget is theirs to
use: the process stays within it, and beside what is not tensors takes no more than that.

torch asks a C++ class of its own for memory, which differs from version to version. Ours is 40 lines
(`allocator.cpp`), built with the system's compiler against the torch that is here, in two seconds, once.
Without a compiler every tensor's memory goes back to the system at once, and that is said.
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
    """Tensors take their memory from here from now on; out: why not, or nothing. It stays until the process
    ends: blocks go back to whom they were taken from."""
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
    """Whether another allocator, as one that counts, takes its memory from ours."""
    block = torch.empty(2**20, dtype=torch.uint8)
    return _native.spare().holds(block.data_ptr())
