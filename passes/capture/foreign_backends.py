"""A watch on compiles by other backends.

The kernels of another backend take the addresses of weights. Some versions of torch do not report that an
address is taken, and the engine then misses the kernels' reads. This module only reports that such a compile
ran.
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
        self.foreign = foreign  # callback for the end of a compile by another backend
        self.ours = 0  # graphs compiled by teraio
        self.began = (0, 0)  # counts for teraio and for other backends when the current compile began

    def register_compile_callbacks(self) -> None:
        """Register the callbacks if they are missing, because `torch._dynamo.reset()` removes them."""
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

        The last graph was counted as compiled by teraio, although another backend compiled it.
        """
        self.ours = count

    def _own_and_foreign_counts(self) -> tuple[int, int]:
        """Return a pair: the graphs that teraio has compiled, and the graphs that others have compiled."""
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

    If the callback at the end of a compile raises, torch continues to count this compile as in progress.
    Torch would then call no callback for the next compile, and `torch._dynamo.reset()` would fail.
    """
    count = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback.callback_handler, count):
        setattr(callback.callback_handler, count, 0)  # the callback handler holds its lock during the call
