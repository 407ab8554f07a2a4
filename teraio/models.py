"""`teraio.init` and `teraio.load`, for models that are larger than memory. They create a model and load its
weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from teraio.backend import register_for_dynamo_resets
from teraio.errors import OptionError
from teraio.options import is_disabled
from teraio.runtime.engine import engine
from teraio.runtime.model import save
from teraio.runtime.model.init import construct_within_budget
from teraio.runtime.model.load import load_weights
from teraio.session import session

log = logging.getLogger("teraio")


@contextmanager
def init(**options: Any) -> Iterator[None]:
    """Let the block construct models that are larger than memory. Evict weights as the block creates them.

    `options` are options of the backend. A later `torch.compile(model, backend="teraio")` uses the same
    options by default, and manages the weights that the block created.
    """
    with init_on(torch.get_default_device(), **options):
        yield


@contextmanager
def init_on(device: torch.device, **options: Any) -> Iterator[None]:
    """Construct models as in `init`, within a budget of this device's memory."""
    if is_disabled():
        yield
        return
    _start_on(device, options)
    assert engine.ENGINE is not None
    with construct_within_budget(engine.ENGINE):
        yield


def _start_on(device: torch.device, options: Mapping[str, Any]) -> None:
    """Start the engine on this device. Log a warning if the budget limits RAM although there is a GPU."""
    register_for_dynamo_resets()
    if session.SESSION is None and device.type == "cpu" and torch.cuda.is_available():
        log.warning(
            "teraio: the budget limits RAM, because torch's default device is the CPU. For a model on the "
            "GPU, write: with torch.device('cuda'), teraio.init(...)"
        )
    session.start_with_options(options, device)


def load(what: Any, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """Load weights from safetensors files into a model, or load a file as `torch.load` does.

    `load(path)` loads a file as `torch.load` does, but reads bytes of the file only when they are used.

    `load(model, path, strict=True, copy=False, **options)` loads weights into a model, which may be on
    `meta`. `path` is a file, an index, or a folder in the layout of Hugging Face. The engine reads a weight
    from its file when a kernel needs the weight. Until a weight changes, its file serves as its evicted copy.
    With `copy=True`, write all weights to the store immediately. `options` are options of the backend, as in
    `init`. Return the names that do not match and that `strict=False` ignores.
    """
    if not isinstance(what, torch.nn.Module):
        if path is not None:
            raise OptionError("teraio.load takes a path, or a model and a path")
        return save.load(what, **options)
    if path is None:
        raise OptionError("teraio.load(model, path): the path of the weights is missing")
    settings = {name: options.pop(name, default) for name, default in (("strict", True), ("copy", False))}
    if not is_disabled():
        _start_on(torch.get_default_device(), options)
    return load_weights(engine.current_engine(), what, os.fspath(path), **settings)
