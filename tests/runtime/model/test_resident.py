"""`teraio.resident`: inside its block the given tensors are resident, whatever the budget. After the block
they are evictable."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from touch_child import World, evict_all, is_evicted, record_of

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.engine.engine import Engine


@pytest.fixture
def world() -> Iterator[World]:
    torch._dynamo.reset()
    world = World(compiled=True, layers=3)
    world.train(1)
    evict_all(tensors(world))
    assert all(map(is_evicted, tensors(world)))
    yield world
    torch._dynamo.reset()


def tensors(world: World) -> list[torch.Tensor]:
    return [t for layer in world.layers for t in (layer.head.weight, layer.frozen, layer.table, layer.index)]


def running() -> Engine:
    assert engine.ENGINE is not None
    return engine.ENGINE


def addressed(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_float]:
    """Return the tensor's first four numbers. The function reads them through the tensor's address.

    A C++ library reads in the same way, and teraio does not notice the read.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return (ctypes.c_float * 4).from_address(torch.Tensor.data_ptr(tensor))


def test_module_is_resident_in_the_block_although_other_tensors_need_the_room(world: World) -> None:
    residency = running().residency
    with teraio.resident(world.layers[0]):
        mine = tensors(world)[:4]
        assert not any(map(is_evicted, mine))
        residency.budget_bytes = residency.reserve_bytes + 5 * 64 * 64 * 4
        for tensor in tensors(world)[4:]:
            tensor.float().sum()
        evict_all(mine)
        assert not any(map(is_evicted, mine))
        assert any(map(is_evicted, tensors(world)[4:]))
    evict_all(mine)
    assert all(map(is_evicted, mine))


def test_block_beyond_the_budget_is_reported_as_overrun(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    residency = running().residency
    residency.budget_bytes = residency.reserve_bytes + residency.mover.resident_bytes + 1000
    with caplog.at_level(logging.WARNING, "teraio"), teraio.resident(world.layers):
        assert not any(map(is_evicted, tensors(world)))
    assert "overrun: user code (teraio.resident " in caplog.text
    assert teraio.stats()["overrun_bytes"] > 100_000


def test_blocks_nest_and_an_error_ends_them(world: World) -> None:
    weight = world.layers[0].head.weight
    with teraio.resident([weight]):
        with pytest.raises(KeyError), teraio.resident(world.layers[0], {"a": [weight]}):
            raise KeyError
        evict_all(tensors(world))
        assert not is_evicted(weight)
        assert is_evicted(world.layers[0].frozen)
    evict_all([weight])
    assert is_evicted(weight)


def test_write_by_address_in_the_block_is_kept(world: World) -> None:
    weight = world.layers[1].head.weight
    with teraio.resident(weight):
        addressed(weight)[2] = 123.0
    evict_all([weight])
    assert is_evicted(weight)
    assert weight[0, 2].item() == 123.0


def test_optimizer_in_the_block_pins_its_weights_gradients_and_states(world: World) -> None:
    weight = world.layers[0].head.weight
    assert weight.grad is not None
    with teraio.resident(world.optimizer):
        mine = [weight, weight.grad, world.optimizer.state[weight]["exp_avg"]]
        records = [record for tensor in mine if (record := record_of(tensor))]
        assert [record.key for record in records if record.pins != record.evictable] == []
        assert not any(map(is_evicted, mine))
        assert is_evicted(world.layers[0].frozen)


def test_block_without_an_engine_does_nothing() -> None:
    teraio.reset()
    with teraio.resident(torch.nn.Linear(2, 2), [torch.zeros(3)], "name"):
        assert teraio.stats() == {}


def test_forked_process_reads_resident_tensors_and_refuses_evicted_ones(world: World) -> None:
    resident, evicted = world.layers[0].frozen, world.layers[1].frozen
    with teraio.resident(resident):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                resident.sum().item()
                for _ in range(2):  # the second read of the evicted tensor must fail like the first
                    try:
                        evicted.sum().item()
                    except RuntimeError as error:
                        text = str(error)
                        code = 0 if "aten::sum reads an evicted" in text and "teraio.resident(" in text else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_optimizer_in_the_block_is_resident_with_weights_and_states() -> None:
    torch._dynamo.reset()
    world = World(compiled=True, layers=3)
    world.train(1)
    states = [t for state in world.optimizer.state.values() for t in state.values() if t.numel() > 1]
    weights = [weight for group in world.optimizer.param_groups for weight in group["params"]]
    evict_all([*states, *weights])
    assert any(map(is_evicted, states)) and any(map(is_evicted, weights))
    with teraio.resident(world.optimizer, "a word"):
        assert not any(map(is_evicted, [*states, *weights]))
    torch._dynamo.reset()
