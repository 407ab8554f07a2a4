"""Bugs to plant in teraio. The differential tests, which compare random plans with plain training, must find
each bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from unnoted import Done

from teraio import backend
from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.device.pending_transfer import Pending
from teraio.runtime.store.store import Store


@contextlib.contextmanager
def scaled_gradients() -> Iterator[None]:
    """Multiply the results of every backward program by 1.01."""
    slot_eager = backend._insert_eager_slots

    def scaled(graph: torch.fx.GraphModule, kind: Any, labels: Any) -> None:
        output = graph.graph.output_node()
        if kind == "backward":
            with graph.graph.inserting_before(output):
                results = [_scaled(graph.graph, node) for node in output.args[0]]  # type: ignore[union-attr]
            output.args = (tuple(results),)
        slot_eager(graph, kind, labels)

    with patch.object(backend, "_insert_eager_slots", scaled):
        yield


def _scaled(graph: torch.fx.Graph, node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return node
    result = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
    result.meta["val"] = torch.empty_like(value)
    return result


@contextlib.contextmanager
def stale_bytes() -> Iterator[None]:
    """Let only the first eviction to each extent (a tensor's place in the store) write its bytes. Fetches
    after later evictions then return old bytes.
    """
    write = Store.write

    def first_only(self: Store, extent: Any, *rest: Any, **named: Any) -> Any:
        return write(self, extent, *rest, **named) if extent.generation == 0 else Done()

    with patch.object(Store, "write", first_only):
        yield


@contextlib.contextmanager
def dropped_wait() -> Iterator[None]:
    """Report each fetch as complete immediately, but end its read only at the engine's next move. Kernels
    then read the tensor too early.
    """
    late: list[Pending] = []

    def bring_in() -> None:
        while late:
            pending = late.pop()  # this reference keeps the storage alive until its bytes are read
            pending.ticket.wait()

    def unwaited(self: CpuDevice, pending: Pending) -> bool:
        late.append(pending)
        assert self.observer is not None
        return self.observer.give_block_to_storage(pending.storage, pending.block)

    def settled(name: str) -> Any:
        original = getattr(CpuDevice, name)

        def call(self: CpuDevice, *rest: Any) -> Any:
            bring_in()
            return original(self, *rest)

        return patch.object(CpuDevice, name, call)

    moves = (settled(name) for name in ("begin_copy_out", "drop_bytes", "resize_storage"))
    with contextlib.ExitStack() as during:
        for change in (*moves, patch.object(CpuDevice, "end_copy_in", unwaited)):
            during.enter_context(change)
        try:
            yield
        finally:
            bring_in()


PLANTS = {"scaled gradients": scaled_gradients, "stale bytes": stale_bytes, "dropped wait": dropped_wait}


def planted(name: str) -> contextlib.AbstractContextManager[None]:
    return PLANTS[name]() if name else contextlib.nullcontext()
