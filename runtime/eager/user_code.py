"""Between two programs, and beside them, user code runs. What it reads is fetched when an operator begins
that reads it, in whatever thread; others leave to make room. What it needs beyond the budget it gets, and
that is said.

    an operator begins    `fetch_for_reader`: the observer saw that arguments of it are evicted
    a program ends        `prepare_for_user_code`, `resume_user_code`: room for what user code takes besides
    the step ends         whoever asked for an address is taken to have forgotten it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import torch

from teraio import switches
from teraio.errors import EvictedError, StoreError, TeraioError
from teraio.units import fmt_bytes

from ..device.device import Device
from ..ledger.engine_lock import EngineLock
from ..ledger.known_tensors import KnownTensors
from ..ledger.mover import Mover
from ..ledger.record import Record, State
from ..ledger.residency import Residency
from ..ledger.restore import make_records_resident
from ..step.eager_memory import EagerMemory
from ..step.prefetch import Prefetch
from ..step.tracker import StepTracker
from ..torch_extension.observer import InUseError

log = logging.getLogger("teraio")


class UserCode:
    def __init__(
        self, residency: Residency, mover: Mover, device: Device, tracker: StepTracker, lock: EngineLock
    ) -> None:
        self.residency = residency
        self.mover = mover
        self.lock = lock
        self.observer = device.observer
        self.known_tensors = KnownTensors()
        self.eager_memory = EagerMemory(
            residency, device, tracker, self.report_overrun, self.must_be_resident
        )
        self.prefetch = Prefetch(residency, mover, tracker, self.must_be_resident)
        self.weights_stay = False  # something reads them that nobody sees: whenever user code runs
        self.saved_stays = False  # and what forwards saved
        self.before_fetch: Callable[[], None] = lambda: None  # what runs may have to know of it
        self.lends = False  # an optimizer's update has some
        self.refuses: Callable[[str, Sequence[str] | None], None] | None = None  # nothing can move now
        self.handed_out: dict[int, Record] = {}  # by key: results of which a program may take up some
        self.results_stay = "results" in switches.disabled_features()
        self.kept: set[tuple[int, str]] = set()  # in this step: (call, tensor) that stayed when it ended

    def must_be_resident(self, record: Record) -> bool:
        """Whether it is resident whenever user code runs. Optimizer states are no one's but the optimizer's,
        whatever else runs."""
        return self.weights_stay and record.kind != "state"

    def records_required_after_call(self, call: int) -> list[Record]:
        """User code runs after this call: what is resident then, over the budget if it must be."""
        self.residency.forget_dead_records()
        found = (
            [r for r in self._reachable_records() if self.must_be_resident(r)] if self.weights_stay else []
        )
        self.kept.update((call, record.name) for record in found)
        return found

    def _reachable_records(self) -> Iterable[Record]:
        if not self.saved_stays:
            return self.residency.reachable.values()
        return [record for record in self.residency.records.values() if record.evictable]

    def prepare_for_user_code(self, staying: Sequence[Record], live_bytes: int, tick: int | None) -> None:
        """At the last slot of a program: brings what stays, and makes room for what user code will take
        beside it."""
        self.residency.pending_evictions.end_evictions_until_enough(
            lambda: False, by_plan=True
        )  # what comes next asks for no room
        if staying:
            self.make_resident_for_user(staying, live_bytes, "what it holds of")
            mark_maybe_written(staying)
        self.eager_memory.make_room_for_eager(live_bytes, tick)

    def keep_weights(self, why: str, saved: bool = False) -> None:
        """From now on all weights are resident whenever user code runs; what forwards saved, too, if that is
        read."""
        if self.weights_stay and self.saved_stays >= saved:
            return
        log.warning("teraio: %s unseen: between programs all of them are in memory", why)
        self.saved_stays |= saved
        self.weights_stay = True
        make_records_resident(self.residency, self._reachable_records())

    def resume_after_exception(self, call: int) -> None:
        """Let user code run after a call that an exception ended, anywhere in it."""
        staying = self.records_required_after_call(call)
        try:
            make_records_resident(self.residency, staying)
            mark_maybe_written(staying)
        finally:
            self.resume_user_code()

    def suspend_touches(self) -> None:
        """Begin a stretch in which nothing that this thread uses is a touch of user code's."""
        if self.refuses is not None:
            self.refuses("a program of teraio's", None)
        if self.observer is not None:
            with self.lock:
                self.note_touches()
            self.observer.change_program_depth(1)

    def resume_touches(self) -> None:
        if self.observer is not None:
            self.observer.change_program_depth(-1)

    def resume_user_code(self) -> None:
        """A program has returned: user code runs."""
        self.residency.serial += 1
        if self.observer is not None:
            self.observer.rearm_address_watch()
        self.eager_memory.begin_user_code_measure()
        self.prefetch.fetch_ahead()

    # ---- reads

    def fetch_for_reader(self, keys: Sequence[int], place: str) -> None:
        """Make these storages resident for who is about to read them, in any thread. Others are evicted for
        them, but nothing that an operator uses."""
        if self.refuses is not None:
            self.refuses(place, [record.name for record in self.residency.records_of_storages(keys)])
        if self.lock.is_held_by_this_thread:
            self.fetch_without_evicting(keys, place)
            return
        with self.lock:
            self.before_fetch()
            assert self.observer is not None
            known = self.residency.records_of_storages
            used = known(self.observer.storage_keys_in_use())
            self.note_touches()
            with pin_during_block(used):
                self.make_resident_for_user(known(keys), 0, place)

    def note_failed_fetch(self, error: BaseException) -> None:
        """Someone found NaN for what could not be fetched: no further step is taken."""
        log.warning("teraio: memory was read whose bytes could not be fetched, and NaN was found: %s", error)
        if not isinstance(error, TeraioError):
            error = StoreError(str(error))
        self.residency.torn = self.residency.torn or error

    def fetch_without_evicting(self, keys: Sequence[int], place: str) -> None:
        """Make these storages resident in the middle of the engine's own work, where a finalizer reads them.
        Nothing is evicted for them."""
        for record in self.residency.records_of_storages(keys):
            if record is self.mover.moving:
                continue
            if record.state is State.AWAY:
                self.mover.begin_fetch(record, demand=True)
            if record.state is State.ARRIVING:
                self.mover.end_fetch(record)
        if (short := self.residency.short_bytes(0)) > 0:
            self.report_overrun(short, place)

    def note_touches(self) -> None:
        """Note in which order user code has touched tensors since this was last asked."""
        if self.observer is not None:
            for record in self.residency.records_of_storages(self.observer.newly_touched_storage_keys()):
                self.prefetch.note_touch(record)

    def make_resident_for_user(self, records: Sequence[Record], live_bytes: int, place: str) -> None:
        """Make these records resident for user code, over the budget if it must be."""
        self.mover.device.join_user_streams()  # perhaps on a stream of its own, and nothing has to move
        with pin_during_block(records):
            if any(record.state in {State.AWAY, State.ARRIVING} for record in records):
                self.mover.counts.touches += 1
                missing = sum(record.size_bytes for record in records if record.state is State.AWAY)
                try:
                    self._evict_for_user(missing + live_bytes, f"{place} {records[0].name}")
                    self.residency.fetch(records, self.must_be_resident)
                except StoreError as error:
                    _raise_evicted_error(records, place, error)
            self.prefetch.fetch_ahead()

    def _evict_for_user(self, missing_bytes: int, place: str) -> None:
        """Evict until so many bytes fit, and what user code is still expected to take beside them."""
        to_come = self.eager_memory.bytes_still_expected()
        short, _ = self.residency.evict_until_fits(
            missing_bytes + to_come, self.prefetch.current_tick(), self.must_be_resident
        )
        if short > to_come:
            self.report_overrun(short - to_come, place)

    @contextmanager
    def hold_resident(self, records: Sequence[Record], place: str) -> Iterator[None]:
        """These are in memory as long as the block runs."""
        with ExitStack() as held:
            with self.lock:
                self.make_resident_for_user(records, 0, place)
                held.enter_context(pin_during_block(records))
            yield

    def keep_exported_resident(self, key: int) -> None:
        """Others have the address of this storage's bytes."""
        because = "DLPack gave its address to others"
        for record in self.residency.records_of_storages([key]):
            if record.evictable:
                log.warning("teraio: %s stays in memory from now on: %s", record.name, because)
            self.residency.forbid_eviction_for_good(record, because)

    # ---- results

    def hand_out_result(self, record: Record) -> None:
        """Let user code have what a program returns: it stays, until a program takes it as an argument. Who
        takes its address is seen from now on."""
        self.residency.forbid_eviction(record)
        storage = record.storage()
        if self.observer is None or storage is None or record.addressed or self.results_stay:
            return
        self.mover.is_clean(record)  # before what is known of writes is forgotten
        with suppress(InUseError):
            self.observer.watch_for_writes(storage)
            record.handed_out = True
            self.handed_out[record.key] = record

    def reclaim_result(self, record: Record) -> bool:
        """Have a result that is a program's argument move again, if nobody has its address. Return whether it
        does."""
        if self.mover.is_address_taken(record):
            return False
        self.residency.allow_eviction(record)
        return True

    def _forbid_evicting_addressed_results(self) -> None:
        """Results whose address someone has stay from now on: unlike weights they may be kept for long."""
        known, results = self.residency.records, self.handed_out
        self.handed_out = {key: record for key, record in results.items() if known.get(key) is record}
        for record in self.handed_out.values():
            if self.mover.is_address_taken(record):
                self.residency.forbid_eviction(record)
                record.handed_out = False

    # ---- updates

    def begin_optimizer_update(self, tensors: Sequence[torch.Tensor]) -> None:
        """To an optimizer's update: they are resident, and what it does with them is no touch of user code's,
        until they are taken back."""
        self.end_optimizer_update()
        self.known_tensors.pin_for_update(tensors)
        self.lends = True
        if self.observer is not None:
            self.observer.change_program_depth(1)

    def end_optimizer_update(self) -> None:
        if self.lends and self.observer is not None:
            self.observer.change_program_depth(-1)
        self.lends = False
        self.known_tensors.unpin_after_update()

    def report_overrun(self, short: int, place: str, who: str = "user code") -> None:
        if self.residency.elastic:
            self.residency.budget_bytes += short
            return
        counts = self.mover.counts
        if short > 2 * counts.overrun_bytes:  # not a line per tensor
            log.warning(
                "teraio: overrun: %s (%s) needs %s more than the memory of %s; it gets it",
                who,
                place,
                fmt_bytes(short, up=True),
                fmt_bytes(self.residency.budget_bytes),
            )
        counts.overrun_bytes = max(counts.overrun_bytes, short)
        counts.step_overrun_bytes = max(counts.step_overrun_bytes, short)
        if self.mover.recorder is not None:
            self.mover.recorder.note_overrun(short)

    def end_step(self) -> frozenset[tuple[int, str]]:
        """Return what stayed in the step. An address that was asked for is taken to be forgotten."""
        if self.observer is not None:
            self._forbid_evicting_addressed_results()
            self.observer.forget_taken_addresses()
        kept = frozenset(self.kept)
        self.kept.clear()
        return kept


def _raise_evicted_error(records: Sequence[Record], place: str, error: StoreError) -> NoReturn:
    names = ", ".join(record.name for record in records)
    raise EvictedError(
        f"user code ({place}) needs {names}, which was evicted and could not be read back: {error}. "
        f"`with teraio.resident(...)` keeps what it is given in memory; load the last checkpoint "
        f"if it stays so"
    ) from error


def mark_maybe_written(records: Iterable[Record]) -> None:
    """User code may write into these unseen. They are here, and what was under way is over: that the copy is
    good after a write that was undone says nothing of what comes."""
    for record in records:
        record.clean = False


@contextmanager
def pin_during_block(records: Sequence[Record]) -> Iterator[None]:
    """None of these leaves as long as the block runs."""
    for record in records:
        record.pins += 1
    try:
        yield
    finally:
        for record in records:
            record.pins -= 1
