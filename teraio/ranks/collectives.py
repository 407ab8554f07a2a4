"""Collectives, as far as teraio must know them: which errors they raise, and which threads wait in them."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed

from .collective_names import NAMESPACES

OPERATOR_FILE = "torch/_ops.py"
WAITING_FILES = ("torch/distributed/distributed_c10d.py", "torch/autograd/graph.py")
# Parts of the messages of gloo, NCCL and torch.distributed.
MESSAGES = re.compile(r"gloo|nccl|c10d|processgroup|process group|connection|broken pipe|socket", re.I)


def collectives_so_far() -> int:
    """Return the number of collectives that this process has begun in its default process group. Return 0 if
    the group does not count them."""
    with suppress(RuntimeError, ValueError, AttributeError):
        group: Any = torch.distributed.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0


def is_error_of_collective(error: BaseException) -> bool:
    """Return whether a collective can have raised this error, because another rank has ended."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and bool(MESSAGES.search(str(error)))


# A place in a program's run: the thread, the code that runs on top of its stack, and the place in the code.
Place = tuple[int, int, CodeType, int]


def places_in_collectives() -> set[Place]:
    """Return the places of this process's threads that call a collective now. A thread that waits is at the
    same place when this function is called again.

    A thread in an eager backward counts, because C++ code may wait in it for a collective of
    DistributedDataParallel.

    No frame may be kept, because a frame keeps the arguments of its call alive. A function that holds its own
    frame is a cycle, and would keep all frames until the next garbage collection.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return {_place(thread, frame) for thread, frame in frames.items() if _calls_collective(frame)}


def place_of_main_thread() -> Place | None:
    """Return the place of the main thread."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    return _place(main, frame) if main is not None and frame is not None else None


def _place(thread: int, frame: FrameType) -> Place:
    return thread, id(frame), frame.f_code, frame.f_lasti


def _calls_collective(frame: FrameType) -> bool:
    file = frame.f_code.co_filename.replace("\\", "/")
    if file.endswith(OPERATOR_FILE):
        operator = frame.f_locals.get("self")
        name = getattr(operator, "_qualified_op_name", "") or getattr(operator, "_name", "")
        return str(name).partition("::")[0] in NAMESPACES
    return file.endswith(WAITING_FILES)


def can_abort() -> bool:
    """Return whether the process groups can end their collectives. Only NCCL can."""
    with suppress(RuntimeError, ValueError):
        return "nccl" in torch.distributed.get_backend()
    return False


def abort_groups() -> None:
    """End the running collectives of all process groups, on a thread, because this call may wait itself."""

    def abort() -> None:
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            with suppress(RuntimeError, AttributeError):
                group.abort()

    threading.Thread(target=abort, name="teraio-abort", daemon=True).start()
