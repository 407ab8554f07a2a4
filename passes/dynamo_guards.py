"""Dynamo evaluates guards before it runs a compiled program, and they ask for the class of every weight: then
the weights must look as they did when the program was traced.

    guards of a program of ours   `before()`; if they do not hold: `after()`, then a compile or plain Python
    guards of no program          `before()`, and, if they hold, `after()`: Dynamo cut a frame before anything
                                  was computed, and what runs next is Python
    a compile                     `before()` ... `after()`
    Dynamo is asked for one       `after()` at the end. If none fits, it evaluates guards once more, to say
                                  why, and may then give up instead of compiling: one recompile too many
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo import callback
from torch._dynamo.utils import counters
from torch._guards import Guard, TracingContext

try:
    from torch._C._dynamo.eval_frame import set_guard_complete_hook
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.guards import GuardBuilder
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
        self.began = (0, 0)  # that, and the graphs of other backends, when the compile began
        self.other: Callable[[bool], bool] | None = None

    def install(self) -> None:
        self.other = set_guard_complete_hook(self._evaluated)  # type: ignore[arg-type]
        self._see_every_frame()
        self._see_every_end()
        self.listen()

    def listen(self) -> None:
        """`torch._dynamo.reset()` forgets who listens."""
        compiles = callback.callback_handler
        if self._started not in compiles.start_callbacks:
            compiles.register_start_callback(self._started)
            compiles.register_end_callback(self._ended)
            self.began = self._graphs()

    def _graphs(self) -> tuple[int, int]:
        """So far: ours, and those of others."""
        return self.ours, counters["stats"]["unique_graphs"] - self.ours

    def _evaluated(self, found: bool) -> bool:
        """Called by Dynamo after all guards of a frame; returns whether to use the program that was found."""
        if self.other is not None:
            found = self.other(found)
        if not found:
            self.after()
        return found

    def _started(self, *_: Any) -> None:
        self.began = self._graphs()
        self.before()

    def _ended(self, *_: Any) -> None:
        try:
            if self._graphs()[1] > self.began[1]:
                self.foreign()
        except BaseException:
            _count_as_ended()
            raise
        finally:
            self.after()

    def guard_this_graph(self) -> None:
        """Called by the backend while a graph is compiled: its guards will begin with ours.
        `_see_every_frame` comes too late for the first: that frame has said before what it is guarded on."""
        self.listen()
        self.ours += 1
        tracing = TracingContext.try_get()
        if tracing is not None:
            guard = Guard(GlobalStateSource(), self._add)
            tracing.guards_context.dynamo_guards.add(guard)

    def _add(self, builder: Any, guard: Guard) -> None:
        _ask(builder.guard_manager.root.add_lambda_guard, self.before)

    def _see_every_frame(self) -> None:
        """Each frame is guarded on the mode of autograd, which `GRAD_MODE` leaves to others."""
        elsewhere = GuardBuilder.GRAD_MODE

        @functools.wraps(elsewhere)
        def of_no_program(builder: Any, guard: Guard) -> None:
            elsewhere(builder, guard)
            if self._graphs() == self.began:
                self._add(builder, guard)
                _ask(builder.guard_manager.root.add_epilogue_lambda_guard, self.after)

        GuardBuilder.GRAD_MODE = of_no_program  # type: ignore[method-assign]

    def _see_every_end(self) -> None:
        asked = CatchErrorsWrapper.__call__

        @functools.wraps(asked)
        def to_the_end(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return asked(wrapper, *args, **kwargs)
            finally:
                self.after()

        CatchErrorsWrapper.__call__ = to_the_end  # type: ignore[method-assign, assignment]


def _count_as_ended() -> None:
    """Correct torch's count. It takes a compile whose end callback raises for one that goes on: it would call
    nobody for the next one, and `torch._dynamo.reset()` would refuse."""
    count = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback.callback_handler, count):
        setattr(callback.callback_handler, count, 0)  # under its lock: that is held while it calls us


def _ask(add: Callable[..., None], what: Callable[[], None]) -> None:
    """One more guard, which holds: `what` runs when its turn comes."""

    def weights_are_plain(*_: Any) -> bool:
        what()
        return True

    said = ["teraio: weights are plain tensors"]
    try:
        add(weights_are_plain, said, None)
    except TypeError:  # torch 2.11
        add(weights_are_plain, said)
