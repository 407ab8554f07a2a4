"""What user code takes between two programs, and no slot sees: logits and softmax of a loss that is not
compiled, temporaries of an optimizer.

    a program returns      the peak of the device begins anew
    user code runs
    the next one begins    what the peak has grown by, less what the ledger knows of, is the call's outside
                           bytes: looked at in measured steps, kept with what is expected of the step

From then on so many bytes are made free at the call's last slot, before user code runs, and a plan counts
them there. What user code keeps when the next program begins, as what eager autograd saves between two broken
graphs, is in reserve while that program runs. They never make an error: what cannot be made free is an
overrun, and is said. A stretch in which something was compiled, and the first step's optimizers, which make
their states, show nothing that comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..device.device import Device
from ..ledger.record import Record, State
from ..ledger.residency import Residency
from .program import Program
from .tracker import StepTracker

# Below this it is noise: the system counts pages in batches per core, Python's heap grows. Against an
# allocator that counted every byte, the peaks of eager losses and optimizers were off by up to 0.25 MiB.
NOISE_BYTES = 2**20


class EagerStretch(NamedTuple):
    """User code runs, after this call."""

    call: int
    kind: str
    used_bytes: int  # of the device when it began
    known_bytes: int  # in the ledger
    counted_bytes: int  # of these, what the device counts, too
    made_count: int  # programs that there were


class EagerMemory:
    def __init__(
        self,
        residency: Residency,
        device: Device,
        tracker: StepTracker,
        overrun: Callable[[int, str], None],
        stays: Callable[[Record], bool],
    ) -> None:
        self.residency = residency
        self.device = device
        self.tracker = tracker
        self.overrun = overrun
        self.stays = stays  # whenever user code runs
        residency.overrun = overrun
        self.stretch: EagerStretch | None = None
        self.taken_bytes = 0  # in this stretch, and in the ledger by now: gradients that eager code made
        self.first = (0, -1)  # as this step began: bytes that the ledger does not know, programs
        self.off = False  # the system does not say

    def make_room_for_eager(self, live_bytes: int, tick: int | None) -> None:
        """Before user code runs: makes free what it took after this call the last time."""
        self.taken_bytes = 0
        wanted = self.bytes_still_expected()
        if wanted:
            short, _ = self.residency.evict_until_fits(live_bytes + wanted, tick, self.stays)
            if short > 0:
                self.overrun(short, f"after call {self.tracker.number}")

    def bytes_still_expected(self) -> int:
        """What user code takes before the next program begins, as far as it is not in the ledger by now."""
        tracker = self.tracker
        wanted = tracker.expected.outside.get(tracker.at - 1, 0) if tracker.base is not None else 0
        return max(0, wanted - self.taken_bytes)

    def note_bytes_entering_ledger(self, size_bytes: int) -> None:
        """User code has made something that the ledger counts from now on."""
        self.taken_bytes += size_bytes

    def begin_user_code_measure(self) -> None:
        """A program has returned, or an optimizer steps. When that is done, its own stretch goes on."""
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
        """A program has begun: what has been kept since the step began, and is no one's, is there while it
        runs."""
        tracker, number = self.tracker, self.tracker.number
        counts = not self.device.sees_pages  # then a look is cheap, and right at any time
        looks = tracker.running or (counts and number == 0) or self._is_unmeasured_call(tracker.expected.kept)
        if looks and (counts or self._has_no_fetch_in_flight()):
            unknown = self._unknown_bytes()
            if number == 0:
                self.first = unknown, Program.made_count
            elif self.first[1] == Program.made_count:
                kept = unknown - self.first[0]
                tracker.kept[number] = kept if kept >= NOISE_BYTES else 0
        expected = tracker.expected.kept.get(tracker.at - 1, 0) if tracker.base is not None else 0
        self.residency.reserve_for_user_code(tracker.kept.get(number, expected))

    def _unknown_bytes(self) -> int:
        try:
            used = 0 if self.off else self.device.used_bytes()
        except OSError:
            self.off, used = True, 0
        self.residency.forget_dead_records()
        return max(0, used - self.residency.mover.device_counted_bytes)

    def end_user_code_measure(self) -> None:
        """The next program begins."""
        stretch, self.stretch = self.stretch, None
        self.residency.reserve_for_user_code(0)
        if stretch is None or not self._is_repeatable(stretch):
            return
        residency = self.residency
        grown = self.device.peak_bytes() - stretch.used_bytes
        grown -= max(0, residency.mover.device_counted_bytes - stretch.counted_bytes - self.taken_bytes)
        outside = grown if grown >= NOISE_BYTES else 0
        self.tracker.outside[stretch.call] = outside
        known = stretch.known_bytes
        if residency.elastic:  # the next step evicts the others before user code runs
            known = min(known, residency.fixed_bytes + self._required_resident_bytes())
        short = known + outside + residency.reserve_bytes - residency.budget_bytes
        if outside and short > 0:
            self.overrun(short, f"after call {stretch.call}, {stretch.kind}")

    def _required_resident_bytes(self) -> int:
        return sum(record.size_bytes for record in self.residency.reachable.values() if self.stays(record))

    def _is_repeatable(self, stretch: EagerStretch) -> bool:
        """What was seen is user code, and of the next step too."""
        if stretch.made_count != Program.made_count or (
            stretch.kind == "optimizer" and not self.tracker.known
        ):
            return False
        # What came and went meanwhile would count as user code's: better than to know nothing of it.
        return self._has_no_fetch_in_flight() or self._is_unmeasured_call(self.tracker.expected.outside)

    def _is_unmeasured_call(self, known: Mapping[int, int]) -> bool:
        """The step is one that is known, but for this: so it is when the plan of an earlier run is followed,
        and it was first seen when programs were compiled. Where pages are counted there is no telling."""
        tracker = self.tracker
        return tracker.base is not None and not self.device.sees_pages and tracker.at - 1 not in known

    def _has_no_fetch_in_flight(self) -> bool:
        """What arrives is in the ledger. Where the system counts pages, they are not all there yet."""
        return not any(record.state is State.ARRIVING for record in self.residency.records.values())
