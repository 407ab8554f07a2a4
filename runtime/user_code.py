"""Between two programs user code runs. What it touches comes back, what it holds stays, and others leave to
make room; what it needs beyond the budget it gets, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from teraio.errors import EvictedError, StoreError
from teraio.units import fmt_bytes

from .ahead import Ahead
from .back import bring_back
from .device import Device
from .edges import Call, edges_of
from .guard import Guard
from .moves import Mover
from .outside import Outside
from .records import Record, State
from .residency import Residency
from .saved import left_to_nodes
from .step import StepTracker

log = logging.getLogger("teraio")

RAW = frozenset({"data_ptr", "untyped_storage", "storage", "_typed_storage"})  # not seen: what is written so
# They write, and no version moves.
UNVERSIONED = frozenset(
    {
        "_amp_foreach_non_finite_check_and_unscale_",
        "_fused_adagrad_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
    }
)


class UserCode:
    def __init__(self, residency: Residency, mover: Mover, device: Device, tracker: StepTracker) -> None:
        self.residency = residency
        self.mover = mover
        self.guard = Guard(self)
        self.outside = Outside(residency, device, tracker, self.overrun)
        self.ahead = Ahead(residency, mover, tracker, self.guard.exposed)
        self.saved_stays = False  # what forwards saved is read where the guard does not see it
        self.given: list[Record] = []  # by the program that ran, which its caller has views of since
        self.kept: set[tuple[int, str]] = set()  # in this step: (call, tensor) that was exposed when it ended

    def exposed(self, call: int, given: Sequence[Record] = ()) -> list[Record]:
        """User code runs after this call. What it could reach unseen is resident then, over the budget if it
        must be, and may be written. Of those `given` it gets views."""
        self.see_given()
        self.given = list(given)
        for record in given:
            record.edges_unseen = True  # views of it may be used in graphs
        self.residency.bury()
        if not self.guard.off and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.expose_all("torch.distributed reads and writes weights")
        for record in self.residency.reachable.values():
            if record.aliased and record.kind == "grad":  # by what went on through a graph, which may be gone
                record.forget_others()
        exposed = [r for r in self._could_be_reached() if self.guard.exposed(r)]
        self.kept.update((call, record.name) for record in exposed)
        return [*exposed, *(r for r in given if r.evictable and r not in exposed)]

    def see_given(self) -> None:
        """Views that a program gave of its arguments: AOTAutograd makes them when it has returned."""
        given, self.given = self.given, []
        for record in given:
            record.aliased |= record.shared()

    def _could_be_reached(self) -> Iterable[Record]:
        if not self.saved_stays:
            return self.residency.reachable.values()
        return [record for record in self.residency.records.values() if record.evictable]

    def make_ready(self, exposed: Sequence[Record], live_bytes: int, tick: int | None) -> None:
        """At the last slot of a program: brings what is exposed, and makes room for what user code will take
        beside it."""
        self.residency.going.end_until(lambda: False, by_plan=True)  # what comes next asks for no room
        if exposed:
            self.bring(exposed, live_bytes, "what it holds of")
            written_unseen(exposed)
        self.outside.room(live_bytes, tick, self.guard.exposed)

    def expose_all(self, why: str, saved: bool = False) -> None:
        """From now on all weights are resident whenever user code runs; what forwards saved, too, if
        that is read."""
        if self.guard.off and self.saved_stays >= saved:
            return
        log.warning("teraio: %s unseen: between programs all of them are in memory", why)
        self.saved_stays |= saved
        self.guard.end()
        bring_back(self.residency, self._could_be_reached())

    def forget_others(self) -> None:
        self.see_given()
        for record in self.residency.reachable.values():
            record.forget_others()

    def take_over(self, call: int) -> None:
        """Let user code run after a call that an exception ended, anywhere in it. What is evicted is guarded
        even if there is no memory for what should be resident."""
        exposed = self.exposed(call)
        try:
            bring_back(self.residency, exposed)
            written_unseen(exposed)
        finally:
            self.hand_over()

    def hand_over(self) -> None:
        """A program has returned: user code runs."""
        self.residency.serial += 1
        self.guard.put_on()
        self.outside.begins()
        if not self.given:
            self.ahead.go_on()

    def open(self, records: list[Record], place: str) -> list[tuple[int, int]]:
        """User code is about to use these: they come back. Returns who had them before."""
        for record in records:
            record.pins += 1
        self.bring(records, 0, place)
        return [record.watch_others() for record in records]

    def close(
        self,
        records: list[Record],
        place: str,
        before: list[tuple[int, int]],
        used: Sequence[torch.Tensor] = (),
        call: Call | None = None,
    ) -> None:
        traced = torch._C._get_tracing_state() is not None  # what is traced reads it unseen
        if traced:  # and a look at nodes would be traced, too
            edges, call = None, None
        else:
            edges = edges_of(used, call) if call is not None else []
        for record in records:
            record.pins -= 1
            record.notice_edges(edges)
        for record, others in zip(records, before):
            after = record.watch_others()
            if not self._left_to_nodes(record, others, after, call):
                record.notice_others(others, after)
            record.pointed |= place in RAW
            record.guardable &= not traced
            if place in UNVERSIONED:
                record.clean = False
            if record.exposed:
                record.clean = False

    def _left_to_nodes(
        self, record: Record, before: tuple[int, int], after: tuple[int, int], call: Call | None
    ) -> bool:
        """Whether more hold it now, and all of them bring it back themselves."""
        more = after[0] > before[0] or after[1] > before[1]
        if call is None or self.guard.off or record.exposed or not more:
            return False
        return left_to_nodes(record, before, call)

    def record_at(self, key: int) -> Record | None:
        """Of the storage with this key."""
        return self.residency.records.get(key)

    def gave_address(self, key: int) -> None:
        record = self.record_at(key)
        if record is not None and record.evictable:
            name = record.name
            log.warning("teraio: %s stays in memory from now on: DLPack gave its address to others", name)
            self.residency.settle(record)
        if record is not None:
            record.addressed = True
            record.because = "DLPack gave its address to others"

    def bring(self, records: Sequence[Record], live_bytes: int, place: str) -> None:
        """For user code: makes these resident, over the budget if it must be."""
        self.mover.device.user_code_runs()  # perhaps on a stream of its own, and nothing has to move
        self.see_given()
        for record in records:
            if record.state is State.LEAVING:
                self.mover.undo_evict(record)
            self.ahead.touched(record)
        with pinned(records):
            if any(record.state is not State.DEVICE for record in records):
                self._fetch(records, live_bytes, place)
            self.ahead.go_on()

    def _fetch(self, records: Sequence[Record], live_bytes: int, place: str) -> None:
        residency = self.residency
        self.mover.counts.touches += 1
        missing = sum(record.size_bytes for record in records if record.state is State.AWAY)
        try:
            self.forget_others()
            to_come = self.outside.to_come()
            short, _ = residency.free(missing + live_bytes + to_come, self.ahead.now(), self.guard.exposed)
            short -= to_come
            if short > 0:
                self.overrun(short, f"{place} {records[0].name}")
            residency.fetch(records, self.guard.exposed)
        except StoreError as error:
            names = ", ".join(record.name for record in records)
            raise EvictedError(
                f"user code ({place}) needs {names}, which was away and could not be read back: {error}. "
                f"`with teraio.resident(...)` keeps what it is given in memory; load the last checkpoint "
                f"if it stays so"
            ) from error

    @contextmanager
    def holding(self, records: Sequence[Record], place: str) -> Iterator[None]:
        """These are in memory as long as the block runs."""
        self.bring(records, 0, place)
        with pinned(records):
            yield

    def overrun(self, short: int, place: str, who: str = "user code") -> None:
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
            self.mover.recorder.overran(short)

    def keeps_after_optimizer(self, used: Iterable[Record]) -> None:
        """An optimizer's code saw these plain: what it kept of them counts."""
        for record in used:
            record.aliased |= record.shared()
        self.forget_others()

    def end_step(self) -> frozenset[tuple[int, str]]:
        """What was exposed in the step. An address that was asked for is taken to be forgotten."""
        for record in self.residency.reachable.values():
            record.pointed = False
        kept = frozenset(self.kept)
        self.kept.clear()
        return kept


def written_unseen(records: Iterable[Record]) -> None:
    """User code may write into these unseen. They are here, and what was under way is over: that the copy is
    good after a write that was undone says nothing of what comes."""
    for record in records:
        record.clean = False


@contextmanager
def pinned(records: Sequence[Record]) -> Iterator[None]:
    """None of these leaves as long as the block runs."""
    for record in records:
        record.pins += 1
    try:
        yield
    finally:
        for record in records:
            record.pins -= 1
