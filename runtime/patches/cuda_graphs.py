"""CUDA graphs that user code captures. The kernels of a graph always use the addresses that their tensors had
during the capture.

capture begins    the engine moves nothing until the capture ends; a read of an evicted tensor is an error
capture ends      the tensors that the capture used are never evicted again
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
    """Return a wrapper of `capture_begin`. From the begin of a capture to its end, the engine evicts and
    fetches nothing."""

    @functools.wraps(function)
    def begin_without_moves(graph: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engine.current_engine()
        if engine is None or engine.user.observer is None:
            return function(graph, *args, **kwargs)
        with engine.lock:
            engine.late.settle_all("the capture of a CUDA graph")
            for record in list(engine.residency.records.values()):
                # End an eviction or fetch in flight, because captured kernels cannot wait for a copy outside
                # of the capture.
                engine.mover.end_move(record)
        result = function(graph, *args, **kwargs)
        with engine.lock:
            engine.user.note_touches()
            engine.user.refuse_moves(_refuse_in_capture)
        return result

    begin_without_moves.teraio_captures = True  # type: ignore[attr-defined]
    return begin_without_moves


def wrap_capture_end(function: Function) -> Function:
    """Return a wrapper of `capture_end`. The tensors that the capture used are never evicted again."""

    @functools.wraps(function)
    def end_and_keep_used(graph: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engine.current_engine()
        try:
            return function(graph, *args, **kwargs)
        finally:
            if engine is not None and engine.user.end_refusing_moves(_refuse_in_capture):
                with engine.lock:
                    _keep_used_resident(engine.user)

    return end_and_keep_used


def _refuse_in_capture(place: str, reads: Sequence[str] | None) -> None:
    """Raise an error during a capture. If `reads` is None, user code has called a program of teraio.
    Otherwise user code reads the evicted tensors with the names in `reads`."""
    if reads is None:
        raise UnsupportedError(
            f"{place} is captured into a CUDA graph, and moves tensors while it runs: the graph would repeat "
            f"its kernels without the moves. Leave models that teraio compiles out of the capture"
        )
    raise EvictedError(
        f"a CUDA graph is being captured, and {place} reads {', '.join(reads)}, evicted: nothing can be "
        f"moved in a capture. Capture inside `with teraio.resident(...)`, given these tensors: they are kept "
        f"resident from then on"
    )


def _keep_used_resident(user: UserCode) -> None:
    """Forbid for good the eviction of tensors that the capture used. It used (1) the tensors that operators
    read or wrote, and (2) the tensors whose address user code took."""
    observer, residency = user.observer, user.residency
    assert observer is not None
    used = set(observer.newly_touched_storage_keys())
    used.update(key for key in (*residency.reachable, *user.handed_out) if observer.is_address_taken(key))
    known = residency.records_of_storages(used)
    found = [r for r in known if (r.evictable or r.handed_out) and r.state is State.RESIDENT]
    for record in found:
        residency.forbid_eviction_for_good(record, CAPTURED)
    if found:
        size_bytes = sum(record.size_bytes for record in found)
        log.warning(
            "teraio: %d tensors (%s) are kept resident from now on: a CUDA graph has their addresses",
            len(found),
            fmt_bytes(size_bytes, up=True),
        )
