"""teraio: train models that do not fit, through `torch.compile(model, backend="teraio")`.

In: a model, its loop, a budget. Out: the numbers of the same compile without a budget, within that budget.

    backend     what torch.compile calls: a captured graph becomes a program with slots
    models      init, load: models that are larger than memory from their first line on
    options     Settings, Options: every option, its variable and its flag, once
    errors      TeraioError and what inherits from it; switches: features that a run does without
    progress    what a person who waits reads; units, text_table: how numbers and tables look
    formats     data and its files; then session, estimating and cli (each has a first page of its own)
    passes, runtime    links to the folders at the top: compile time, run time

Invariant: importing this loads no torch. Public names are those of `__all__`, and each is made in one module.

Log lines: "options 'mode' and 'inductor' have no effect, because inner='eager' is used".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teraio.estimating.estimate import estimate
    from teraio.models import init, load
    from teraio.options import Options
    from teraio.runtime.model.resident import resident
    from teraio.runtime.model.save import save
    from teraio.runtime.optimizer.hooks import wrap
    from teraio.runtime.step.stats import Stats
    from teraio.session.session import reset, set_memory, stats

__version__ = "0.1.0"

__all__ = [
    "Options",
    "Stats",
    "__version__",
    "estimate",
    "init",
    "load",
    "reset",
    "resident",
    "save",
    "set_memory",
    "stats",
    "wrap",
]

_WHERE = {
    "Options": "options",
    "Stats": "runtime.step.stats",
    "estimate": "estimating.estimate",
    "init": "models",
    "load": "models",
    "wrap": "runtime.optimizer.hooks",
    "reset": "session.session",
    "set_memory": "session.session",
    "stats": "session.session",
    "resident": "runtime.model.resident",
    "save": "runtime.model.save",
}


def __getattr__(name: str) -> Any:
    """The public functions come with torch, which takes a second to import: only when asked for."""
    if name in _WHERE:
        return getattr(import_module(f"teraio.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'teraio' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
