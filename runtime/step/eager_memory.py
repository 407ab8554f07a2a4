"""Memory that user code takes between two programs, and that no program's schedule counts. Examples are (1)
the logits and softmax of a loss that is not compiled, and (2) the temporaries of an optimizer.

    a program returns          the device's peak is reset
    user code runs
    the next program begins    growth of the device's peak, minus growth of the known tensors' bytes, is the
                               number of `outside` bytes

A call is one run of a program. In measured steps, the engine measures the `outside` bytes after each call. In
later steps, the last slot of the same call makes this number of bytes free. A plan counts these bytes at that
slot.

User code may still hold some of the bytes when the next program begins. For example, after a graph break,
eager autograd holds tensors that it saved. The held bytes are in reserve while the program runs. If bytes
cannot be made free, a warning reports them as an overrun. This is never an error.

A stretch is the time from one program to the next. A stretch in which programs were compiled is not measured,
because its bytes do not recur. The first step of an optimizer is not measured either, because it makes the
states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..device.device import Device
from ..ledger.record import Record, State
from ..ledger.residency import Residency
from .program import Program
from .tracker import StepTracker

# Smaller measurements count as noise. The noise has two causes. (1) The system counts pages in batches per
# core. (2) Python's heap grows. For eager losses and optimizers, the measured peaks were compared with the
# counts of an allocator that counts every byte. The difference was up to 0.25 MiB.
NOISE_BYTES = 2**20


class EagerStretch(NamedTuple):
    """The begin of a stretch, which is the time from one program to the next. User code runs in a stretch.
    The fields have the counts of the device and of the engine at this moment."""

    call: int
    kind: str
    used_bytes: int  # bytes in use on the device
    known_bytes: int  # bytes of resident tensors that the engine knows
    counted_bytes: int  # part of `known_bytes` that the device also counts
    made_count: int  # number of programs that existed at this moment


class EagerMemory:
    """The measurement of the memory that user code takes between programs. Also the evictions that make room
    for this memory."""

    def __init__(
        self,
        residency: Residency,
        device: Device,
        tracker: StepTracker,
        keep: Callable[[Record], bool],
    ) -> None:
        self.residency = residency
        self.device = device
        self.tracker = tracker
        self.keep = keep  # returns True for tensors that must be resident while user code runs
        self.stretch: EagerStretch | None = None
        # Bytes of gradients that eager code made in this stretch, and that now belong to known tensors.
        self.taken_bytes = 0
        self.first = (0, -1)  # At the step's begin: (used bytes of no known tensor, number of programs).
        self.off = False  # True: the system reports no used bytes

    def make_room_for_eager(self, live_bytes: int, tick: int | None) -> None:
        """Make as many bytes free as user code took after this call in the last measured step. `live_bytes`
        are in use in addition to the bytes of known tensors."""
        self.taken_bytes = 0
        wanted = self.bytes_still_expected()
        if wanted:
            short, _ = self.residency.evict_until_fits(live_bytes + wanted, tick, self.keep)
            if short > 0:
                self.residency.report_overrun(short, f"after call {self.tracker.number}")

    def bytes_still_expected(self) -> int:
        """Return the number of bytes that user code is still expected to take before the next program
        begins."""
        tracker = self.tracker
        wanted = tracker.expected.outside.get(tracker.at - 1, 0) if tracker.base is not None else 0
        return max(0, wanted - self.taken_bytes)

    def note_bytes_entering_ledger(self, size_bytes: int) -> None:
        """Record that the engine now knows a tensor that user code made. The tensor's bytes no longer count
        as memory of user code."""
        self.taken_bytes += size_bytes

    def begin_user_code_measure(self) -> None:
        """Begin to measure the memory of user code, if this step is measured. The engine calls this method
        after a program has returned, and when an optimizer steps. If a measurement already runs, continue
        it."""
        tracker = self.tracker
        if self.off or not (tracker.running or self._is_unmeasured_call(tracker.expected.outside)):
            self.stretch = None
        elif self.stretch is None:
            kind = tracker.programs[-1].schedule.kind
            try:
                self.device.reset_peak()
                used = self.device.used_bytes()
            except OSError:
                self.off = True
                return
            self.residency.forget_dead_records()
            mover = self.residency.mover
            known, counted = mover.resident_bytes, mover.device_counted_bytes
            self.stretch = EagerStretch(tracker.number, kind, used, known, counted, Program.made_count)

    def reserve_kept_bytes(self) -> None:
        """Reserve the number of bytes that user code has kept since the step began. They are in reserve while
        the next program runs."""
        tracker, number = self.tracker, self.tracker.number
        counts = not self.device.sees_pages  # True: this device can be measured at any time
        looks = tracker.running or (counts and number == 0) or self._is_unmeasured_call(tracker.expected.kept)
        if looks and (counts or self._has_no_fetch_in_flight()):
            unknown = self._unknown_bytes()
            if number == 0:
                self.first = unknown, Program.made_count
            elif self.first[1] == Program.made_count:
                kept = unknown - self.first[0]
                tracker.note_kept_bytes(number, kept if kept >= NOISE_BYTES else 0)
        expected = tracker.expected.kept.get(tracker.at - 1, 0) if tracker.base is not None else 0
        self.residency.reserve_for_user_code(tracker.kept.get(number, expected))

    def _unknown_bytes(self) -> int:
        """Return the number of the device's used bytes that belong to no known tensor. Return 0 if the system
        reports no used bytes."""
        try:
            self.residency.forget_dead_records()
            return 0 if self.off else max(0, self.residency.mover.uncounted_bytes)
        except OSError:
            self.off = True
            return 0

    def end_user_code_measure(self) -> None:
        """End the measurement of user code's memory, because the next program begins. If the measured bytes
        exceed the budget, report an overrun."""
        stretch, self.stretch = self.stretch, None
        self.residency.reserve_for_user_code(0)
        if stretch is None or not self._is_repeatable(stretch):
            return
        residency = self.residency
        grown = self.device.peak_bytes() - stretch.used_bytes
        grown -= max(0, residency.mover.device_counted_bytes - stretch.counted_bytes - self.taken_bytes)
        outside = grown if grown >= NOISE_BYTES else 0
        self.tracker.note_outside_bytes(stretch.call, outside)
        known = stretch.known_bytes
        if residency.elastic:  # the budget may grow, and the next step evicts more before user code runs
            known = min(known, residency.fixed_bytes + self._required_resident_bytes())
        short = known + outside + residency.reserve_bytes - residency.budget_bytes
        if outside and short > 0:
            self.residency.report_overrun(short, f"after call {stretch.call}, {stretch.kind}")

    def _required_resident_bytes(self) -> int:
        """Return the number of bytes of tensors that must be resident whenever user code runs."""
        return sum(record.size_bytes for record in self.residency.reachable.values() if self.keep(record))

    def _is_repeatable(self, stretch: EagerStretch) -> bool:
        """Return whether all measured bytes are user code's bytes, and will recur in the next step."""
        if stretch.made_count != Program.made_count or (
            stretch.kind == "optimizer" and not self.tracker.known
        ):
            return False
        # While fetches are in flight, the measurement also counts their bytes. For a call that was never
        # measured, even such a measurement is better than none.
        return self._has_no_fetch_in_flight() or self._is_unmeasured_call(self.tracker.expected.outside)

    def _is_unmeasured_call(self, known: Mapping[int, int]) -> bool:
        """Return whether the step is known, but the memory of user code after this call was never measured.
        `known` has the measured calls.

        This is so if the step follows a plan of an earlier run. The first step of this run compiled its
        programs, so its memory was not measured. On a device that counts memory by pages, return False,
        because a measurement in a later step would be wrong.
        """
        tracker = self.tracker
        return tracker.base is not None and not self.device.sees_pages and tracker.at - 1 not in known

    def _has_no_fetch_in_flight(self) -> bool:
        """Return whether no fetch is in flight.

        A measurement during a fetch would be wrong. The engine counts all bytes of a fetch when the fetch
        begins, but the system counts the pages one by one.
        """
        return not any(record.state is State.FETCHING for record in self.residency.records.values())
