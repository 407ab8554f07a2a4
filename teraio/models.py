"""`teraio.init`: models that are larger than memory from their first line on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from teraio import session
from teraio.backend import hear_of_resets
from teraio.options import disabled
from teraio.runtime import engine, making


@contextmanager
def init(**options: Any) -> Iterator[None]:
    """In the block models are constructed whose weights leave memory as they are made. `options` are those
    of the backend; a `torch.compile(model, backend="teraio")` takes the weights over, and need not repeat
    them."""
    if disabled():
        yield
        return
    hear_of_resets()
    session.open_with(options)
    assert engine.ENGINE is not None
    with making.models(engine.ENGINE):
        yield
