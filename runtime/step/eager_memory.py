"""Memory that user code takes between two programs. No slot counts this memory. Examples are (1) the logits
and softmax of a loss that is not compiled, and (2) the temporaries of an optimizer.

    a program returns          the device's peak is reset
    user code runs
    the next program begins    the peak's growth, less the ledger's growth, is the call's `outside` bytes

The engine measures the `outside` bytes of each call in measured steps, and keeps their number with the
expectation of the step. In later steps the call's last slot makes as many bytes free. A plan counts these
bytes at that slot. User code may still hold some bytes when the next program begins. Such bytes are in
reserve while the program runs. An example is a graph break, where eager autograd saves tensors between two
graphs. Bytes that cannot be made free are an overrun, never an error.

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

# A smaller measurement is noise, because the system counts pages in batches per core, and because Python's
# heap grows. For eager losses and optimizers, measured peaks were compared with an allocator that counts
# every byte. The two differed by up to 0.25 MiB.
NOISE_BYTES = 2**20


class EagerStretch(NamedTuple):
    """The counts of the device and of the ledger at the moment when user code began to run after this
    call."""

    call: int
    kind: str
    used_bytes: int  # bytes in use on the device
    known_bytes: int  # resident bytes in the ledger
    counted_bytes: int  # part of known_bytes that the device also counts
    made_count: int  # number of programs made up to this moment


class EagerMemory:
    """The measurement of user code's memory, and the room that user code gets."""

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
        self.keep = keep  # returns True for records that are resident whenever user code runs
        self.stretch: EagerStretch | None = None
        # Bytes of gradients that eager code made in this stretch, and that the ledger counts now.
        self.taken_bytes = 0
        self.first = (0, -1)  # at the step's begin: bytes outside of the ledger, number of programs
        self.off = False  # True: the system reports no used bytes

    def make_room_for_eager(self, live_bytes: int, tick: int | None) -> None:
        """Make as many bytes free as user code took after this call in the last measured step."""
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
        """Record that the ledger now counts a tensor that user code made."""
        self.taken_bytes += size_bytes

    def begin_user_code_measure(self) -> None:
        """Begin to measure after a program has returned, or when an optimizer steps. A running measurement
        continues."""
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
        """Reserve the bytes that user code has kept since the step began. The reservation holds while the
        next program runs."""
        tracker, number = self.tracker, self.tracker.number
        counts = not self.device.sees_pages  # True: a measurement is cheap, and right at any time
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
        """Return the used bytes that the ledger does not count, or 0 if the system reports no used bytes."""
        try:
            used = 0 if self.off else self.device.used_bytes()
        except OSError:
            self.off, used = True, 0
        self.residency.forget_dead_records()
        return max(0, used - self.residency.mover.device_counted_bytes)

    def end_user_code_measure(self) -> None:
        """End the measurement, because the next program begins."""
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
        if residency.elastic:  # the next step evicts other records before user code runs
            known = min(known, residency.fixed_bytes + self._required_resident_bytes())
        short = known + outside + residency.reserve_bytes - residency.budget_bytes
        if outside and short > 0:
            self.residency.report_overrun(short, f"after call {stretch.call}, {stretch.kind}")

    def _required_resident_bytes(self) -> int:
        """Return the number of bytes of records that are resident whenever user code runs."""
        return sum(record.size_bytes for record in self.residency.reachable.values() if self.keep(record))

    def _is_repeatable(self, stretch: EagerStretch) -> bool:
        """Return whether the measured bytes are user code's bytes and will recur in the next step."""
        if stretch.made_count != Program.made_count or (
            stretch.kind == "optimizer" and not self.tracker.known
        ):
            return False
        # If fetches are in flight, their bytes count as user code's bytes. For a call that was never
        # measured, such a measurement is still better than none.
        return self._has_no_fetch_in_flight() or self._is_unmeasured_call(self.tracker.expected.outside)

    def _is_unmeasured_call(self, known: Mapping[int, int]) -> bool:
        """Return whether the step is known, but user code's memory after this call was never measured.

        This is the case if the step follows a plan of an earlier run. Then the only step so far compiled its
        programs, and its memory was not measured. On a device that counts pages, return False, because a
        measurement now would be wrong.
        """
        tracker = self.tracker
        return tracker.base is not None and not self.device.sees_pages and tracker.at - 1 not in known

    def _has_no_fetch_in_flight(self) -> bool:
        """Return whether no fetch is in flight.

        A fetch in flight would falsify a measurement. The ledger counts all bytes of a fetch when the fetch
        begins, but the system counts the pages one by one.
        """
        return not any(record.state is State.FETCHING for record in self.residency.records.values())
