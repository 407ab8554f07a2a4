"""Cases of operations on evicted tensors. The cases run in a child process, so that the test can continue
with the next case after a crash.

    touch_child.py FIRST [bug]     runs all cases from number FIRST on

The script prints one line before each case, and one line after each case. After a crash, the last line names
the case that crashed.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
from touch_list import COLUMNS, ROWS, Operation, Side
from touch_more import FLOATS, INDICES, REFUSED, STORAGES

from teraio.errors import EvictedError
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import Record, State
from teraio.runtime.torch_extension import observer

FLOAT_KINDS = ("gradient", "state", "weight", "frozen", "buffer")
SHOWN = 200  # printed characters of a result
LAYERS = len(FLOATS) + len(STORAGES) + 2


class Layer(torch.nn.Module):
    """A layer with one tensor of each kind. Integer and boolean buffers count as separate kinds."""

    index: torch.Tensor
    mask: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.frozen = torch.nn.Parameter(torch.randn(ROWS, COLUMNS), requires_grad=False)
        self.register_buffer("table", torch.randn(ROWS, COLUMNS))
        self.register_buffer("index", torch.randint(ROWS, (ROWS, COLUMNS)))
        self.register_buffer("mask", torch.rand(ROWS, COLUMNS) > 0.5)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ (self.head.weight + self.frozen + self.table * self.mask).t()
        shown = torch.tanh(hidden + self.frozen.gather(1, self.index).sum())
        out: torch.Tensor = x + shown @ self.head.weight
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x)


class Case(NamedTuple):
    number: int
    kind: str
    name: str
    operation: Operation
    layer: int


def cases() -> Iterator[Case]:
    """Yield the cases. Among the cases of one kind of tensor, each case has its own layer. A case that may
    change a tensor's storage also reserves the next layer.
    """
    number = 0
    for kind in (*FLOAT_KINDS, "index"):
        layer = 0
        for name, operation in (INDICES if kind == "index" else FLOATS).items():
            if kind == "weight" or name not in WEIGHTS_ONLY:
                yield Case(number, kind, name, operation, layer)
            number += 1
            layer += 1 + (name in STORAGES)


class World:
    """The layers of one side of the comparison, either compiled or plain, and their optimizer."""

    def __init__(self, compiled: bool, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        self.layers = [Layer() for _ in range(layers)]
        self.optimizer = torch.optim.AdamW([layer.head.weight for layer in self.layers], lr=0.01)
        if compiled:
            for layer in self.layers:
                layer.compile(backend="teraio", options={"inner": "eager", "memory": "256MiB"})

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for layer in self.layers:
                layer(torch.ones(2, COLUMNS, requires_grad=True)).square().mean().backward()
            self.optimizer.step()

    def tensor(self, kind: str, number: int) -> torch.Tensor:
        layer = self.layers[number]
        weight = layer.head.weight
        if kind in {"gradient", "state"}:
            found = weight.grad if kind == "gradient" else self.optimizer.state[weight]["exp_avg"]
            assert isinstance(found, torch.Tensor)
            return found
        parts = {"weight": weight, "frozen": layer.frozen, "buffer": layer.table, "index": layer.index}
        return parts.get(kind, layer.mask)

    def around(self, case: Case) -> list[torch.Tensor]:
        """Return all tensors that the case's operation can reach."""
        kinds = (*FLOAT_KINDS, "index", "mask")
        return [self.tensor(kind, number) for kind in kinds for number in (case.layer, case.layer + 1)]

    def side(self, case: Case) -> Side:
        w = self.tensor(case.kind, case.layer)
        v = self.tensor("mask" if case.kind == "index" else case.kind, case.layer + 1)
        return Side(w, v, self.layers[case.layer], self.layers[case.layer + 1])


def twin_of(world: World) -> World:
    """Return a plain world whose tensors have the same bytes as the tensors of `world`. The caller must
    ensure that no tensor is evicted.
    """
    twin = World(compiled=False, layers=len(world.layers))
    twin.train(1)  # this step makes gradients and states
    with torch.no_grad():
        for number in range(len(world.layers)):
            for kind in ("weight", "frozen", "buffer", "gradient", "state", "index", "mask"):
                twin.tensor(kind, number).copy_(world.tensor(kind, number))
            for name in ("exp_avg_sq", "step"):
                mine = twin.optimizer.state[twin.layers[number].head.weight]
                mine[name].copy_(world.optimizer.state[world.layers[number].head.weight][name])
    return twin


def evict_all(tensors: list[torch.Tensor]) -> None:
    """End a step, and evict those among the tensors that the engine may evict."""
    assert engine.ENGINE is not None
    user, residency = engine.ENGINE.user, engine.ENGINE.residency
    user.end_step()
    residency.advance_slot()
    known = [record for tensor in tensors if (record := record_of(tensor))]
    candidates = {record.key for record in residency._eviction_candidates()}
    leaving = [record for record in known if record.key in candidates]
    for move in (residency.try_evict, residency.try_end_evict):
        for record in leaving:
            move(record)


def record_of(tensor: torch.Tensor) -> Record | None:
    assert engine.ENGINE is not None
    return engine.ENGINE.residency.records.get(tensor.untyped_storage()._cdata)


def is_evicted(tensor: torch.Tensor) -> bool:
    record = record_of(tensor)
    return record is not None and record.state is State.EVICTED


def plain_facts(value: Any) -> Any:
    """Return a value that `==` compares bit by bit."""
    match value:
        case torch.Tensor():
            return facts_of_tensor(value)
        case dict():
            return {key: plain_facts(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain_facts(inner) for inner in value]
        case numpy.ndarray():
            return str(value.dtype), value.shape, value.tobytes()
        case float():
            return repr(value)
    return value


def facts_of_tensor(value: torch.Tensor) -> Any:
    kind = type(value).__name__
    about = (kind, str(value.dtype), tuple(value.shape), value.requires_grad, value.grad_fn is None)
    if value.is_meta:
        return about
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    return about, dense.clone().contiguous().view(-1).view(torch.uint8).tolist()


def outcome(operation: Operation, side: Side) -> Any:
    try:
        return plain_facts(operation(side))
    except EvictedError:
        raise
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)


def judge(case: Case, ours: World, plain: World) -> str:
    """Run a case on evicted tensors of `ours`, and on tensors of `plain`. Return the first difference or
    other fault, or an empty string.
    """
    side = ours.side(case)
    evict_all(ours.around(case))
    if not is_evicted(side.w) or not is_evicted(side.v):
        return "the tensor was not evicted"
    after = outcome(case.operation, side)
    before = after if case.name in REFUSED else outcome(case.operation, plain.side(case))
    if case.name in REFUSED and after[0] != "RuntimeError":
        return f"the operation was not refused: {after}"
    if before != after:
        return f"plain: {str(before)[:SHOWN]} here: {str(after)[:SHOWN]}"
    del side
    gc.collect(0)
    evict_all(ours.around(case))
    side, other = ours.side(case), plain.side(case)
    if case.name not in STORAGES and case.name not in KEPT and not is_evicted(side.w):
        record = record_of(side.w)
        return f"never evicted again: {record and (record.state, record.evictable, record.pins)}"
    for mine, its in ((side.w, other.w), (side.v, other.v)):
        if plain_facts(mine) != plain_facts(its):
            return "the bytes afterwards differ"
    return ""


KEPT = WEIGHTS_ONLY = {"vector_to_parameters"}  # this operation gives the tensor another storage


LEAVE = observer.Observer.empty_storage
# Each of these bugs must cause a wrong result or a crash.
PLANTS: dict[str, list[Any]] = {
    "nothing is observed": [patch.object(observer.Observer, "_fetch_or_refuse", lambda self, *_: 1)],
    "no write is noted": [
        patch.object(observer.Observer, "is_written_since_copy", lambda self, key: False),
        patch.object(
            observer.Observer, "empty_storage", lambda self, storage, _: LEAVE(self, storage, False)
        ),
    ],
}


def main() -> None:
    for plant in PLANTS.get(sys.argv[2], []) if len(sys.argv) > 2 else []:
        plant.start()
    touch_all(int(sys.argv[1]))


def touch_all(first: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ours = World(compiled=True)
    ours.train(1)
    plain = twin_of(ours)
    for case in cases():
        if case.number >= first:
            print(json.dumps([case.number, case.kind, case.name]), flush=True)
            try:
                wrong = judge(case, ours, plain)
            except Exception as error:  # noqa: BLE001
                wrong = f"{type(error).__name__}: {error}"
            print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main()
