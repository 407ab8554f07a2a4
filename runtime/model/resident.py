"""The block `with teraio.resident(model, optimizer):`, in which the tensors of both are resident.

The block is for (1) code whose reads the observer cannot see and (2) forked processes. An example of such
code is a C++ extension that calls `const_data_ptr` to take the address of a weight on a GPU. If the tensors
exceed the budget, the excess is an overrun, which a warning reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..engine import engine as _engine


@contextmanager
def resident(*things: Any) -> Iterator[None]:
    """Keep all tensors of `things` resident during the block. The engine may evict them after the block.

    `things` may be modules (with buffers and gradients), optimizers (with states, weights and gradients),
    tensors, and containers of these.
    """
    engine = _engine.current_engine()
    if engine is None:
        yield
        return
    record_of = engine.residency.evictable_record_of  # a tensor without such a record is always resident
    records = list(
        {r.key: r for tensor in _all_tensors_in(things) if (r := record_of(tensor)) is not None}.values()
    )
    try:
        with engine.user.hold_resident(records, "teraio.resident"):
            yield
    finally:
        for record in records:
            record.wrote()  # user code may have written to the tensor unobserved


def _all_tensors_in(things: Any) -> Iterator[torch.Tensor]:
    match things:
        case torch.Tensor():
            yield things
            if things.is_leaf and things.grad is not None:
                yield things.grad
        case torch.nn.Module():
            yield from _all_tensors_in([*things.parameters(), *things.buffers()])
        case torch.optim.Optimizer():
            yield from _all_tensors_in([group["params"] for group in things.param_groups])
            yield from _all_tensors_in(list(things.state.values()))
        case str() | bytes():
            pass
        case Mapping():
            yield from _all_tensors_in(list(things.values()))
        case Iterable():
            for thing in things:
                yield from _all_tensors_in(thing)
