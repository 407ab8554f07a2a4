"""teraio: train models that do not fit, through `torch.compile(model, backend="teraio")`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "init", "load", "reset", "resident", "save", "stats", "wrap"]

_WHERE = {
    "init": "models",
    "wrap": "runtime.optimizer",
    "reset": "session",
    "stats": "session",
    "resident": "runtime.stays",
    "save": "runtime.checkpoint",
    "load": "models",
}


def __getattr__(name: str) -> Any:
    """The public functions come with torch, which takes a second to import: only when asked for."""
    if name in _WHERE:
        return getattr(import_module(f"teraio.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'teraio' has no attribute {name!r}")
