"""`teraio.init`, `teraio.load`: models that are larger than memory from their first line on."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


@contextmanager
def init(**options: Any) -> Iterator[None]:
    """In the block models are constructed whose weights leave memory as they are made. `options` are those
    of the backend; a `torch.compile(model, backend="teraio")` takes the weights over, and need not repeat
    them."""
    if is_disabled():
        yield
        return
    register_for_dynamo_resets()
    session.start_with_options(options)
    assert engine.ENGINE is not None
    with construct_within_budget(engine.ENGINE):
        yield


def load(what: Any, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """`load(model, path)`: weights from safetensors files; `load(path)`: as `torch.load`, with the
    file's bytes read when they are used.

    `load(model, path, strict=True, copy=False, **options)`: gives a model, also one on `meta`, the weights of
    safetensors files: a file, an index, or a folder as Hugging Face writes it. They stay in the files until
    they are needed and until they change; with `copy`, they go to the store at once. `options` are those of
    the backend, as in `init`. Returns the names that `strict=False` let pass.
    """
    if not isinstance(what, torch.nn.Module):
        if path is not None:
            raise OptionError("teraio.load takes a path, or a model and a path")
        return save.load(what, **options)
    if path is None:
        raise OptionError("teraio.load(model, path): the path of the weights is missing")
    settings = {name: options.pop(name, default) for name, default in (("strict", True), ("copy", False))}
    if not is_disabled():
        register_for_dynamo_resets()
        session.start_with_options(options)
    return load_weights(engine.current_engine(), what, os.fspath(path), **settings)
