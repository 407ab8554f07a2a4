"""Functions of torch that teraio wraps. They read true bytes of evicted tensors, and work in Dynamo and
TorchScript.

A function that takes a list of tensors works even if the whole list does not fit in memory. Teraio then runs
the function for one tensor at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_beside import WIDTH, bare, evict_all, layer, record, trained_beside
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
def test_evaluation_with_evicted_weights_gives_the_same_bits(
    make: Callable[[], nn.Module], one_thread: None
) -> None:
    """Evaluate a layer whose weights are evicted. In evaluation mode, torch runs a whole layer as one
    operator."""
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
        assert evict_all() >= 4
        faster = called(model, batch)
        assert torch.equal(faster, called(twin, batch))
        assert make is attention or not torch.equal(faster, called(twin.train(), batch)), "the two ways agree"


@pytest.mark.parametrize("make", [encoder, attention])
def test_dynamo_and_scripts_accept_wrapped_functions(
    make: Callable[[], nn.Module], nothing_left: None
) -> None:
    wrapped_functions.install()
    model, batch = make().eval(), torch.randn(2, 8, SIDE)
    with torch.no_grad():
        expected = called(model, batch)
        whole: Any = torch.compile(called, backend="eager", fullgraph=True)
        assert torch.equal(whole(model, batch), expected)
        script: Any = torch.jit.script(model)
        scripted = script(batch, batch, batch)[0] if make is attention else script(batch)
        assert torch.equal(scripted, expected)


def test_dynamo_compiles_wrapped_functions_of_lists(nothing_left: None) -> None:
    wrapped_functions.install()

    def halved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*torch._foreach_mul(tensors, 0.5)]

    given = [torch.randn(4, 4) for _ in range(3)]
    whole: Any = torch.compile(halved, backend="eager", fullgraph=True)
    assert all(map(torch.equal, whole(given), halved(given)))


def through_a_file(tensor: torch.Tensor) -> Any:
    """Save and load the tensor in torch's old file format, which writes storages."""
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
def test_read_without_an_operator_gives_true_bytes(
    model: nn.Module, read: Callable[[torch.Tensor], Any]
) -> None:
    weight, plain = layer(model, 0).weight.detach(), layer(bare(model), 0).weight.detach()
    evict_all()
    assert record(layer(model, 0).weight).state is State.EVICTED
    assert read(weight) == read(plain)
    evict_all()
    assert record(layer(model, 0).weight).state is State.EVICTED, "it is not evictable again"


WRITES: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "byte": lambda storage: storage.__setitem__(1029, 7),
    "all": lambda storage: storage.fill_(63),  # type: ignore[attr-defined]
    "copy": lambda storage: storage.copy_(torch.ones(WIDTH, WIDTH).untyped_storage()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("evicted", [True, False])
def test_write_to_a_storage_is_not_lost(
    model: nn.Module, write: Callable[[torch.UntypedStorage], Any], evicted: bool
) -> None:
    weight, plain = layer(model, 0).weight, layer(bare(model), 0).weight
    evict_all()
    if not evicted:
        weight.sum()
    for tensor in (weight, plain):
        write(tensor.untyped_storage())
    evict_all()
    assert record(weight).state is State.EVICTED
    assert torch.equal(weight, plain)


def test_function_of_a_list_that_does_not_fit_runs_one_tensor_at_a_time(model: nn.Module) -> None:
    weights = [layer(model, number).weight.detach() for number in range(3)]
    plain = [weight.clone() for weight in weights]
    evict_all()
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    room_bytes = 2 * weights[0].nbytes
    residency.budget_bytes = residency.mover.resident_bytes + residency.reserve_bytes + room_bytes
    torch._foreach_mul_(weights, 2.0)
    assert residency.mover.counts.overrun_bytes == 0
    assert sum(record(layer(model, n).weight).state is State.RESIDENT for n in range(3)) <= 2
    torch._foreach_mul_(plain, 2.0)
    assert all(map(torch.equal, weights, plain))


def test_tensor_exported_by_dlpack_is_kept_resident(model: nn.Module) -> None:
    weight = layer(model, 0).weight
    evict_all()
    given = torch.from_dlpack(weight.detach())
    evict_all()
    assert record(weight).state is State.RESIDENT
    assert given.data_ptr() == weight.data_ptr()
    given.fill_(3.0)
    evict_all()
    assert torch.equal(weight, torch.full_like(weight, 3.0))
    evict_all()
    assert record(layer(model, 1).weight).state is State.EVICTED, "other tensors are no longer evicted"


def test_capture_moves_nothing_and_keeps_the_used_tensors_resident(model: nn.Module) -> None:
    """Check that a capture moves no tensor, and that the captured tensors are not evicted later.

    A captured CUDA graph always uses the addresses that the tensors had during the capture.
    """
    begin, end = (
        cuda_graphs.wrap_capture_begin(lambda graph: "begun"),
        cuda_graphs.wrap_capture_end(lambda graph: "ended"),
    )
    used, read, other = (layer(model, number).weight for number in range(3))
    compiled: Any = torch.compile(
        layer(model, 0), backend="teraio", options={"inner": "eager", "memory": "64MiB"}
    )
    compiled(torch.ones(4, WIDTH))
    evict_all()
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
    evict_all()
    assert record(used).state is State.RESIDENT
    assert record(used).because == cuda_graphs.CAPTURED
    assert record(read).state is State.EVICTED, "other tensors are no longer evicted"
    assert torch.equal(compiled(torch.ones(4, WIDTH)), layer(bare(model), 0)(torch.ones(4, WIDTH)))
