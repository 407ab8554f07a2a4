"""`teraio.resident`: inside the block all of it is in memory, budget or not; afterwards it may leave."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from touch_child import World, is_away, record_of, send_away

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.engine.engine import Engine


@pytest.fixture
def world() -> Iterator[World]:
    torch._dynamo.reset()
    world = World(compiled=True, layers=3)
    world.train(1)
    send_away(tensors(world))
    assert all(map(is_away, tensors(world)))
    yield world
    torch._dynamo.reset()


def tensors(world: World) -> list[torch.Tensor]:
    return [t for layer in world.layers for t in (layer.head.weight, layer.frozen, layer.table, layer.index)]


def running() -> Engine:
    assert engine.ENGINE is not None
    return engine.ENGINE


def addressed(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_float]:
    """As a library in C++ reads it: no one is asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return (ctypes.c_float * 4).from_address(torch.Tensor.data_ptr(tensor))


def test_all_of_a_module_is_here_and_stays_although_others_need_the_room(world: World) -> None:
    residency = running().residency
    with teraio.resident(world.layers[0]):
        mine = tensors(world)[:4]
        assert not any(map(is_away, mine))
        residency.budget_bytes = residency.reserve_bytes + 5 * 64 * 64 * 4
        for tensor in tensors(world)[4:]:
            tensor.float().sum()
        send_away(mine)
        assert not any(map(is_away, mine))
        assert any(map(is_away, tensors(world)[4:]))
    send_away(mine)
    assert all(map(is_away, mine))


def test_beyond_the_budget_it_is_an_overrun_and_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    residency = running().residency
    residency.budget_bytes = residency.reserve_bytes + residency.mover.resident_bytes + 1000
    with caplog.at_level(logging.WARNING, "teraio"), teraio.resident(world.layers):
        assert not any(map(is_away, tensors(world)))
    assert "overrun: user code (teraio.resident " in caplog.text
    assert teraio.stats()["overrun_bytes"] > 100_000


def test_blocks_nest_and_an_error_ends_them(world: World) -> None:
    weight = world.layers[0].head.weight
    with teraio.resident([weight]):
        with pytest.raises(KeyError), teraio.resident(world.layers[0], {"a": [weight]}):
            raise KeyError
        send_away(tensors(world))
        assert not is_away(weight)
        assert is_away(world.layers[0].frozen)
    send_away([weight])
    assert is_away(weight)


def test_what_is_written_by_address_in_the_block_is_kept(world: World) -> None:
    weight = world.layers[1].head.weight
    with teraio.resident(weight):
        addressed(weight)[2] = 123.0
    send_away([weight])
    assert is_away(weight)
    assert weight[0, 2].item() == 123.0


def test_an_optimizer_brings_its_weights_gradients_and_states(world: World) -> None:
    weight = world.layers[0].head.weight
    assert weight.grad is not None
    with teraio.resident(world.optimizer):
        mine = [weight, weight.grad, world.optimizer.state[weight]["exp_avg"]]
        records = [record for tensor in mine if (record := record_of(tensor))]
        assert [record.key for record in records if record.pins != record.evictable] == []
        assert not any(map(is_away, mine))
        assert is_away(world.layers[0].frozen)


def test_without_an_engine_there_is_nothing_to_do() -> None:
    teraio.reset()
    with teraio.resident(torch.nn.Linear(2, 2), [torch.zeros(3)], "name"):
        assert teraio.stats() == {}


def test_in_a_forked_process_what_is_away_says_so_and_the_rest_is_there(world: World) -> None:
    here, away = world.layers[0].frozen, world.layers[1].frozen
    with teraio.resident(here):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                here.sum().item()
                for _ in range(2):  # the second time too
                    try:
                        away.sum().item()
                    except RuntimeError as error:
                        said = str(error)
                        code = 0 if "aten::sum reads an evicted" in said and "teraio.resident(" in said else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_optimizer_is_here_with_weights_and_states() -> None:
    torch._dynamo.reset()
    world = World(compiled=True, layers=3)
    world.train(1)
    states = [t for state in world.optimizer.state.values() for t in state.values() if t.numel() > 1]
    weights = [weight for group in world.optimizer.param_groups for weight in group["params"]]
    send_away([*states, *weights])
    assert any(map(is_away, states)) and any(map(is_away, weights))
    with teraio.resident(world.optimizer, "a word"):
        assert not any(map(is_away, [*states, *weights]))
    torch._dynamo.reset()
