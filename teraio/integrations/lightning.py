"""The callback for Lightning's Trainer. In: a LightningModule and options. Out: compiled modules, and figures
in the Trainer's loggers.

    Trainer(callbacks=[TeraioCallback(memory="20GiB")], ...)

`lightning` and `pytorch_lightning` are two packages with the same code. `TeraioCallback` makes a callback for
the packages that the program has imported.

A strategy calls `training_step` directly, so a compiled LightningModule alone would compile nothing. Dynamo
cannot trace `training_step` itself, because `self.log` inspects it. So the callback compiles the modules that
`training_step` calls: each child with weights. If the class defines `forward`, and the strategy does not wrap
the LightningModule, the callback also compiles the LightningModule, for calls of `self(...)`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import teraio
from teraio.errors import OptionError
from teraio.options import Settings

from .compiled_models import COMPILED, compile_and_note, reason_not_to_compile
from .metrics import brief_figures

log = logging.getLogger("teraio")

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class CompileAndLog:
    """The methods of TeraioCallback that are the same for both packages."""

    def __init__(self, modules: Sequence[str] = (), **options: Any) -> None:
        Settings.parse(options)  # a wrong option raises an error here, not at the first step
        self.modules, self.options = tuple(modules), options
        self.logged = 0  # the Trainer's number of the last step whose figures were logged

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Compile the modules. Lightning calls this before the strategy wraps the LightningModule."""
        self._compile(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile the modules that `configure_model` has made after `setup`."""
        self._compile(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Log the figures of the last step, as often as Lightning logs."""
        step = trainer.global_step
        if not trainer.loggers or step == self.logged or step % trainer.log_every_n_steps:
            return
        self.logged = step
        if figures := brief_figures(teraio.stats(), words=False):
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def _compile(self, trainer: Any, pl_module: Any) -> None:
        ours = {module for module, options in COMPILED.items() if options == self.options}
        missing = [module for module in self._targets(trainer, pl_module) if module not in ours]
        if not missing:
            return
        reason = reason_not_to_compile(pl_module, ours)
        if reason is None and getattr(pl_module, "_compiler_ctx", None) is not None:
            reason = "the LightningModule is a result of torch.compile"
        if reason is not None:
            if self.options:
                log.warning(
                    "teraio: TeraioCallback compiles nothing, because %s; its options have no effect", reason
                )
            return
        for module in missing:
            compile_and_note(module, self.options)

    def _targets(self, trainer: Any, pl_module: Any) -> Iterator[torch.nn.Module]:
        """Yield the modules to compile."""
        if self.modules:
            named = dict(pl_module.named_modules())
            for name in self.modules:
                if name not in named:
                    raise OptionError(
                        f"TeraioCallback(modules=...): {type(pl_module).__name__} has no module {name!r}; "
                        f"its children are {', '.join(name for name, _ in pl_module.named_children())}"
                    )
                yield named[name]
            return
        defined_in = type(pl_module).forward.__module__
        if not defined_in.startswith(("torch.", "lightning.", "pytorch_lightning.")) and _is_unwrapped(
            trainer
        ):
            yield pl_module
        yield from _children_with_weights(pl_module)


def _is_unwrapped(trainer: Any) -> bool:
    """Return True if the strategy calls `training_step` directly.

    A strategy that wraps the LightningModule, such as DDP, calls the LightningModule while its `forward` is
    `training_step`. Dynamo cannot trace this.
    """
    return type(trainer.strategy).__name__ == "SingleDeviceStrategy"


def _children_with_weights(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost modules in `module` that have weights and can be called."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _children_with_weights(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _imported_packages() -> list[ModuleType]:
    """Return the packages that the program has imported. If there is none, import one of them."""
    found = [sys.modules[name] for name in PACKAGES if name in sys.modules]
    for name in PACKAGES:
        if found:
            break
        try:
            found.append(import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "pytorch_lightning"):
                raise
    if not found:
        raise ImportError("teraio.integrations.lightning needs Lightning: pip install lightning")
    return found


def TeraioCallback(modules: Sequence[str] = (), **options: Any) -> Any:
    """Make a Lightning callback that compiles the model with teraio, and logs how its steps run.

    `modules` are names of modules to compile, instead of the choice that the module's docstring describes.
    The other arguments are the options of `torch.compile(..., options=...)`.
    """
    bases = (CompileAndLog, *(package.Callback for package in _imported_packages()))
    return type("TeraioCallback", bases, {"__module__": __name__})(modules, **options)
