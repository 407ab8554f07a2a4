"""Wrappers of `torch.save` that fetch evicted tensors one at a time.

`torch.save` first pickles all objects and then writes the bytes of all tensors. So the wrapper pickles only
the size and type of an evictable tensor. It fetches the tensor just before `torch.save` writes the tensor's
bytes.

    pickle      (function, storage 7, sizes)     no byte is read
    write 7     fetch storage 7 -> write it -> it may be evicted before storage 8 is fetched

The files have exactly the bytes that torch would write.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.serialization as _serialization
from torch.storage import TypedStorage

from ..engine import engine as _engine
from ..ledger.record import Record

_installed = False


def install() -> None:
    """Install the wrappers. A second call does nothing. Without an engine, the wrappers only call torch."""
    global _installed
    if not _installed:
        _installed = True
        _serialization._save = _wrap_zip_save(_serialization._save)
        _serialization._legacy_save = _wrap_legacy_save(_serialization._legacy_save)


class _SaveDepth(threading.local):
    depth = 0  # number of running calls of `torch.save` in this thread


_SAVING = _SaveDepth()


def is_saving() -> bool:
    """Return True if this thread runs `torch.save`. `torch.save` takes addresses of storages only to compare
    them, so no storage has to be fetched."""
    return _SAVING.depth > 0


def _wrap_zip_save(save: Any) -> Any:
    def save_one_by_one(obj: Any, zip_file: Any, pickle_module: Any, *rest: Any) -> None:
        engine = _engine.current_engine()
        if engine is None:
            return save(obj, zip_file, pickle_module, *rest)
        _SAVING.depth += 1
        try:
            with contextlib.ExitStack() as pinned:
                if engine.user.observer is not None:
                    pinned.enter_context(engine.user.observer.ignore_own_addresses())
                without_data = bool(_serialization._serialization_tls.skip_data)
                pickling = _wrap_pickle_module(pickle_module, engine, pinned, hold_all=without_data)
                return save(obj, FetchingWriter(zip_file, engine), pickling, *rest)
        finally:
            _SAVING.depth -= 1

    return save_one_by_one


def _wrap_legacy_save(save: Any) -> Any:
    """Wrap the function that saves in torch's old format. The wrapper keeps all saved tensors resident until
    the save has ended."""

    def save_all_resident(obj: Any, file: Any, pickle_module: Any, *rest: Any) -> None:
        engine = _engine.current_engine()
        if engine is None:
            return save(obj, file, pickle_module, *rest)
        with contextlib.ExitStack() as pinned:
            return save(obj, file, _wrap_pickle_module(pickle_module, engine, pinned, hold_all=True), *rest)

    return save_all_resident


def _wrap_pickle_module(
    module: Any, engine: _engine.Engine, pinned: contextlib.ExitStack, hold_all: bool
) -> Any:
    """Return a copy of the pickle module with another pickler. This pickler pickles an evictable tensor
    without its bytes.

    With `hold_all`, the pickler fetches the tensor instead. It keeps the tensor resident until the context
    `pinned` ends.
    """

    class Pickler(module.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and (record := _evictable_record_of(engine, obj)) is not None:
                if not hold_all and not (_is_off_cpu(obj) and _saves_by_pinned_copies()):
                    reduced = obj.__reduce_ex__(2)  # reads no byte of the tensor
                    if _is_off_cpu(obj):
                        pinned.enter_context(_fetch_before_cpu_copy(engine, record, reduced))
                    return reduced
                pinned.enter_context(engine.user.hold_resident([record], "save"))
            other = getattr(super(), "reducer_override", None)
            return NotImplemented if other is None else other(obj)

    members = {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
    return SimpleNamespace(**{**members, "Pickler": Pickler, "__name__": module.__name__})


def _evictable_record_of(engine: _engine.Engine, tensor: torch.Tensor) -> Record | None:
    """Return the tensor's record if the tensor may be evicted and its class is torch.Tensor or Parameter.
    Otherwise return None."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    return engine.residency.evictable_record_of(tensor)


def _is_off_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _saves_by_pinned_copies() -> bool:
    """Return True if a setting of torch makes `torch.save` copy storages to pinned memory itself. It then
    does not call `storage.cpu`, which teraio wraps."""
    from torch.utils.serialization import config

    return bool(config.save.use_pinned_memory_for_d2h)


@contextlib.contextmanager
def _fetch_before_cpu_copy(engine: _engine.Engine, record: Record, reduced: Any) -> Iterator[None]:
    """Replace the method `cpu` of a GPU's storage in the `with` block. `torch.save` calls this method just
    before it writes the storage. The replacement fetches the storage first."""

    def fetch_and_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        with engine.user.hold_resident([record], "save"):
            return torch.UntypedStorage.cpu(storage)

    storages = [typed._untyped_storage for typed in _storages_in(reduced)]
    for storage in storages:
        storage.cpu = functools.partial(fetch_and_copy, storage)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for storage in storages:
            storage.__dict__.pop("cpu", None)


def _storages_in(reduced: Any) -> Iterator[TypedStorage]:
    for part in reduced:
        if isinstance(part, TypedStorage):
            yield part
        elif isinstance(part, tuple):
            yield from _storages_in(part)


class FetchingWriter:
    """A wrapper of torch's archive that fetches each storage just before the write of its bytes."""

    def __init__(self, archive: Any, engine: _engine.Engine) -> None:
        self._archive = archive
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._archive, name)

    def write_record(self, name: str, data: Any, size_bytes: int) -> None:
        record = None
        if isinstance(data, torch.UntypedStorage):
            record = self._engine.residency.records.get(data._cdata)
            size_bytes = max(size_bytes, data.nbytes())  # computed before the fetch, so maybe too small
        if record is None:
            self._archive.write_record(name, data, size_bytes)
            return
        with self._engine.user.hold_resident([record], "save"):
            self._archive.write_record(name, data, record.size_bytes)
