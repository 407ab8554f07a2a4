"""The moment after `import torch`, in which functions of torch are wrapped.

The module of torch is not imported here. A finder in front of Python's own finders waits for the script's
first `import torch`, lets Python's own loader run, and then wraps the functions.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def wrap_torch_when_imported() -> None:
    """Wrap the functions of torch as soon as torch has been imported."""
    if "torch" in sys.modules:
        _wrap_torch()
    else:
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(MetaPathFinder):
    """A finder that finds only torch. It is removed when torch is imported. Before, a library may look for
    torch without an import.
    """

    def __init__(self) -> None:
        self.searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self)
        return spec


class _TorchLoader(Loader):
    """A loader that runs torch's own loader, and then wraps the functions of torch."""

    def __init__(self, own: Loader, finder: _TorchFinder) -> None:
        self.own, self.finder = own, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        sys.meta_path.remove(self.finder)
        _wrap_torch()


def _wrap_torch() -> None:
    from teraio.launch import compile_calls, moved_models, trained_models

    compile_calls.wrap_compile()
    trained_models.watch_optimizers()
    trained_models.watch_first_backward()
    moved_models.watch_moves()
