"""`with teraio.resident(model, optimizer):` all of it is in memory and stays there for the block.

For code that nobody sees read, such as an extension in C++ that takes a GPU's weights by `const_data_ptr`,
and for processes that are forked. Over the budget if it must be, which is said as any overrun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..engine import engine as _engine


@contextmanager
def resident(*things: Any) -> Iterator[None]:
    """In the block all of these are in memory: modules (with buffers and gradients), optimizers (with states,
    weights and gradients), tensors, and containers of those. They may leave again when it ends."""
    engine = _engine.current_engine()
    if engine is None:
        yield
        return
    leaving = engine.residency.evictable_record_of  # the others are here anyway
    records = list(
        {r.key: r for tensor in _all_tensors_in(things) if (r := leaving(tensor)) is not None}.values()
    )
    try:
        with engine.user.hold_resident(records, "teraio.resident"):
            yield
    finally:
        for record in records:
            record.clean = False  # what wrote to it was not seen


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
