"""Whether another backend compiled something: its kernels take the addresses of weights, and where torch does
not say when an address is taken, nobody sees them read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import callback
from torch._dynamo.utils import counters


class Watch:
    """Count of Dynamo's compiles: ours and those of others. One per process."""

    def __init__(self, foreign: Callable[[], None]) -> None:
        self.foreign = foreign  # another backend compiled something
        self.ours = 0  # graphs that were compiled for us
        self.began = (0, 0)  # that, and the graphs of other backends, when the compile began

    def listen(self) -> None:
        """`torch._dynamo.reset()` forgets who listens."""
        compiles = callback.callback_handler
        if self._started not in compiles.start_callbacks:
            compiles.register_start_callback(self._started)
            compiles.register_end_callback(self._ended)
            self.began = self._graphs()

    def counts(self) -> None:
        """Count the graph that is being compiled as ours."""
        self.listen()
        self.ours += 1

    def _graphs(self) -> tuple[int, int]:
        """So far: ours, and those of others."""
        return self.ours, counters["stats"]["unique_graphs"] - self.ours

    def _started(self, *_: Any) -> None:
        self.began = self._graphs()

    def _ended(self, *_: Any) -> None:
        try:
            if self._graphs()[1] > self.began[1]:
                self.foreign()
        except BaseException:
            _count_as_ended()
            raise


def _count_as_ended() -> None:
    """Correct torch's count. It takes a compile whose end callback raises for one that goes on: it would call
    nobody for the next one, and `torch._dynamo.reset()` would refuse."""
    count = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback.callback_handler, count):
        setattr(callback.callback_handler, count, 0)  # under its lock: that is held while it calls us
