"""Whether another backend compiled something: its kernels take the addresses of weights, and where torch does
not say when an address is taken, nobody sees them read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import callback
from torch._dynamo.utils import counters


class ForeignCompileWatch:
    """Count of Dynamo's compiles: ours and those of others. One per process."""

    def __init__(self, foreign: Callable[[], None]) -> None:
        self.foreign = foreign  # another backend compiled something
        self.ours = 0  # graphs that were compiled for us
        self.began = (0, 0)  # that, and the graphs of other backends, when the compile began

    def register_compile_callbacks(self) -> None:
        """`torch._dynamo.reset()` forgets who listens."""
        compiles = callback.callback_handler
        if self._save_counts_when_compile_starts not in compiles.start_callbacks:
            compiles.register_start_callback(self._save_counts_when_compile_starts)
            compiles.register_end_callback(self._report_if_foreign_compiled)
            self.began = self._own_and_foreign_counts()

    def count_graph_as_own(self) -> None:
        """Count the graph that is being compiled as ours."""
        self.register_compile_callbacks()
        self.ours += 1

    def _own_and_foreign_counts(self) -> tuple[int, int]:
        """So far: ours, and those of others."""
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
    """Correct torch's count. It takes a compile whose end callback raises for one that goes on: it would call
    nobody for the next one, and `torch._dynamo.reset()` would refuse."""
    count = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback.callback_handler, count):
        setattr(callback.callback_handler, count, 0)  # under its lock: that is held while it calls us
