"""User code: code that runs between programs, or at the same time on other threads. The engine fetches the
tensors that the operators of user code read.

    an operator begins    `fetch_for_reader`, if arguments of the operator are evicted
    a program ends        `prepare_for_user_code` and `resume_user_code`: they make room for the bytes that
                          user code will take
    the step ends         `end_step`: from then on, the engine assumes that user code has no address of a
                          tensor any more

To make room for a fetch, the thread of the operator evicts other tensors. Bytes that user code needs beyond
the budget are an overrun: user code gets these bytes, and a warning reports them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import torch

from teraio import switches
from teraio.errors import EvictedError, StoreError, TeraioError

from ..device.device import Device
from ..ledger.engine_lock import EngineLock
from ..ledger.known_tensors import KnownTensors
from ..ledger.record import Record, State, pin_during_block
from ..ledger.residency import Residency
from ..ledger.restore import make_records_resident
from ..step.eager_memory import EagerMemory
from ..step.prefetch import Prefetch
from ..step.tracker import StepTracker
from ..torch_extension.observer import InUseError

log = logging.getLogger("teraio")

Refuse = Callable[[str, Sequence[str] | None], None]  # arguments: place of a read, names of the read tensors


class UserCode:
    """The engine's work for user code.

    This object fetches tensors for operators. It keeps results of programs resident while user code has them.
    It keeps tensors resident during an optimizer's update.

    `before_fetch` is a function that registers all tensors of the running program. It is called before a
    fetch for an operator, because the list of tensors must be complete then.
    """

    def __init__(
        self,
        residency: Residency,
        device: Device,
        tracker: StepTracker,
        lock: EngineLock,
        before_fetch: Callable[[], None] = lambda: None,
    ) -> None:
        self.residency = residency
        self.mover = residency.mover
        self.lock = lock
        self.before_fetch = before_fetch
        self.observer = device.observer
        self.known_tensors = KnownTensors()
        self.eager_memory = EagerMemory(residency, device, tracker, self.must_be_resident)
        self.prefetch = Prefetch(residency, tracker, self.must_be_resident)
        # True: weights are resident whenever user code runs, because user code may read them without the
        # observer's notice.
        self.keeps_weights = False
        self.keeps_saved = False  # True: tensors saved for backward are also resident whenever user code runs
        self.lends = False  # True: an optimizer's update runs, and its tensors are kept resident
        self.refuse: Refuse | None = None  # a function that raises an error; set while no tensor may move
        self.handed_out: dict[int, Record] = {}  # storage key -> result that user code has
        self.keeps_results = "results" in switches.disabled_features()
        # Pairs (call, tensor) of this step: the tensor had to be resident for user code after the call.
        self.kept: set[tuple[int, str]] = set()

    def must_be_resident(self, record: Record) -> bool:
        """Return whether the record must be resident whenever user code runs. This is never so for a state,
        because only the optimizer reads states."""
        return self.keeps_weights and record.kind != "state"

    def records_required_after_call(self, call: int) -> list[Record]:
        """Return the records that must be resident when user code runs after this call. They are resident
        even if they do not fit in the budget."""
        self.residency.forget_dead_records()
        found = (
            [r for r in self._reachable_records() if self.must_be_resident(r)] if self.keeps_weights else []
        )
        self.kept.update((call, record.name) for record in found)
        return found

    def _reachable_records(self) -> Iterable[Record]:
        if not self.keeps_saved:
            return self.residency.reachable.values()
        return [record for record in self.residency.records.values() if record.evictable]

    def prepare_for_user_code(self, kept: Sequence[Record], live_bytes: int, tick: int | None) -> None:
        """Make the records in `kept` resident, and make room for the bytes that user code will take. A
        program's last slot calls this method."""
        # End the evictions whose bytes the plan counts as free. Otherwise only the next program would end
        # them, because user code allocates memory without a call of the engine.
        self.residency.pending_evictions.end_evictions_until_enough(lambda: False, by_plan=True)
        if kept:
            self.make_resident_for_user(kept, live_bytes, "a tensor it may read unseen,")
            mark_maybe_written(kept)
        self.eager_memory.make_room_for_eager(live_bytes, tick)

    def keep_weights(self, why: str, saved: bool = False) -> None:
        """Keep all weights resident whenever user code runs, from now on. If `saved` is True, also keep the
        tensors resident that are saved for backward."""
        if self.keeps_weights and self.keeps_saved >= saved:
            return
        log.warning("teraio: %s unseen: all of them are resident between programs", why)
        self.residency.owed_tensors.settle_records(
            [record for record in self.residency.records.values() if not record.is_discarded], why
        )
        self.keeps_saved |= saved
        self.keeps_weights = True
        make_records_resident(self.residency, self._reachable_records())

    def resume_after_exception(self, call: int) -> None:
        """Let user code run after an exception has ended a call. Make the tensors resident that must be
        resident for user code."""
        kept = self.records_required_after_call(call)
        try:
            make_records_resident(self.residency, kept)
            mark_maybe_written(kept)
        finally:
            self.resume_user_code()

    def refuse_moves(self, refuse: Refuse) -> None:
        """Move no tensor for user code from now on. If a read needs a move, call `refuse`, which raises an
        error."""
        self.refuse = refuse

    def end_refusing_moves(self, refuse: Refuse) -> bool:
        """Allow moves again, if `refuse_moves` was last called with this function. Return whether it was."""
        if self.refuse is not refuse:
            return False
        self.refuse = None
        return True

    def suspend_touches(self) -> None:
        """Begin a program in this thread. Uses of tensors by the program do not count as touches (uses by
        user code)."""
        if self.refuse is not None:
            self.refuse("a program of teraio's", None)
        if self.observer is not None:
            with self.lock:
                self.note_touches()
            self.observer.change_program_depth(1)

    def resume_touches(self) -> None:
        """End a program in this thread. Uses of tensors count as touches by user code again."""
        if self.observer is not None:
            self.observer.change_program_depth(-1)

    def resume_user_code(self) -> None:
        """Let user code run after a program. Begin to measure the bytes that user code takes. Begin to fetch
        the tensors that user code will probably read."""
        self.residency.advance_slot()
        if self.observer is not None:
            self.observer.rearm_address_watch()
        self.eager_memory.begin_user_code_measure()
        self.prefetch.fetch_ahead()

    # ---- reads

    def fetch_for_reader(self, keys: Sequence[int], place: str) -> None:
        """Make these storages resident for an operator that will read them. Any thread may call this method.

        If necessary, evict other storages, except storages that a running operator uses.
        """
        if self.refuse is not None:
            self.refuse(place, [record.name for record in self.residency.records_of_storages(keys)])
        if self.lock.is_held_by_this_thread:
            self.fetch_without_evicting(keys, place)
            return
        with self.lock:
            self.before_fetch()
            self.residency.owed_tensors.settle_storages(keys, place)
            assert self.observer is not None
            known = self.residency.records_of_storages
            used = known(self.observer.storage_keys_in_use())
            self.note_touches()
            with pin_during_block(used):
                self.make_resident_for_user(known(keys), 0, place)

    def end_evictions(self, keys: Sequence[int]) -> None:
        """End the evictions of these gradients that are in flight, because user code is about to scale them.
        The scaling is then owed, and the copies remain valid."""
        if self.refuse is not None or self.lock.is_held_by_this_thread:
            return
        with self.lock:
            for record in self.residency.records_of_storages(keys):
                if record.state is State.EVICTING and not record.pins:
                    self.residency.try_end_evict(record)

    def note_failed_fetch(self, error: BaseException) -> None:
        """Record that bytes are lost, because a fetch failed and user code read NaN in their place."""
        log.warning("teraio: user code read NaN, because the bytes could not be fetched: %s", error)
        if not isinstance(error, TeraioError):
            error = StoreError(str(error))
        self.residency.declare_loss(error)

    def fetch_without_evicting(self, keys: Sequence[int], place: str) -> None:
        """Make these storages resident, and evict no other storage. A finalizer may read a tensor while the
        engine itself works, and the engine cannot evict in the middle of its own work."""
        self.residency.owed_tensors.settle_storages(keys, place, may_evict=False)
        for record in self.residency.records_of_storages(keys):
            if record is self.mover.moving:
                continue
            if record.state is State.EVICTED:
                self.mover.begin_fetch(record, demand=True)
            if record.state is State.FETCHING:
                self.mover.end_fetch(record)
            self.residency.owed_tensors.reveal([record])
        if (short := self.residency.short_bytes(0)) > 0:
            self.residency.report_overrun(short, place)

    def note_touches(self) -> None:
        """Record the tensors that user code has used since the last call of this method, in the order of
        use."""
        if self.observer is not None:
            for record in self.residency.records_of_storages(self.observer.newly_touched_storage_keys()):
                self.prefetch.note_touch(record)

    def make_resident_for_user(self, records: Sequence[Record], live_bytes: int, place: str) -> None:
        """Make these records resident for user code, even if they do not fit in the budget."""
        self.residency.owed_tensors.settle_records(records, place)
        # User code may use its own stream, so the streams must be ordered even if no tensor moves.
        self.mover.device.join_user_streams()
        with pin_during_block(records):
            self.residency.owed_tensors.reveal(records)
            if any(record.state in {State.EVICTED, State.FETCHING} for record in records):
                self.mover.counts.add(touches=1)
                try:
                    self.make_room_for_records(records, live_bytes, f"{place} {records[0].name}")
                    self.residency.fetch(records, self.must_be_resident)
                except StoreError as error:
                    _raise_evicted_error(records, place, error)
            self.prefetch.fetch_ahead()

    def make_room_for_records(self, records: Sequence[Record], live_bytes: int, place: str) -> None:
        """Evict other records until there is room for the evicted records among these, for `live_bytes`, and
        for the bytes that user code will probably still take."""
        missing = sum(record.size_bytes for record in records if record.state is State.EVICTED)
        to_come = self.eager_memory.bytes_still_expected()
        short, _ = self.residency.evict_until_fits(
            missing + live_bytes + to_come, self.prefetch.current_tick(), self.must_be_resident
        )
        if short > to_come:
            self.residency.report_overrun(short - to_come, place)

    @contextmanager
    def hold_resident(self, records: Sequence[Record], place: str) -> Iterator[None]:
        """Keep these records resident during the `with` block."""
        with ExitStack() as held:
            with self.lock:
                self.make_resident_for_user(records, 0, place)
                held.enter_context(pin_during_block(records))
            yield

    def keep_exported_resident(self, key: int) -> None:
        """Keep the storage with this key resident for good, because DLPack has given its address to other
        libraries."""
        because = "DLPack gave its address to other libraries"
        for record in self.residency.records_of_storages([key]):
            if record.evictable:
                log.warning("teraio: %s is kept resident from now on: %s", record.name, because)
            self.residency.forbid_eviction_for_good(record, because)

    # ---- results

    def hand_out_result(self, record: Record) -> None:
        """Keep a program's result resident until another program takes the result as an argument.

        From now on, the observer detects whether user code takes the address of the result's memory.
        """
        self.residency.forbid_eviction(record)
        storage = record.storage()
        if self.observer is None or storage is None or record.addressed or self.keeps_results:
            return
        self.mover.is_clean(record)  # this notes the writes so far; `watch_for_writes` forgets them
        with suppress(InUseError):
            self.observer.watch_for_writes(storage)
            record.hand_out()
            self.handed_out[record.key] = record

    def reclaim_result(self, record: Record) -> bool:
        """Allow the eviction of a result that a program takes as an argument. Return whether it is allowed.

        It is not allowed if user code has taken the address of the result's memory.
        """
        if self.mover.is_address_taken(record):
            return False
        self.residency.allow_eviction(record)
        return True

    def _forbid_evicting_addressed_results(self) -> None:
        """Keep each result resident whose address user code has taken. User code may use the address of a
        result for long, unlike the address of a weight."""
        known, results = self.residency.records, self.handed_out
        self.handed_out = {key: record for key, record in results.items() if known.get(key) is record}
        for record in self.handed_out.values():
            if self.mover.is_address_taken(record):
                self.residency.forbid_eviction(record)
                record.end_hand_out()

    # ---- updates

    def begin_optimizer_update(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin an optimizer's update. Keep these tensors resident until the update ends. The update's reads
        do not count as uses by user code."""
        self.end_optimizer_update()
        self.known_tensors.pin_for_update(tensors)
        self.lends = True
        if self.observer is not None:
            self.observer.change_program_depth(1)

    def end_optimizer_update(self) -> None:
        """End an optimizer's update. Its tensors may be evicted again."""
        if self.lends and self.observer is not None:
            self.observer.change_program_depth(-1)
        self.lends = False
        self.known_tensors.unpin_after_update()

    def end_step(self) -> frozenset[tuple[int, str]]:
        """End a step. Return the pairs (call, tensor) in `kept`.

        From now on, assume that user code no longer uses the addresses of tensors that it took in this step.
        """
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
        f"`with teraio.resident(...)` keeps tensors resident; load the last checkpoint if the error persists"
    ) from error


def mark_maybe_written(records: Iterable[Record]) -> None:
    """Mark these records as written, because user code can write to them without the observer's notice.

    Call this function only while the records are resident, without an eviction in flight. A cancelled
    eviction would mark its record as unchanged again.
    """
    for record in records:
        record.wrote()
