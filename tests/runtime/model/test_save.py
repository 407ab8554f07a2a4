"""Checkpoints of evicted tensors. They have torch's own file format. Tensors are fetched one at a time, and
no partial file is left."""

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
from touch_child import World, evict_all, is_evicted, plain_facts, record_of, twin_of

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.patches import pickling

CHILD = tree.SUPPORT / "checkpoint_child.py"
LAYERS, TENSOR_BYTES = 6, 64 * 64 * 4
KILLS = 24


@pytest.fixture
def worlds() -> Iterator[tuple[World, World]]:
    """Yield a pair: a toy training whose tensors are all evicted, and a copy of this training without teraio.

    Memory has room for three tensors of the toy training.
    """
    torch._dynamo.reset()
    world = World(compiled=True, layers=LAYERS)
    world.train(2)
    for tensor in (t for layer in world.layers for t in (*layer.parameters(), *layer.buffers())):
        vars(tensor).clear()  # torch.compile marks tensors, and torch.save would write these marks into files
    twin = twin_of(world)
    shrink(world)
    yield world, twin
    torch._dynamo.reset()


def shrink(world: World) -> None:
    evict_all(tensors(world))
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    residency.budget_bytes = residency.reserve_bytes + residency.mover.resident_bytes + 3 * TENSOR_BYTES
    assert all(map(is_evicted, tensors(world)))


def tensors(world: World) -> list[torch.Tensor]:
    """Return all evictable tensors of a toy training."""
    kinds = ("weight", "frozen", "buffer", "index", "gradient", "state")
    found = [world.tensor(kind, number) for kind in kinds for number in range(LAYERS)]
    return [tensor for tensor in found if (record := record_of(tensor)) and record.evictable]


def states(world: World) -> list[dict[str, torch.Tensor]]:
    return [layer.state_dict() for layer in world.layers]


def all_of(world: World) -> dict[str, Any]:
    """Return, by name, the toy training's state dicts, single tensors, tied tensors and gradients, and the
    optimizer's state dict."""
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


# ---- the bytes of saved files


def test_saved_file_equals_torchs_file_byte_for_byte(worlds: tuple[World, World]) -> None:
    world, twin = worlds
    assert written(all_of(world)) == written(all_of(twin))
    assert overrun() == 0, "the file was not written one tensor at a time"
    assert sum(map(is_evicted, tensors(world))) >= len(tensors(world)) // 2


def test_tensors_of_a_gpu_are_fetched_one_at_a_time(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save tensors as if they were on a GPU. Torch then reads the size, copies the bytes to RAM, and writes
    the copy."""
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
    assert len(copies) > LAYERS and overrun() == 0, "the file was not written one tensor at a time"
    assert not any("cpu" in vars(tensor.untyped_storage()) for tensor in tensors(world))


@pytest.mark.parametrize(
    "how", [{"_use_new_zipfile_serialization": False}, {"pickle_module": pickle, "pickle_protocol": 4}]
)
def test_other_formats_of_torch_save_are_right(worlds: tuple[World, World], how: Any) -> None:
    world, twin = worlds
    back = torch.load(io.BytesIO(written(all_of(world), **how)), weights_only=False)
    assert plain_facts(back) == plain_facts(all_of(twin))


def test_file_saved_without_data_has_the_same_size(worlds: tuple[World, World]) -> None:
    world, twin = worlds
    with torch.serialization.skip_data():
        assert len(written(all_of(world))) == len(written(all_of(twin)))


def test_torch_save_without_the_wrapper_writes_the_same_file_with_an_overrun(
    worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `torch.save` without teraio's wrapper keeps each tensor resident until the save ends.

    The overrun shows that the tests above could fail.
    """
    monkeypatch.setattr(engine, "current_engine", lambda: None)
    assert written(all_of(worlds[0])) == written(all_of(worlds[1]))
    assert overrun() > 0


# ---- state dicts


def test_state_dict_fetches_nothing_and_keeps_nothing_resident(worlds: tuple[World, World]) -> None:
    world, twin = worlds
    found = states(world)
    assert all(map(is_evicted, tensors(world)))
    assert [list(layer) for layer in found] == [list(layer) for layer in states(twin)]
    assert plain_facts(found) == plain_facts(states(twin))
    assert overrun() == 0


def test_state_dict_shares_bytes_with_the_model_after_evictions(worlds: tuple[World, World]) -> None:
    weight = worlds[0].layers[0].head.weight
    found = worlds[0].layers[0].state_dict()["head.weight"]
    for number, (write, read) in enumerate([(found, weight), (weight, found)] * 2):
        with torch.no_grad():
            write.fill_(number)
        evict_all([weight])
        assert is_evicted(weight) and is_evicted(found)
        assert read.mean().item() == number
    evict_all([weight])
    del found, read, write
    with torch.no_grad():
        weight.fill_(7)
    evict_all([weight])
    assert is_evicted(weight) and weight.mean().item() == 7


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_is_loaded_into_evicted_tensors(worlds: tuple[World, World], assign: bool) -> None:
    world, twin = worlds
    for one in (world, twin):
        for layer in one.layers:
            other = {k: v * 2 if v.is_floating_point() else v.clone() for k, v in layer.state_dict().items()}
            layer.load_state_dict(other, assign=assign)
        one.optimizer.load_state_dict(torch.load(io.BytesIO(written(one.optimizer.state_dict()))))
    evict_all([tensor for layer in world.layers for tensor in layer.state_dict(keep_vars=True).values()])
    assert plain_facts(all_of(world)) == plain_facts(all_of(twin))


def test_safetensors_saves_and_loads_evicted_tensors(worlds: tuple[World, World], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for name, world in zip("ab", worlds):
        safetensors.save_model(torch.nn.ModuleList(world.layers), tmp_path / f"{name}.model")
        states_of = {f"{n}": layer.head.weight for n, layer in enumerate(world.layers)}
        safetensors.save_file(states_of, tmp_path / f"{name}.file")
    for kind in ("model", "file"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    safetensors.load_model(torch.nn.ModuleList(worlds[0].layers), tmp_path / "b.model")
    assert plain_facts(states(worlds[0])) == plain_facts(states(worlds[1]))


def test_distributed_checkpoint_saves_and_loads_evicted_tensors(
    worlds: tuple[World, World], tmp_path: Path
) -> None:
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


def test_saved_file_is_read_by_torch_and_holds_no_path(worlds: tuple[World, World], tmp_path: Path) -> None:
    path = tmp_path / "somewhere.pt"
    teraio.save(all_of(worlds[0]), path)
    assert path.read_bytes() == written(all_of(worlds[1]))
    for back in (torch.load(path), teraio.load(path)):
        assert plain_facts(back) == plain_facts(torch.load(io.BytesIO(written(all_of(worlds[1])))))
    assert os.listdir(tmp_path) == ["somewhere.pt"]


def test_failed_save_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    teraio.save([1], path)
    with pytest.raises(AttributeError):
        teraio.save([torch.zeros(100), lambda: None], path)
    assert teraio.load(path) == [1]
    assert os.listdir(tmp_path) == ["a.pt"]


def test_bytes_are_on_the_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the order of system calls. With another order, a power cut could leave an empty file in place of
    the last checkpoint."""
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
    """An object that saves another checkpoint to the same path while the object itself is pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        teraio.save([1], self.path)
        return OrderedDict, ()


def test_partial_file_of_a_running_save_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    teraio.save([SavesAnother(path)], path)
    assert teraio.load(path) == [{}]
    assert os.listdir(tmp_path) == ["a.pt"]


def test_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    teraio.save(numbered(0), path)
    random_ = random.Random(5)
    numbers = {kill_while_saving(path, random_.uniform(0.02, 0.1)) for _ in range(KILLS)}
    # Seconds from the start of the save to the kill; a slow machine needs more than a fast one.
    for seconds in (0.5, 1, 2, 4):
        if len(numbers) == 1:
            numbers.add(kill_while_saving(path, seconds))
    assert -1 not in numbers, "half a file"
    assert len(numbers) > 1, "no file was ever finished: the test shows nothing"
    assert len(os.listdir(tmp_path)) <= 2, "a save has not removed the partial file of a killed one"
    teraio.save([2], path)
    assert os.listdir(tmp_path) == ["a.pt"]


# ---- stopping and resuming a training


@cache
def child(how: str, path: Path) -> dict[str, Any]:
    done = forked(CHILD, how, str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_training_resumed_from_a_checkpoint_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = child("straight", tmp_path / "a.pt")
    resumed = child("resumed", tmp_path / "a.pt")
    assert resumed["digest"] == straight["digest"]
    assert straight["fetched"] >= 8, "too few tensors were evicted when the checkpoint was saved"
    assert straight["peak_bytes"] <= MEMORY_BYTES
    assert straight["overrun_bytes"] == 0


class Named(torch.Tensor):
    """A subclass of torch.Tensor."""


def test_tensors_of_other_kinds_are_saved_beside_plain_ones(worlds: tuple[World, World]) -> None:
    named = torch.arange(900.0).as_subclass(Named)
    others = {"sparse": torch.eye(30).to_sparse(), "named": named, "none": torch.empty(3, device="meta")}
    first, second = ({**others, "all": all_of(world)} for world in worlds)
    assert written(first) == written(second)
    loaded = torch.load(io.BytesIO(written(first)), weights_only=False)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(30)) and type(loaded["named"]) is Named
