"""Which call of the step is this? The tracker compares the programs that run with those of the step before.

A step is a list of calls; a tick is a slot's place in the whole step. Ticks are known as long as the programs
come in the order of the last step; from the first one that does not, until the step ends, they are not, and
the engine works on demand. The step ends when the optimizer has stepped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from teraio.schedule import Call, Step

if TYPE_CHECKING:
    from .engine import Program


class Running:
    """The call that is going on, as it is measured."""

    def __init__(self, program: Program) -> None:
        slots = len(program.schedule.slots)
        self.program = program
        self.at_ns = [0] * slots
        self.stall_ns = [0] * slots
        self.live_bytes = [0] * slots

    def finish(self, name: Callable[[int], str]) -> Call:
        tensors = tuple(name(buffer) for buffer in range(len(self.program.schedule.buffers)))
        return Call(
            self.program.schedule, tensors, tuple(self.at_ns), tuple(self.live_bytes), tuple(self.stall_ns)
        )


class StepTracker:
    def __init__(self) -> None:
        self.expected: tuple[str, ...] = ()  # identities of the last step's programs
        self.base: tuple[int, ...] = ()  # tick at which each of its calls begins
        self.length = 0  # ticks of the last step
        self.number = 0  # of the call that runs, within the step
        self.calls: list[Call] = []
        self.running: Running | None = None
        self.on_track = True

    def enter(self, program: Program) -> None:
        self._close()
        self.number = len(self.calls)
        self.running = Running(program)
        if self.expected:
            known = self.number < len(self.expected) and self.expected[self.number] == program.identity
            self.on_track = self.on_track and known

    def tick(self, index: int) -> int | None:
        """The tick of this slot, or None where the step does not follow the last one."""
        if not self.expected or not self.on_track:
            return None
        return self.base[self.number] + index

    def visited(self, index: int, began_ns: int, left_ns: int, live_bytes: int) -> None:
        running = self.running
        assert running is not None
        running.at_ns[index] = left_ns
        running.stall_ns[index] = left_ns - began_ns
        running.live_bytes[index] = live_bytes

    def _close(self) -> None:
        if self.running is not None:
            bound = self.running.program.bound
            self.calls.append(self.running.finish(lambda b: bound[b].name if bound[b] else ""))  # type: ignore[union-attr]
            self.running = None

    def drop(self) -> None:
        """The step has become too long to be one: what it was so far is forgotten, and what was expected."""
        self.calls, self.running, self.on_track = [], None, True
        self.expected, self.base, self.length = (), (), 0

    def abandon(self) -> None:
        """The call that runs ended with an exception: it is no part of the step."""
        self.running = None
        self.on_track = False

    def finish(
        self, describe: Callable[[str], tuple[str, str, int, bool] | None], reachable: frozenset[str]
    ) -> Step | None:
        """Ends the step; returns it if anything ran in it."""
        self._close()
        calls, self.calls = tuple(self.calls), []
        self.on_track = True
        if not calls:
            return None
        names = {name for call in calls for name in call.tensors if name}
        kinds = tuple(sorted(k for name in names if (k := describe(name)) is not None))
        self.expected = tuple(call.schedule.identity for call in calls)
        bases = [0]
        for call in calls:
            bases.append(bases[-1] + len(call.schedule.slots))
        self.base, self.length = tuple(bases[:-1]), bases[-1]
        return Step(calls, time.perf_counter_ns(), kinds, reachable)
