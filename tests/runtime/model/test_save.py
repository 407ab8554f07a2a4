"""Checkpoints of what is away: the files that torch writes, a tensor at a time, and never half a file."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import stat
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import tree
from checkpoint_child import MEMORY_BYTES
from checkpoint_kill import kill_while_saving, numbered
from children import forked
from touch_child import World, is_away, plain_facts, record_of, send_away, twin_of

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.patches import pickling

CHILD = tree.SUPPORT / "checkpoint_child.py"
LAYERS, TENSOR_BYTES = 6, 64 * 64 * 4
KILLS = 24


@pytest.fixture
def worlds() -> Iterator[tuple[World, World]]:
    """One whose tensors are away, with room for three of them, and its plain twin."""
    torch._dynamo.reset()
    world = World(compiled=True, layers=LAYERS)
    world.train(2)
    for tensor in (t for layer in world.layers for t in (*layer.parameters(), *layer.buffers())):
        vars(tensor).clear()  # a compile leaves a mark, which torch writes into its files
    twin = twin_of(world)
    shrink(world)
    yield world, twin
    torch._dynamo.reset()


def shrink(world: World) -> None:
    send_away(tensors(world))
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    residency.budget_bytes = residency.reserve_bytes + residency.mover.resident_bytes + 3 * TENSOR_BYTES
    assert all(map(is_away, tensors(world)))


def tensors(world: World) -> list[torch.Tensor]:
    """All that can leave."""
    kinds = ("weight", "frozen", "buffer", "index", "gradient", "state")
    found = [world.tensor(kind, number) for kind in kinds for number in range(LAYERS)]
    return [tensor for tensor in found if (record := record_of(tensor)) and record.evictable]


def states(world: World) -> list[dict[str, torch.Tensor]]:
    return [layer.state_dict() for layer in world.layers]


def all_of(world: World) -> dict[str, Any]:
    """State dicts, tensors by themselves, tied and viewed ones, and what an optimizer has."""
    first = world.layers[0]
    return {
        "layers": states(world),
        "optimizer": world.optimizer.state_dict(),
        "tensors": [t for layer in world.layers for t in (layer.table, layer.frozen, layer.head.weight)],
        "tied": [first.table, first.table, first.head.weight],
        "gradients": [layer.head.weight.grad for layer in world.layers],
    }


def written(thing: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(thing, stream, **how)
    return stream.getvalue()


def overrun() -> int:
    return teraio.stats()["overrun_bytes"]


# ---- the bytes


def test_a_file_is_the_one_that_torch_writes_byte_for_byte(worlds: tuple[World, World]) -> None:
    world, twin = worlds
    assert written(all_of(world)) == written(all_of(twin))
    assert overrun() == 0, "it was not written a tensor at a time"
    assert sum(map(is_away, tensors(world))) >= len(tensors(world)) // 2


def test_what_is_on_a_gpu_comes_back_one_by_one_too(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch asks for the size, copies to RAM, and writes that."""
    world, twin = worlds
    write, copies = pickling.FetchingWriter.write_record, []

    def on_gpu(writer: pickling.FetchingWriter, name: str, data: Any, size_bytes: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            copies.append(data.cpu())
            data, size_bytes = copies[-1], data.nbytes()
        write(writer, name, data, size_bytes)

    monkeypatch.setattr(pickling, "_is_off_cpu", lambda tensor: True)
    monkeypatch.setattr(torch.UntypedStorage, "cpu", torch.UntypedStorage.clone)
    monkeypatch.setattr(pickling.FetchingWriter, "write_record", on_gpu)
    assert written(all_of(world)) == written(all_of(twin))
    assert len(copies) > LAYERS and overrun() == 0, "it was not written a tensor at a time"
    assert not any("cpu" in vars(tensor.untyped_storage()) for tensor in tensors(world))


@pytest.mark.parametrize(
    "how", [{"_use_new_zipfile_serialization": False}, {"pickle_module": pickle, "pickle_protocol": 4}]
)
def test_other_ways_to_save_are_right_too(worlds: tuple[World, World], how: Any) -> None:
    world, twin = worlds
    back = torch.load(io.BytesIO(written(all_of(world), **how)), weights_only=False)
    assert plain_facts(back) == plain_facts(all_of(twin))


def test_a_file_without_data_has_the_sizes(worlds: tuple[World, World]) -> None:
    world, twin = worlds
    with torch.serialization.skip_data():
        assert len(written(all_of(world))) == len(written(all_of(twin)))


def test_torch_alone_writes_the_same_and_has_all_of_it_in_memory_at_once(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests find a save that does not wait: what it has pickled stays."""
    monkeypatch.setattr(engine, "current_engine", lambda: None)
    assert written(all_of(worlds[0])) == written(all_of(worlds[1]))
    assert overrun() > 0


# ---- state dicts


def test_a_state_dict_brings_nothing_back_and_keeps_nothing_here(worlds: tuple[World, World]) -> None:
    world, twin = worlds
    found = states(world)
    assert all(map(is_away, tensors(world)))
    assert [list(layer) for layer in found] == [list(layer) for layer in states(twin)]
    assert plain_facts(found) == plain_facts(states(twin))
    assert overrun() == 0


def test_a_state_dict_is_the_model_also_after_a_round_on_the_disk(worlds: tuple[World, World]) -> None:
    weight = worlds[0].layers[0].head.weight
    found = worlds[0].layers[0].state_dict()["head.weight"]
    for number, (write, read) in enumerate([(found, weight), (weight, found)] * 2):
        with torch.no_grad():
            write.fill_(number)
        send_away([weight])
        assert is_away(weight) and is_away(found)
        assert read.mean().item() == number
    send_away([weight])
    del found, read, write
    with torch.no_grad():
        weight.fill_(7)
    send_away([weight])
    assert is_away(weight) and weight.mean().item() == 7


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_away_is_loaded(worlds: tuple[World, World], assign: bool) -> None:
    world, twin = worlds
    for one in (world, twin):
        for layer in one.layers:
            other = {k: v * 2 if v.is_floating_point() else v.clone() for k, v in layer.state_dict().items()}
            layer.load_state_dict(other, assign=assign)
        one.optimizer.load_state_dict(torch.load(io.BytesIO(written(one.optimizer.state_dict()))))
    send_away([tensor for layer in world.layers for tensor in layer.state_dict(keep_vars=True).values()])
    assert plain_facts(all_of(world)) == plain_facts(all_of(twin))


def test_safetensors_are_right(worlds: tuple[World, World], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for name, world in zip("ab", worlds):
        safetensors.save_model(torch.nn.ModuleList(world.layers), tmp_path / f"{name}.model")
        states_of = {f"{n}": layer.head.weight for n, layer in enumerate(world.layers)}
        safetensors.save_file(states_of, tmp_path / f"{name}.file")
    for kind in ("model", "file"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    safetensors.load_model(torch.nn.ModuleList(worlds[0].layers), tmp_path / "b.model")
    assert plain_facts(states(worlds[0])) == plain_facts(states(worlds[1]))


def test_distributed_checkpoints_are_right(worlds: tuple[World, World], tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    world, twin = worlds
    dcp.save(
        {"model": torch.nn.ModuleList(world.layers).state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True
    )
    with torch.no_grad():
        for tensor in tensors(world):
            tensor.zero_()
    back = {"model": torch.nn.ModuleList(world.layers).state_dict()}
    dcp.load(back, checkpoint_id=tmp_path / "c", no_dist=True)
    assert plain_facts(states(world)) == plain_facts(states(twin))


# ---- teraio.save


def test_a_saved_file_is_read_by_torch_and_holds_no_path(worlds: tuple[World, World], tmp_path: Path) -> None:
    path = tmp_path / "somewhere.pt"
    teraio.save(all_of(worlds[0]), path)
    assert path.read_bytes() == written(all_of(worlds[1]))
    for back in (torch.load(path), teraio.load(path)):
        assert plain_facts(back) == plain_facts(torch.load(io.BytesIO(written(all_of(worlds[1])))))
    assert os.listdir(tmp_path) == ["somewhere.pt"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    teraio.save([1], path)
    with pytest.raises(AttributeError):
        teraio.save([torch.zeros(100), lambda: None], path)
    assert teraio.load(path) == [1]
    assert os.listdir(tmp_path) == ["a.pt"]


def test_bytes_are_on_the_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name without bytes would be an empty checkpoint in the place of the last."""
    done: list[str] = []

    def noted(name: str) -> None:
        really = getattr(os, name)

        def call(what: Any, *rest: Any) -> None:
            folder = name == "fsync" and stat.S_ISDIR(os.fstat(what).st_mode)
            done.append(f"{name} of the folder" if folder else name)
            really(what, *rest)

        monkeypatch.setattr(os, name, call)

    noted("fsync")
    noted("replace")
    teraio.save([1], tmp_path / "a.pt")
    assert done == ["fsync", "replace", "fsync of the folder"]


class SavesAnother:
    """While it is pickled, the same file is saved once more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        teraio.save([1], self.path)
        return OrderedDict, ()


def test_a_file_that_is_being_saved_is_no_leftover(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    teraio.save([SavesAnother(path)], path)
    assert teraio.load(path) == [{}]
    assert os.listdir(tmp_path) == ["a.pt"]


def test_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    teraio.save(numbered(0), path)
    random_ = random.Random(5)
    numbers = {kill_while_saving(path, random_.uniform(0.02, 0.1)) for _ in range(KILLS)}
    for seconds in (0.5, 1, 2, 4):  # where a fork or a drive is slow
        if len(numbers) == 1:
            numbers.add(kill_while_saving(path, seconds))
    assert -1 not in numbers, "half a file"
    assert len(numbers) > 1, "no file was ever finished: the test shows nothing"
    assert len(os.listdir(tmp_path)) <= 2, "what a kill leaves is cleared by the next save"
    teraio.save([2], path)
    assert os.listdir(tmp_path) == ["a.pt"]


# ---- stop, and go on


@cache
def child(how: str, path: Path) -> dict[str, Any]:
    done = forked(CHILD, how, str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_going_on_from_a_checkpoint_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight = child("straight", tmp_path / "a.pt")
    resumed = child("resumed", tmp_path / "a.pt")
    assert resumed["digest"] == straight["digest"]
    assert straight["fetched"] >= 8, "too little was away when it was saved"
    assert straight["peak_bytes"] <= MEMORY_BYTES
    assert straight["overrun_bytes"] == 0


class Named(torch.Tensor):
    """Of a class of its own."""


def test_what_is_no_plain_tensor_is_saved_beside_them(worlds: tuple[World, World]) -> None:
    named = torch.arange(900.0).as_subclass(Named)
    others = {"sparse": torch.eye(30).to_sparse(), "named": named, "none": torch.empty(3, device="meta")}
    first, second = ({**others, "all": all_of(world)} for world in worlds)
    assert written(first) == written(second)
    loaded = torch.load(io.BytesIO(written(first)), weights_only=False)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(30)) and type(loaded["named"]) is Named
