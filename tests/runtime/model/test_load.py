"""Weights from safetensors files. Each weight is loaded correctly or refused.

The weights are never all in memory at once. A weight is written to the store only if it changes.
"""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import teraio
from teraio.errors import CheckpointError, FileFormatError
from teraio.formats.safetensors import read_header
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import Record, State
from teraio.runtime.store import source_files

MEMORY = 6 << 20  # bytes of the budget; the reserve takes 4 MiB of them
OPTIONS: dict[str, Any] = {"memory": str(MEMORY), "inner": "eager", "planner": "none"}
WIDTH, LAYERS = 128, 12


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    gc.collect()  # free the model, because an engine could later try to fetch weights whose file has changed
    torch._dynamo.reset()


class Net(nn.Module):
    """A model with tied weights, small tensors and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.rand(16, WIDTH))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.embed(index) + self.shift
        for layer in self.layers:
            x = x + torch.relu(layer(x)).unflatten(-1, (4, WIDTH)).sum(-2)
        out: torch.Tensor = self.head(x).square().mean()
        return out


INDEX = torch.arange(16).remainder(7)


def saved(folder: Path, shards: int = 3) -> Any:
    """Return a model whose weights are saved in sharded safetensors files, as Hugging Face writes them."""
    torch.manual_seed(0)
    model = Net()
    state = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    where = {name: f"model-{1 + at % shards:05}-of-{shards:05}.safetensors" for at, name in enumerate(names)}
    for file in set(where.values()):
        part = {name: state[name] for name in names if where[name] == file}
        safetensors.torch.save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return Net()


def made() -> Any:
    return Net()


def record_of(tensor: torch.Tensor) -> Record:
    assert engine.ENGINE is not None
    return engine.ENGINE.known_tensors.records[id(tensor)]


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items())
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def train(model: nn.Module, compiled: Callable[..., torch.Tensor], steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = compiled(INDEX)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- the bytes of loaded weights


@pytest.mark.parametrize("make", [on_meta, made])
def test_sharded_folder_is_loaded_without_reading_large_tensors(tmp_path: Path, make: Any) -> None:
    plain, ours = saved(tmp_path), make()
    size_bytes = sum(p.nbytes for p in plain.parameters())
    assert size_bytes > MEMORY - (4 << 20)
    loaded = teraio.load(ours, tmp_path, **OPTIONS)
    assert loaded == ((), ())
    assert ours.head.weight is ours.embed.weight
    records = [record_of(layer.weight) for layer in ours.layers]
    assert all(record.state is State.EVICTED for record in records)
    assert equal(ours, plain)
    assert teraio.stats()["overrun_bytes"] == teraio.stats()["written_bytes"] == 0
    assert teraio.stats()["resident_bytes"] <= MEMORY - (4 << 20)
    with torch.no_grad():
        ours.layers[0].weight.add_(1)
    assert equal(ours, plain) is False, "these tests compare nothing"


def test_loaded_model_trains_as_the_plain_one_and_writes_only_changed_weights(tmp_path: Path) -> None:
    plain = saved(tmp_path)
    for parameter in plain.layers[: LAYERS // 2].parameters():
        parameter.requires_grad_(False)
    expected = train(plain, torch.compile(plain, backend="aot_eager"))
    torch._dynamo.reset()
    ours = on_meta()
    for parameter in ours.layers[: LAYERS // 2].parameters():
        parameter.requires_grad_(False)
    teraio.load(ours, tmp_path, **OPTIONS)
    assert train(ours, torch.compile(ours, backend="teraio")) == expected
    assert equal(ours, plain)
    for number, layer in enumerate(ours.layers):
        assert (record_of(layer.weight).source is not None) == (number < LAYERS // 2)
        assert (record_of(layer.weight).extent is None) == (number < LAYERS // 2), "written without need"


def test_inference_of_a_loaded_model_writes_nothing(tmp_path: Path) -> None:
    plain = saved(tmp_path).requires_grad_(False)
    with torch.no_grad():
        expected = torch.compile(plain, backend="aot_eager")(INDEX)
    torch._dynamo.reset()
    ours = on_meta()
    ours.requires_grad_(False)
    teraio.load(ours, tmp_path / "model.safetensors.index.json", **OPTIONS)
    compiled = torch.compile(ours, backend="teraio")
    with torch.no_grad():
        assert all(compiled(INDEX) == expected for _ in range(3))
    assert teraio.stats()["written_bytes"] == 0
    assert teraio.stats()["drops"] > LAYERS


def test_model_loaded_with_copy_does_not_need_the_files(tmp_path: Path) -> None:
    plain, ours = saved(tmp_path), on_meta()
    teraio.load(ours, tmp_path, copy=True, **OPTIONS)
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    assert equal(ours, plain)
    assert teraio.stats()["written_bytes"] > 0


def test_load_without_an_engine_reads_all_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    plain, ours = saved(tmp_path), on_meta()
    teraio.load(ours, tmp_path)
    assert engine.ENGINE is None
    assert equal(ours, plain)


def test_weight_with_another_layout_or_holder_is_loaded_right(tmp_path: Path) -> None:
    plain, ours = saved(tmp_path), made()
    view = ours.layers[1].weight.data
    ours.layers[0].weight.data = torch.empty(WIDTH, 4 * WIDTH).t()
    ours.shift = torch.empty(1000, WIDTH)[7:23]
    teraio.load(ours, tmp_path, **OPTIONS)
    assert equal(ours, plain)
    assert torch.equal(view, plain.layers[1].weight)
    assert ours.layers[0].weight.stride() == (1, 4 * WIDTH)


# ---- files that change after they are loaded


def one_file(folder: Path) -> tuple[Any, Path]:
    saved(folder, shards=1)
    ours = on_meta()
    teraio.load(ours, folder, **OPTIONS)
    return ours, folder / "model-00001-of-00001.safetensors"


def test_replaced_and_removed_file_name_changes_no_weight(tmp_path: Path) -> None:
    ours, file = one_file(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    os.replace(other, file)
    os.unlink(file)
    torch.manual_seed(0)
    assert equal(ours, Net())


@pytest.mark.parametrize("cut", [False, True])
def test_changed_file_raises_an_error(tmp_path: Path, cut: bool) -> None:
    ours, file = one_file(tmp_path)
    if cut:
        os.truncate(file, file.stat().st_size - 1)
    else:
        with open(file, "r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"x")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"user code \(aten::sum\).*{file}.*changed since"):
            ours.layers[3].weight.sum()


def test_file_changed_during_a_read_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, file = one_file(tmp_path)
    really = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = really(descriptor, buffers, offset)
        os.utime(file)  # a real write also changes the file's time
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(RuntimeError, match="changed since"):
        ours.layers[3].weight.sum()


def test_weight_read_in_many_parts_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a weight that is larger than one read. The system may also return fewer bytes than a read
    requested."""
    ours, _ = one_file(tmp_path)
    really = os.preadv

    def few(descriptor: int, buffers: Any, offset: int) -> int:
        return really(descriptor, [memoryview(buffers[0])[:3000]], offset)

    monkeypatch.setattr(source_files, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(os, "preadv", few)
    torch.manual_seed(0)
    assert equal(ours, Net())


def total(weight: torch.Tensor) -> float:
    with torch.no_grad():
        return weight.sum().item()


@pytest.mark.parametrize("hidden", [False, True])
def test_bytes_changed_with_the_old_time_raise_an_error(
    tmp_path: Path, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change a file but not its time. The weight's bytes no longer match the digest of the first read.

    If `hidden`, a fake digest hides the change, and only the numbers differ.
    """
    ours, file = one_file(tmp_path)
    weight = ours.layers[3].weight
    before = total(weight)
    descriptor = os.open(file, os.O_RDONLY)
    begin = read_header(descriptor, str(file))["layers.3.weight"].begin
    os.close(descriptor)
    about = file.stat()
    with open(file, "r+b") as stream:
        stream.seek(begin)
        stream.write(struct.pack("<f", 1e6))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    residency.advance_slot()
    residency.evict_until_fits(1 << 30, None)
    assert record_of(weight).state is State.EVICTED
    if hidden:
        monkeypatch.setattr(source_files._native, "digest", lambda *_: record_of(weight).source.digest)  # type: ignore[union-attr]
        assert total(weight) != before
        return
    with pytest.raises(RuntimeError, match="other bytes than before"):
        total(weight)


# ---- files that do not match the model


def refused(ours: nn.Module, path: Path, **named: Any) -> str:
    with pytest.raises(CheckpointError) as raised:
        teraio.load(ours, path, **named, **OPTIONS)
    return str(raised.value)


def test_error_names_all_differences_and_the_model_is_unchanged(tmp_path: Path) -> None:
    saved(tmp_path)
    ours = on_meta()
    ours.extra = nn.Parameter(torch.empty(3, device="meta"))
    del ours.shift
    ours.layers[2] = nn.Linear(WIDTH, WIDTH, device="meta")
    ours.layers[4] = nn.Linear(WIDTH, 4 * WIDTH, device="meta", dtype=torch.bfloat16)
    text = refused(ours, tmp_path)
    assert "1 missing in the file: extra" in text
    assert "1 unexpected in the file: shift" in text
    assert (
        f"layers.2.weight is float32[{4 * WIDTH}, {WIDTH}] in the file and float32[{WIDTH}, {WIDTH}]" in text
    )
    assert "layers.4.bias is float32[512] in the file and bfloat16[512] in the model" in text
    assert all(parameter.is_meta for parameter in ours.parameters())
    assert "4 differ" in refused(ours, tmp_path, strict=False)


def test_load_without_strict_takes_the_matching_tensors(tmp_path: Path) -> None:
    plain = saved(tmp_path)
    ours: Any = Net()
    ours.extra = nn.Parameter(torch.ones(3))
    del ours.shift
    loaded = teraio.load(ours, tmp_path, strict=False, **OPTIONS)
    assert loaded == (("extra",), ("shift",))
    assert torch.equal(ours.layers[5].weight, plain.layers[5].weight)
    assert ours.extra.sum() == 3


def test_buffers_that_no_file_has_must_not_be_on_meta(tmp_path: Path) -> None:
    saved(tmp_path)
    ours = on_meta()
    ours.layers[0].register_buffer("angles", torch.ones(3, device="meta"), persistent=False)
    text = refused(ours, tmp_path)
    assert "1 buffer of the model on device 'meta' cannot be loaded" in text and ": layers.0.angles." in text
    assert all(parameter.is_meta for parameter in ours.parameters())
    teraio.load(ours, tmp_path, strict=False, **OPTIONS)
    assert ours.layers[0].angles.is_meta and not ours.layers[0].weight.is_meta


def test_disabled_load_in_a_meta_block_puts_weights_in_ram(tmp_path: Path, monkeypatch: Any) -> None:
    plain = saved(tmp_path)
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    with torch.device("meta"):
        ours = Net()
        teraio.load(ours, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    state = {**saved(tmp_path).state_dict()}
    file = tmp_path / "all.safetensors"
    safetensors.torch.save_file({**state, "head.weight": state["head.weight"].clone()}, file)
    teraio.load(on_meta(), file, **OPTIONS)
    safetensors.torch.save_file({**state, "head.weight": state["head.weight"] + 1}, file)
    assert "embed.weight and head.weight are one tensor" in refused(on_meta(), file)


def test_folder_without_files_and_missing_file_are_refused(tmp_path: Path) -> None:
    assert "has 0 safetensors files" in refused(on_meta(), tmp_path)
    with pytest.raises(FileFormatError, match="cannot be opened"):
        teraio.load(on_meta(), tmp_path / "none.safetensors", **OPTIONS)


def test_file_with_all_types_of_torch_is_loaded_right(tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16]
    kinds += [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    given = {f"ä{n}": torch.randint(0, 2, (n, 3)).to(kind) for n, kind in enumerate(kinds)}
    safetensors.torch.save_file({**given, "scalar": torch.tensor(3.5)}, file, {"format": "pt", "x": "\n"})
    model: Any = nn.Module()
    for name, tensor in given.items():
        model.register_buffer(name, torch.empty_like(tensor, device="meta"))
    model.register_buffer("scalar", torch.empty((), device="meta"))
    teraio.load(model, file, **OPTIONS)
    for name, tensor in given.items():
        assert torch.equal(getattr(model, name).to(torch.float64), tensor.to(torch.float64)), name
    assert model.scalar == 3.5
