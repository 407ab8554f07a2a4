"""teraio: train models that do not fit, through `torch.compile(model, backend="teraio")`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "reset", "stats"]


def __getattr__(name: str) -> Any:
    """The public functions come with torch, which takes a second to import: only when asked for."""
    if name in {"reset", "stats"}:
        from teraio import session

        return getattr(session, name)
    raise AttributeError(f"module 'teraio' has no attribute {name!r}")
