"""teraio: train models that do not fit into memory, through `torch.compile(model, backend="teraio")`.

In: a model, its training loop, a budget. Out: a training whose tensors fit into the budget, with the same
numbers as without a budget.

    backend     the backend of torch.compile: turns a captured graph into a program with slots, the points at
                which the engine evicts and fetches tensors
    models      init, load: create and load models that are larger than memory
    sharding    shard: divide the weights of a model among ranks (processes)
    in_place    compile_in_place: compile the calls of a module that other code holds
    options     Settings, Options: each option with its environment variable and its flag
    errors      TeraioError and its subclasses
    switches    features of a run that the user can turn off
    progress    progress lines of long work, on stderr
    units, text_table, terminal   text of numbers; text of tables; colours and widths of terminals
    formats                       data types and their files
    report                        pictures, pages and views of a step, a plan or an estimate
    session, estimating, cli      a run and its plans; estimates on fake tensors; the command line
    launch                        the launch of an unchanged script by `teraio run`
    integrations                  callbacks and loggers for other libraries
    passes, runtime               links to the top-level folders of compile time and of run time

Invariant: importing this package does not import torch. `__all__` lists the public names. Each public name is
defined in one module.

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
    from teraio.sharding import shard

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
    "shard",
    "stats",
    "wrap",
]

_MODULE_OF = {
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
    "shard": "sharding",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use. An import of all names would import torch, which takes a
    second."""
    if name in _MODULE_OF:
        return getattr(import_module(f"teraio.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'teraio' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
