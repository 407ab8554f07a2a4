"""The uses of tensors that the engine expects, for the choice of the records to evict."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from math import inf

from .record import Record


class ExpectedUses:
    """The uses of each tensor in the expected step, which is like an earlier step."""

    def __init__(self) -> None:
        # Name of a tensor -> ticks at which the expected step uses the tensor, ascending.
        self.uses: Mapping[str, Sequence[float]] = {}
        self.step_ticks = 0  # number of ticks of the expected step
        # Names of gradients that the next step reads before it makes new ones, because its updates are late.
        self.around: Collection[str] = ()

    def expect(
        self, uses: Mapping[str, Sequence[float]], step_ticks: int, around: Collection[str] = ()
    ) -> None:
        """Expect these uses from now on. They give, by tensor name, ticks of the step.

        `around` has the names of gradients that live around the end of the step.
        """
        self.uses, self.step_ticks, self.around = uses, step_ticks, around

    def next_use(self, record: Record, tick: float | None) -> tuple[int, float]:
        """Return a sort key. Records with larger keys are evicted first.

        There are three groups of records, from the smallest keys to the largest:

            next use not known               the most recently used record has the smallest key
            next use known from last step    an earlier next use has a smaller key
            gradients without a next use     this step does not read them again, and the next step makes new
                                             gradients
        """
        ticks = self.uses.get(record.name)
        if not ticks or tick is None:
            return (0, -record.used_at)
        at = bisect_right(ticks, tick)
        if at < len(ticks):
            return (1, ticks[at])
        is_spent = record.kind == "grad" and record.name not in self.around
        return (1, inf if is_spent else ticks[0] + self.step_ticks)
