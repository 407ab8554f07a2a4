"""Reports of compiles by other backends.

The kernels of another backend take the addresses of weights. Some versions of torch do not report that a
kernel takes an address. The engine then cannot detect that the kernel reads a weight, and the weight may be
evicted. This module reports that another backend compiled a graph. The caller of this module handles the
report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import callback
from torch._dynamo.utils import counters


class ForeignCompileWatch:
    """Counts of the compiles that Dynamo ran for teraio and for other backends.

    There is one watch per process.
    """

    def __init__(self, foreign: Callable[[], None]) -> None:
        self.foreign = foreign  # called at the end of each compile by another backend
        self.ours = 0  # number of graphs that teraio has compiled
        self.began = (0, 0)  # graphs of teraio and of other backends, when the current compile began

    def register_compile_callbacks(self) -> None:
        """Register the callbacks at Dynamo, if they are missing. `torch._dynamo.reset()` removes them."""
        compiles = callback.callback_handler
        if self._save_counts_when_compile_starts not in compiles.start_callbacks:
            compiles.register_start_callback(self._save_counts_when_compile_starts)
            compiles.register_end_callback(self._report_if_foreign_compiled)
            self.began = self._own_and_foreign_counts()

    def count_graph_as_own(self) -> None:
        """Count the graph that is being compiled as compiled by teraio."""
        self.register_compile_callbacks()
        self.ours += 1

    def restore_own_count(self, count: int) -> None:
        """Set the number of graphs compiled by teraio back to `count`.

        The caller uses this method if the last graph was counted as teraio's own, but another backend
        compiled it.
        """
        self.ours = count

    def _own_and_foreign_counts(self) -> tuple[int, int]:
        """Return a pair: the number of graphs that teraio has compiled, and the number that other backends
        have compiled.
        """
        return self.ours, counters["stats"]["unique_graphs"] - self.ours

    def _save_counts_when_compile_starts(self, *_: Any) -> None:
        self.began = self._own_and_foreign_counts()

    def _report_if_foreign_compiled(self, *_: Any) -> None:
        try:
            if self._own_and_foreign_counts()[1] > self.began[1]:
                self.foreign()
        except BaseException:
            _zero_torch_pending_compile_count()
            raise


def _zero_torch_pending_compile_count() -> None:
    """Set torch's count of compiles in progress to zero.

    If our callback at the end of a compile raises an error, torch still counts this compile as in progress.
    Torch would then call no callback for the next compile, and `torch._dynamo.reset()` would fail.
    """
    count = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback.callback_handler, count):
        setattr(callback.callback_handler, count, 0)  # torch's callback handler calls us under its lock
