"""Functions of torch that read without an operator: they read true bytes, Dynamo and scripts go through them,
and lists of tensors that do not fit together are gone through one by one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_beside import WIDTH, bare, layer, record, send_away, trained_beside
from torch import nn

from teraio.errors import UnsupportedError
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State
from teraio.runtime.patches import cuda_graphs, wrapped_functions

SIDE = 128


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(SIDE, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def attention() -> nn.Module:
    return nn.MultiheadAttention(SIDE, 4, batch_first=True)


def called(model: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else model(x)
    return made


@pytest.mark.parametrize("make", [encoder, attention])
def test_evaluation_beside_a_training_gives_the_same_bits(
    make: Callable[[], nn.Module], one_thread: None
) -> None:
    """By one operator for a whole layer."""
    torch.manual_seed(0)
    model = make()
    compiled: Any = torch.compile(
        called, backend="teraio", options={"inner": "eager", "memory": "64MiB", "warmup": 1}
    )
    batch = torch.randn(2, 8, SIDE)
    for _ in range(2):
        compiled(model, batch).sum().backward()
    twin = make()
    twin.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.eval()
    twin.eval()
    with torch.no_grad():
        assert send_away() >= 4
        faster = called(model, batch)
        assert torch.equal(faster, called(twin, batch))
        assert make is attention or not torch.equal(faster, called(twin.train(), batch)), "the ways differ"


@pytest.mark.parametrize("make", [encoder, attention])
def test_dynamo_and_scripts_know_what_was_wrapped(make: Callable[[], nn.Module], nothing_left: None) -> None:
    wrapped_functions.install()
    model, batch = make().eval(), torch.randn(2, 8, SIDE)
    with torch.no_grad():
        expected = called(model, batch)
        whole: Any = torch.compile(called, backend="eager", fullgraph=True)
        assert torch.equal(whole(model, batch), expected)
        script: Any = torch.jit.script(model)
        scripted = script(batch, batch, batch)[0] if make is attention else script(batch)
        assert torch.equal(scripted, expected)


def test_dynamo_compiles_functions_of_lists_that_were_wrapped(nothing_left: None) -> None:
    wrapped_functions.install()

    def halved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*torch._foreach_mul(tensors, 0.5)]

    given = [torch.randn(4, 4) for _ in range(3)]
    whole: Any = torch.compile(halved, backend="eager", fullgraph=True)
    assert all(map(torch.equal, whole(given), halved(given)))


def through_a_file(tensor: torch.Tensor) -> Any:
    """By the old format, which writes storages."""
    stream = io.BytesIO()
    torch.save(tensor, stream, _use_new_zipfile_serialization=False)
    stream.seek(0)
    return torch.load(stream).tolist()


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "byte of a storage": lambda t: t.untyped_storage()[1029],
    "slice of a storage": lambda t: t.untyped_storage()[8:64].tolist(),
    "number of a typed storage": lambda t: t.storage()[77],
    "copy of a storage": lambda t: t.untyped_storage().clone().tolist()[:99],
    "file of a storage": through_a_file,
}


@pytest.fixture
def model(nothing_left: None) -> nn.Module:
    return trained_beside()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_without_an_operator_reads_true_bytes(
    model: nn.Module, read: Callable[[torch.Tensor], Any]
) -> None:
    weight, plain = layer(model, 0).weight.detach(), layer(bare(model), 0).weight.detach()
    send_away()
    assert record(layer(model, 0).weight).state is State.AWAY
    assert read(weight) == read(plain)
    send_away()
    assert record(layer(model, 0).weight).state is State.AWAY, "it may leave again"


WRITES: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "byte": lambda storage: storage.__setitem__(1029, 7),
    "all": lambda storage: storage.fill_(63),  # type: ignore[attr-defined]
    "copy": lambda storage: storage.copy_(torch.ones(WIDTH, WIDTH).untyped_storage()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("away", [True, False])
def test_what_writes_a_storage_is_not_lost(
    model: nn.Module, write: Callable[[torch.UntypedStorage], Any], away: bool
) -> None:
    weight, plain = layer(model, 0).weight, layer(bare(model), 0).weight
    send_away()
    if not away:
        weight.sum()
    for tensor in (weight, plain):
        write(tensor.untyped_storage())
    send_away()
    assert record(weight).state is State.AWAY
    assert torch.equal(weight, plain)


def test_lists_that_do_not_fit_together_are_gone_through_one_by_one(model: nn.Module) -> None:
    weights = [layer(model, number).weight.detach() for number in range(3)]
    plain = [weight.clone() for weight in weights]
    send_away()
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    room_bytes = 2 * weights[0].nbytes
    residency.budget_bytes = residency.mover.resident_bytes + residency.reserve_bytes + room_bytes
    torch._foreach_mul_(weights, 2.0)
    assert residency.mover.counts.overrun_bytes == 0
    assert sum(record(layer(model, n).weight).state is State.DEVICE for n in range(3)) <= 2
    torch._foreach_mul_(plain, 2.0)
    assert all(map(torch.equal, weights, plain))


def test_what_dlpack_gave_to_others_stays_where_it_is(model: nn.Module) -> None:
    weight = layer(model, 0).weight
    send_away()
    given = torch.from_dlpack(weight.detach())
    send_away()
    assert record(weight).state is State.DEVICE
    assert given.data_ptr() == weight.data_ptr()
    given.fill_(3.0)
    send_away()
    assert torch.equal(weight, torch.full_like(weight, 3.0))
    send_away()
    assert record(layer(model, 1).weight).state is State.AWAY, "the others go on"


def test_a_capture_moves_nothing_and_what_it_used_stays(model: nn.Module) -> None:
    """As of a CUDA graph, whose kernels read at the addresses of that moment."""
    begin, end = (
        cuda_graphs.wrap_capture_begin(lambda graph: "begun"),
        cuda_graphs.wrap_capture_end(lambda graph: "ended"),
    )
    used, read, other = (layer(model, number).weight for number in range(3))
    compiled: Any = torch.compile(
        layer(model, 0), backend="teraio", options={"inner": "eager", "memory": "64MiB"}
    )
    compiled(torch.ones(4, WIDTH))
    send_away()
    used.sum()
    assert begin(None) == "begun"
    used.sum()
    with pytest.raises(RuntimeError, match=r"graph is being captured, and aten::sum reads 1\.weight"):
        read.sum()
    with pytest.raises(UnsupportedError, match="is captured into a CUDA graph"):
        compiled(torch.ones(4, WIDTH))
    with pytest.raises(RuntimeError, match=r"graph is being captured, and a pointer reads"):
        other.data_ptr()
    assert end(None) == "ended"
    assert read.sum() == layer(bare(model), 1).weight.sum()
    send_away()
    assert record(used).state is State.DEVICE
    assert record(used).because == cuda_graphs.CAPTURED
    assert record(read).state is State.AWAY, "the others go on"
    assert torch.equal(compiled(torch.ones(4, WIDTH)), layer(bare(model), 0)(torch.ones(4, WIDTH)))
