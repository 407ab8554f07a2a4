"""Fetches of tensors that user code will touch between two programs. A touch is a use by user code. Examples
are gradients that user code adds up or clips.

    after call 3     touched in the last step      g0 g1 g2 g3 g4 ...
                     touched in this step          g0 g1 |
                     fetches in flight                   g2 g3
                     evictions in flight                 tensors with the furthest next uses

The engine expects that user code touches tensors in the same order as in the last step. The engine evicts the
tensors whose next use is furthest. For this choice, a touch counts like a use by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from teraio import switches
from teraio.errors import StoreError

from ..ledger.record import Record, State
from ..ledger.residency import Residency
from .tracker import StepTracker

AHEAD_PARTS = 8  # such fetches in flight take at most 1/8 of the budget
AHEAD_MAX_BYTES = 64 * 2**20
LOST_AFTER = 64  # a touch is searched among this many of the next expected touches


class Prefetch:
    """Fetches of tensors in the order in which user code touched the tensors in the last step."""

    def __init__(self, residency: Residency, tracker: StepTracker, keep: Callable[[Record], bool]) -> None:
        self.residency = residency
        self.tracker = tracker
        self.keep = keep
        self.call = -1  # number of the expected step's call after which user code runs
        self.at = 0  # number of expected touches that user code has made
        self.is_off = "prefetch" in switches.disabled_features()

    @property
    def limit_bytes(self) -> int:
        """Return the largest number of bytes that may be in flight together for such fetches."""
        return min(self.residency.budget_bytes // AHEAD_PARTS, AHEAD_MAX_BYTES)

    def note_touch(self, record: Record) -> None:
        """Record that user code touches the tensor of this record. Search the touch among the next touches of
        the last step, and expect the touches after it."""
        self.tracker.note_touch(record.name)
        order = self._expected_touches()
        end = min(self.at + LOST_AFTER, len(order))
        for at in range(self.at, end):
            if order[at] == record.name:
                self.at = at + 1
                return

    def _expected_touches(self) -> tuple[str, ...]:
        """Return the names of the tensors that user code is expected to touch now.

        After the n-th call of a step, they are the tensors that user code touched after the n-th call of the
        last step.
        """
        tracker = self.tracker
        call = tracker.at - 1 if tracker.base is not None else -1
        if call != self.call:
            self.call, self.at = call, 0
        return tracker.expected.touched.get(call, ()) if call >= 0 else ()

    def current_tick(self) -> float | None:
        """Return the place of user code in the step, as a number between two ticks. Return None if no touch
        is expected."""
        order = self._expected_touches()
        return self.tracker.expected.touch_tick(self.call, self.at - 1) if order else None

    def fetch_ahead(self) -> None:
        """Begin to fetch the tensors that user code is expected to touch next, as long as there is room. If
        there is no room for some of them, begin evictions that make room.

        In a measured step, fetch nothing ahead, because the fetches would count as memory that user code
        takes.
        """
        order = self._expected_touches()
        if self.is_off or self.at >= len(order) or self.tracker.running is not None:
            return
        self.residency.pending_evictions.end_evictions_already_written()
        besides = self.tracker.expected.outside.get(self.call, 0)
        limit_bytes, in_flight_bytes, short = self.limit_bytes, 0, 0
        for name in order[self.at : self.at + LOST_AFTER]:
            record = self.residency.by_name.get(name)
            if record is None or record.state not in {State.EVICTED, State.FETCHING} or record.is_dead():
                continue
            if record.is_discarded:
                continue
            in_flight_bytes += record.size_bytes
            if in_flight_bytes > limit_bytes:
                break
            if record.state is State.FETCHING:
                continue
            if short or self.residency.short_bytes(record.size_bytes + besides) > 0:
                # To keep the order, a later tensor is not fetched before this tensor, even if it would fit.
                short += record.size_bytes
            elif not self._try_fetch_ahead(record):
                return
        if short:
            self._begin_evictions_for_room(short + besides)

    def _try_fetch_ahead(self, record: Record) -> bool:
        """Begin to fetch this record ahead of its use, and count the fetch. Return whether the fetch has
        begun."""
        try:
            begun = self.residency.fetch_ahead_if_memory(record)
        except StoreError:  # the operator that reads the tensor will raise this error
            return False
        self.residency.mover.counts.add(ahead=begun)
        return begun

    def _begin_evictions_for_room(self, wanted_bytes: int) -> None:
        """Begin to evict tensors until there is room for `wanted_bytes`. Evict only tensors that are used
        later than the expected touches of user code."""
        short = self.residency.short_bytes(wanted_bytes) - self.residency.pending_evictions.size_bytes
        if short <= 0:
            return
        expected, ahead = self.tracker.expected, self.at + LOST_AFTER
        now = expected.touch_tick(self.call, self.at - 1)
        horizon = expected.touch_tick(self.call, min(ahead, len(expected.touched[self.call])))
        counted = self.residency.pending_evictions.records
        for record in self.residency.victims(short, now, lambda r: self.keep(r) or r.key in counted):
            later = self.residency.next_use(record, now) > (1, horizon)
            if record.state is not State.RESIDENT or not later:
                continue
            if self.residency.try_evict(record):
                self.residency.pending_evictions.add(record)
