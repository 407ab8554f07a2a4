"""The loading of safetensors files into a model. The engine reads a weight from its file when a kernel needs
the weight.

    folder, index or file -> headers -> for each name, the model's tensor and the file's tensor
        if there are differences   an error lists all differences, and the model does not change
        otherwise                  each tensor becomes evicted, and the file is its copy

A difference is another type or shape of a tensor. With `strict`, a name that only the model or only the files
have is also a difference.

This module reads small tensors, and tensors that cannot be evicted, immediately. If a parameter of the model
is on the device `meta`, this module replaces it by a parameter on the engine's device. A parameter with
several names remains one parameter.

On a GPU, each tensor is read immediately, too. The engine may evict it as soon as it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass

from teraio.errors import CheckpointError
from teraio.formats.safetensors import TensorEntry, read_header, read_index
from teraio.units import fmt_count

from ..engine.engine import Engine
from ..ledger.record import Record
from ..store.source_files import FileCopy, WeightFile
from .init import Construction

INDEX = "model.safetensors.index.json"
SHOWN = 5  # a message lists at most this many names
COMPARED_BYTES = 2**20

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


class UnmatchedNames(NamedTuple):
    """The names that only the model has (`missing`), and the names that only the files have (`unexpected`).
    With `strict=False` such names raise no error."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class FileTensor(NamedTuple):
    file: WeightFile
    entry: TensorEntry


@dataclass(slots=True)
class ModelTensor:
    """A tensor of the model, with all of its names and with the modules that contain it."""

    tensor: torch.Tensor
    places: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def load_weights(
    engine: Engine | None, model: torch.nn.Module, path: str, *, strict: bool, copy: bool
) -> UnmatchedNames:
    """Load the tensors of safetensors files into the model. Without an engine, read all tensors into memory
    immediately. With `copy`, also read each tensor immediately, and do not use the files later."""
    found = dict(_tensors_in_files(path))
    wanted = list(_tensors_of_model(model).values())
    loaded = _refuse_unmatched_tensors(wanted, found, path, strict)
    if strict:
        _refuse_buffers_on_meta(model, wanted)
    for tensor in wanted:
        present = [name for name in tensor.names if name in found]
        if present:
            _refuse_unequal_tied_tensors(present, found)
            _load_tensor(engine, tensor, present[0], found[present[0]], copy)
    if engine is not None:
        engine.user.resume_user_code()
    return loaded


# ---- tensors of the files


def _tensors_in_files(path: str) -> Iterator[tuple[str, FileTensor]]:
    index = None
    if os.path.isdir(path):
        index = os.path.join(path, INDEX)
        if not os.path.exists(index):
            index, path = None, _only_safetensors_file(path)
    elif path.endswith(".json"):
        index = path
    if index is None:
        file = WeightFile(path)
        yield from (
            (name, FileTensor(file, entry)) for name, entry in read_header(file.descriptor, path).items()
        )
        return
    where = read_index(index)
    for shard in dict.fromkeys(where.values()):
        file = WeightFile(os.path.join(os.path.dirname(index), shard))
        entries = read_header(file.descriptor, file.path)
        for name, its in where.items():
            if its == shard:
                if name not in entries:
                    raise CheckpointError(f"{index} lists {name} in {shard}, but {shard} does not have it")
                yield name, FileTensor(file, entries[name])


def _only_safetensors_file(folder: str) -> str:
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files and no {INDEX}: name the file or the index"
        )
    return os.path.join(folder, files[0])


# ---- tensors of the model


def _tensors_of_model(model: torch.nn.Module) -> dict[int, ModelTensor]:
    """Return the model's parameters and persistent buffers by their ids, each with all of its names in
    `state_dict()`."""
    wanted: dict[int, ModelTensor] = {}
    for prefix, module in getattr(model, "_orig_mod", model).named_modules(remove_duplicate=False):
        lasting = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *lasting.items()):
            if tensor is not None:
                about = wanted.setdefault(id(tensor), ModelTensor(tensor))
                about.places.append((module, key))
                about.names.append(f"{prefix}.{key}" if prefix else key)
    return wanted


def _refuse_unmatched_tensors(
    wanted: list[ModelTensor], found: dict[str, FileTensor], path: str, strict: bool
) -> UnmatchedNames:
    names = {name for about in wanted for name in about.names}
    missing = [about.names[0] for about in wanted if not any(name in found for name in about.names)]
    unexpected = [name for name in found if name not in names]
    wrong = [
        f"{name} is {_dtype_and_shape_text(DTYPES[f.entry.dtype], f.entry.shape)} in the file and "
        f"{_dtype_and_shape_text(about.tensor.dtype, about.tensor.shape)} in the model"
        for about in wanted
        for name in about.names
        if (f := found.get(name)) is not None and _differs_in_type_or_shape(about.tensor, f.entry)
    ]
    differences = [f"{len(wrong)} differ: {_join_first_names(wrong, '; ')}"] if wrong else []
    if strict and missing:
        differences.append(f"{len(missing)} missing in the file: {_join_first_names(missing)}")
    if strict and unexpected:
        differences.append(f"{len(unexpected)} unexpected in the file: {_join_first_names(unexpected)}")
    if differences:
        remedy = "" if wrong else ". strict=False loads the tensors that match"
        raise CheckpointError(f"{path} is not for this model: {'. '.join(differences)}{remedy}")
    return UnmatchedNames(tuple(missing), tuple(unexpected))


def _refuse_buffers_on_meta(model: torch.nn.Module, saved: list[ModelTensor]) -> None:
    """Raise CheckpointError if buffers are on `meta` that no file has, because the model does not save
    them."""
    known = {id(about.tensor) for about in saved}
    buffers = getattr(model, "_orig_mod", model).named_buffers()
    names = [name for name, buffer in buffers if buffer.is_meta and id(buffer) not in known]
    if names:
        raise CheckpointError(
            f"{fmt_count(len(names), 'buffer')} of the model on device 'meta' cannot be loaded, because the "
            f"model does not save them: {_join_first_names(names)}. Create only the parameters on 'meta' "
            f"(accelerate.init_empty_weights does), or create the model in a block of teraio.init. With "
            f"strict=False the buffers remain on 'meta', and you set them after the load"
        )


def _differs_in_type_or_shape(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    return tensor.dtype != DTYPES[entry.dtype] or tuple(tensor.shape) != entry.shape


def _dtype_and_shape_text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _join_first_names(names: list[str], between: str = ", ") -> str:
    return between.join(names[:SHOWN]) + (f"{between}..." if len(names) > SHOWN else "")


def _refuse_unequal_tied_tensors(names: list[str], found: dict[str, FileTensor]) -> None:
    """Raise CheckpointError if the files have different bytes for these names. All of these names belong to
    one tensor of the model, as with tied weights."""
    first = found[names[0]]
    for name in names[1:]:
        other = found[name]
        size_bytes = first.entry.end - first.entry.begin
        for at in range(0, size_bytes, COMPARED_BYTES):
            count = min(COMPARED_BYTES, size_bytes - at)
            parts = [os.pread(f.file.descriptor, count, f.entry.begin + at) for f in (first, other)]
            if parts[0] != parts[1]:
                raise CheckpointError(
                    f"{names[0]} and {name} are one tensor of the model, but their bytes in the file differ"
                )


# ---- the load of one tensor from a file into the model


def _load_tensor(
    engine: Engine | None, wanted: ModelTensor, name: str, found: FileTensor, copy: bool
) -> None:
    entry, tensor = found.entry, wanted.tensor
    size_bytes = entry.end - entry.begin
    if engine is not None:
        Construction(engine).make_room(size_bytes, f"loading {name}")
    if tensor.is_meta:
        tensor = _replace_meta_tensor(wanted, entry, _device_for_weights(engine))
    source = FileCopy(found.file, entry.begin, size_bytes, engine is None or engine.mover.store.checksums)
    record = _register_if_evictable(engine, tensor, name)
    if engine is None or record is None:
        _read_into_tensor(tensor, source, name)
        if engine is not None and tensor.device.type != "cpu" and tensor.device == engine.mover.device.device:
            engine.registry.register_module_tensor(tensor, name)
        return
    engine.residency.owed_tensors.settle_records([record], "loading")
    torch.autograd.graph.increment_version(tensor)
    engine.mover.replace_bytes_by_file(record, source)
    if copy:
        engine.user.make_resident_for_user([record], 0, "loading")
        record.leave_file()
        record.wrote()


def _device_for_weights(engine: Engine | None) -> torch.device:
    """Return the device for tensors that are on `meta`. Without an engine, it is torch's default device."""
    device = torch.get_default_device() if engine is None else engine.mover.device.device
    return torch.device("cpu") if device.type == "meta" else device


def _replace_meta_tensor(wanted: ModelTensor, entry: TensorEntry, device: torch.device) -> torch.Tensor:
    """Make an uninitialized tensor on this device for a tensor of the model that is on `meta`. Put the new
    tensor into all modules that contain the old tensor, and return the new tensor."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
    old = wanted.tensor
    if isinstance(old, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
    vars(tensor).update(vars(old))
    for module, key in wanted.places:
        (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[assignment]
    return tensor


def _register_if_evictable(engine: Engine | None, tensor: torch.Tensor, name: str) -> Record | None:
    """Register the tensor with the engine, and return its record. Return None if the tensor cannot be
    evicted, or if its storage has another layout than the file."""
    if engine is None or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    with DisableTorchFunctionSubclass():
        record = engine.registry.register_module_tensor(tensor, name)
        whole = tensor.is_contiguous() and tensor.storage_offset() == 0
    if record is None or not record.evictable or not whole or record.size_bytes != tensor.nbytes:
        return None
    return None if engine.user.must_be_resident(record) or record.pins else record


def _read_into_tensor(tensor: torch.Tensor, source: FileCopy, name: str) -> None:
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if source.size_bytes:
        source.read_and_check_digest(staged.data_ptr(), name)
    with torch.no_grad():
        tensor.copy_(staged)
