"""The moves of a script's models to a GPU. A model for which the budget has no room is evicted as it moves.

    model.to("cuda")     a model that fits moves as in a plain run
                         another one moves as in a block of `teraio.init`: tensor by tensor, each evictable

Without this, torch would run out of memory before the first training call, which compiles the model.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch

from teraio.launch import run_lines
from teraio.options import Settings, is_disabled


def watch_moves() -> None:
    """Wrap the two methods by which scripts move a module to a GPU."""
    move, move_to_gpu = torch.nn.Module.to, torch.nn.Module.cuda

    @functools.wraps(move)
    def move_by_teraio(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            device = torch._C._nn._parse_to(*args, **kwargs)[0]
        except (TypeError, RuntimeError):
            device = None  # torch's own method raises the error of bad arguments
        with _budget_for_move(self, device):
            return move(self, *args, **kwargs)

    @functools.wraps(move_to_gpu)
    def move_to_gpu_by_teraio(self: torch.nn.Module, device: Any = None) -> Any:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        with _budget_for_move(self, target):
            return move_to_gpu(self, device)

    torch.nn.Module.to = move_by_teraio  # type: ignore[method-assign]
    torch.nn.Module.cuda = move_to_gpu_by_teraio  # type: ignore[method-assign]


def _budget_for_move(module: torch.nn.Module, device: torch.device | None) -> AbstractContextManager[None]:
    """Return a block for this move: one of `teraio.init` if the budget has no room for the module."""
    if device is None or device.type != "cuda" or is_disabled() or not torch.cuda.is_available():
        return nullcontext()
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    tensors = {id(t): t for t in chain(module.parameters(), module.buffers())}
    size_bytes = sum(t.nbytes for t in tensors.values() if t.device not in (device, torch.device("meta")))
    if not size_bytes or _has_room(device, size_bytes):
        return nullcontext()
    from teraio import models

    run_lines.say_moved(module, size_bytes, str(device))
    return models.init_on(device)


def _has_room(device: torch.device, size_bytes: int) -> bool:
    """Return True if the bytes fit on the device within the budget, or if it covers another device."""
    from teraio.session import session

    if (current := session.SESSION) is not None:
        with current.engine.lock:
            return current.device.device != device or current.engine.residency.fits(size_bytes)
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - used
    memory = Settings.parse().memory
    return size_bytes <= (free if memory is None else min(free, memory.resolve(free, total) - used))
