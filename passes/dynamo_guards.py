"""Dynamo evaluates guards before it runs a compiled program, and they ask for the class of every weight: then
the weights must look as they did when the program was traced.

    guards of a program of ours   `before()`; if they do not hold: `after()`, then a compile or plain Python
    a compile                     `before()` ... `after()`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import callback
from torch._dynamo.utils import counters
from torch._guards import Guard, TracingContext

try:
    from torch._C._dynamo.eval_frame import set_guard_complete_hook
    from torch._dynamo.source import GlobalStateSource
except ImportError:  # a torch that has other names for them: then weights are never away in user code
    set_guard_complete_hook = None  # type: ignore[assignment]

SUPPORTED = set_guard_complete_hook is not None


class Watch:
    """What runs before and after guards. One per process."""

    def __init__(
        self, before: Callable[[], None], after: Callable[[], None], foreign: Callable[[], None]
    ) -> None:
        self.before, self.after = before, after
        self.foreign = foreign  # another backend compiled something
        self.ours = 0  # graphs that were compiled for us
        self.graphs = 0  # of all backends, when the compile began
        self.other: Callable[[bool], bool] | None = None

    def install(self) -> None:
        self.other = set_guard_complete_hook(self._evaluated)  # type: ignore[arg-type]
        self.listen()

    def listen(self) -> None:
        """`torch._dynamo.reset()` forgets who listens."""
        compiles = callback.callback_handler
        if self._started not in compiles.start_callbacks:
            compiles.register_start_callback(self._started)
            compiles.register_end_callback(self._ended)
            self.graphs = counters["stats"]["unique_graphs"] - self.ours

    def _evaluated(self, found: bool) -> bool:
        """Called by Dynamo after all guards of a frame; returns whether to use the program that was found."""
        if self.other is not None:
            found = self.other(found)
        if not found:
            self.after()
        return found

    def _started(self, *_: Any) -> None:
        self.graphs = counters["stats"]["unique_graphs"] - self.ours
        self.before()

    def _ended(self, *_: Any) -> None:
        if counters["stats"]["unique_graphs"] - self.ours > self.graphs:
            self.foreign()
        self.after()

    def guard_this_graph(self) -> None:
        """Called by the backend while a graph is compiled: its guards will begin with ours."""
        self.listen()
        self.ours += 1
        tracing = TracingContext.try_get()
        if tracing is not None:
            guard = Guard(GlobalStateSource(), self._add)
            tracing.guards_context.dynamo_guards.add(guard)

    def _add(self, builder: Any, guard: Guard) -> None:
        def weights_are_plain(*_: Any) -> bool:
            self.before()
            return True

        said = ["teraio: weights are plain tensors"]
        root = builder.guard_manager.root
        try:
            root.add_lambda_guard(weights_are_plain, said, None)
        except TypeError:  # torch 2.11
            root.add_lambda_guard(weights_are_plain, said)
