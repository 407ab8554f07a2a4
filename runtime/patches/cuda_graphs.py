"""Graphs that the user captures of a CUDA stream: their kernels read at the addresses of that moment.

capture begins    nothing is moved until it ends: reading what is evicted is an error that says so
capture ends      what was used meanwhile is never evicted again
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from teraio.errors import EvictedError, UnsupportedError
from teraio.units import fmt_bytes

from ..eager.user_code import UserCode
from ..engine import engine as _engine
from ..ledger.record import State

log = logging.getLogger("teraio")

Function = Callable[..., Any]

CAPTURED = "a CUDA graph has its address"


def install() -> None:
    graph = torch.cuda.CUDAGraph
    if not hasattr(graph.capture_begin, "teraio_captures"):
        for name, wrap in (("capture_begin", wrap_capture_begin), ("capture_end", wrap_capture_end)):
            setattr(graph, name, wrap(getattr(graph, name)))


def wrap_capture_begin(function: Function) -> Function:
    """Return a `capture_begin` after which nothing is moved."""

    @functools.wraps(function)
    def begin_without_moves(graph: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engine.current_engine()
        if engine is None or engine.user.observer is None:
            return function(graph, *args, **kwargs)
        with engine.lock:
            for record in list(engine.residency.records.values()):
                engine.mover.end_move(record)  # what is captured may not wait for a copy that is not
        result = function(graph, *args, **kwargs)
        with engine.lock:
            engine.user.note_touches()
            engine.user.refuses = _refuse_in_capture
        return result

    begin_without_moves.teraio_captures = True  # type: ignore[attr-defined]
    return begin_without_moves


def wrap_capture_end(function: Function) -> Function:
    """Return a `capture_end` after which what was used in the capture stays."""

    @functools.wraps(function)
    def end_and_keep_used(graph: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engine.current_engine()
        try:
            return function(graph, *args, **kwargs)
        finally:
            if engine is not None and engine.user.refuses is _refuse_in_capture:
                engine.user.refuses = None
                with engine.lock:
                    _keep_used_resident(engine.user)

    return end_and_keep_used


def _refuse_in_capture(place: str, reads: Sequence[str] | None) -> None:
    """Refuse to read, or to run a program, in a capture."""
    if reads is None:
        raise UnsupportedError(
            f"{place} is captured into a CUDA graph, and moves tensors while it runs: a graph would repeat "
            f"the kernels, and not the moves. Leave what teraio compiles out of the capture"
        )
    raise EvictedError(
        f"a CUDA graph is being captured, and {place} reads {', '.join(reads)}, evicted: nothing can be "
        f"moved in a capture. Capture inside `with teraio.resident(...)`, given these tensors: they stay "
        f"from then on"
    )


def _keep_used_resident(user: UserCode) -> None:
    """Keep resident for good what was used in the capture, by operators or through addresses."""
    observer, residency = user.observer, user.residency
    assert observer is not None
    used = set(observer.newly_touched_storage_keys())
    used.update(key for key in (*residency.reachable, *user.handed_out) if observer.is_address_taken(key))
    known = residency.records_of_storages(used)
    found = [r for r in known if (r.evictable or r.handed_out) and r.state is State.DEVICE]
    for record in found:
        residency.forbid_eviction_for_good(record, CAPTURED)
    if found:
        size_bytes = sum(record.size_bytes for record in found)
        log.warning(
            "teraio: %d tensors (%s) stay in memory from now on: a CUDA graph has their addresses",
            len(found),
            fmt_bytes(size_bytes, up=True),
        )
