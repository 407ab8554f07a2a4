"""The block `with teraio.resident(model, optimizer):`, which keeps all tensors of the model and the optimizer
resident.

The block is for (1) code whose reads teraio cannot observe and (2) forked processes. An example of such code
is a C++ extension that takes the address of a weight on a GPU by `const_data_ptr`. If the tensors exceed the
budget, a warning reports the excess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..engine import engine as _engine


@contextmanager
def resident(*things: Any) -> Iterator[None]:
    """Keep all tensors in `things` resident during the `with` block. After the block, the engine may evict
    the tensors again.

    `things` may be modules, optimizers, tensors, and containers of modules, optimizers and tensors. A module
    includes its buffers and gradients. An optimizer includes its states, weights and gradients.
    """
    engine = _engine.current_engine()
    if engine is None:
        yield
        return
    record_of = engine.residency.evictable_record_of  # returns None for a tensor that is always resident
    records = list(
        {r.key: r for tensor in _all_tensors_in(things) if (r := record_of(tensor)) is not None}.values()
    )
    try:
        with engine.user.hold_resident(records, "teraio.resident"):
            yield
    finally:
        for record in records:
            record.wrote()  # user code may have written to the tensor, so its copy is stale


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
