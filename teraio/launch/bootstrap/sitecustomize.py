"""The first code in each Python process that `teraio run` starts, and in the children of such a process.

Python imports a module `sitecustomize` at its start. `teraio run` puts this folder first in PYTHONPATH. This
file then removes the folder from `sys.path`, and runs the environment's own `sitecustomize`, if it has one.
An interpreter of another environment cannot import teraio, so there this file does nothing else.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _run_own_sitecustomize() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _run_own_sitecustomize()
finally:
    if os.environ.get("TERAIO_RUN") == sys.prefix:
        from teraio.launch.torch_import import wrap_torch_when_imported

        wrap_torch_when_imported()
