"""What user code touches between two programs arrives ahead, if the last step touched it in the same order:
gradients that are added up, clipped, scaled.

    after call 3     touched in the last step      g0 g1 g2 g3 g4 ...
                     this step                     g0 g1 |
                     on their way                        g2 g3
                     leave meanwhile                     what is used furthest from now

A touch lies between two ticks of the step, and as such it counts for what is used next.
"""

from __future__ import annotations

from collections.abc import Callable

from teraio import switches
from teraio.errors import StoreError

from ..ledger.mover import Mover
from ..ledger.record import Record, State
from ..ledger.residency import Residency
from .tracker import StepTracker

AHEAD_PARTS = 8  # of the budget, what may be on its way
AHEAD_MAX_BYTES = 64 * 2**20
TOUCHES_MAX = 2**16  # after one call: what is kept of them must end
LOST_AFTER = 64  # touches: one that is further on in the last step's order is taken for another one


class Prefetch:
    def __init__(
        self, residency: Residency, mover: Mover, tracker: StepTracker, stays: Callable[[Record], bool]
    ) -> None:
        self.residency = residency
        self.mover = mover
        self.tracker = tracker
        self.stays = stays
        self.call = -1  # of the expected step, after which user code runs
        self.at = 0  # how many of its touches have been seen
        self.is_off = "prefetch" in switches.disabled_features()

    @property
    def limit_bytes(self) -> int:
        """So much may be on its way."""
        return min(self.residency.budget_bytes // AHEAD_PARTS, AHEAD_MAX_BYTES)

    def note_touch(self, record: Record) -> None:
        """User code touches this: where is it in the order of the last step?"""
        tracker = self.tracker
        seen = tracker.touched.setdefault(tracker.number, [])
        if len(seen) < TOUCHES_MAX:
            seen.append(record.name)
        order = self._expected_touches()
        end = min(self.at + LOST_AFTER, len(order))
        for at in range(self.at, end):
            if order[at] == record.name:
                self.at = at + 1
                return

    def _expected_touches(self) -> tuple[str, ...]:
        """What the last step touched after the call that has just run; after another call it begins anew."""
        tracker = self.tracker
        call = tracker.at - 1 if tracker.base is not None else -1
        if call != self.call:
            self.call, self.at = call, 0
        return tracker.expected.touched.get(call, ()) if call >= 0 else ()

    def current_tick(self) -> float | None:
        """Between which ticks this is; None where the step does not follow one that is known."""
        order = self._expected_touches()
        return self.tracker.expected.touch_tick(self.call, self.at - 1) if order else None

    def fetch_ahead(self) -> None:
        """Starts what comes next, as far as there is room; makes room for more without waiting for it. Not
        while the step is measured: what user code takes besides would not be told from what arrives."""
        order = self._expected_touches()
        if self.is_off or self.at >= len(order) or self.tracker.running is not None:
            return
        self.residency.pending_evictions.end_evictions_already_written()
        besides = self.tracker.expected.outside.get(self.call, 0)
        limit_bytes, on_their_way, short = self.limit_bytes, 0, 0
        for name in order[self.at : self.at + LOST_AFTER]:
            record = self.residency.by_name.get(name)
            if record is None or record.state not in {State.AWAY, State.ARRIVING} or record.is_dead():
                continue
            on_their_way += record.size_bytes
            if on_their_way > limit_bytes:
                break
            if record.state is State.ARRIVING:
                continue
            if short or self.residency.short_bytes(record.size_bytes + besides) > 0:
                short += record.size_bytes  # in order: a later, smaller one does not go first
            elif not self._try_fetch_ahead(record):
                return
        if short:
            self._begin_evictions_for_room(short + besides)

    def _try_fetch_ahead(self, record: Record) -> bool:
        try:
            begun = self.residency.shortage.begin_fetch_if_memory(record)
        except StoreError:  # said when it is needed
            return False
        self.mover.counts.ahead += begun
        return begun

    def _begin_evictions_for_room(self, wanted_bytes: int) -> None:
        """Starts writes of what is used later than that which is to come."""
        short = self.residency.short_bytes(wanted_bytes) - self.residency.pending_evictions.size_bytes
        if short <= 0:
            return
        expected, ahead = self.tracker.expected, self.at + LOST_AFTER
        now = expected.touch_tick(self.call, self.at - 1)
        horizon = expected.touch_tick(self.call, min(ahead, len(expected.touched[self.call])))
        counted = self.residency.pending_evictions.records
        for record in self.residency.victims(short, now, lambda r: self.stays(r) or r.key in counted):
            later = self.residency.next_use(record, now) > (1, horizon)
            if record.state is not State.DEVICE or not later:
                continue
            try:
                self.residency.begin_evict_if_resizable(record)
            except StoreError as error:
                self.residency.note_failed_eviction(record, error)
            if record.state is State.LEAVING:
                self.residency.pending_evictions.add(record)
