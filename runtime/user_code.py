"""Between two programs user code runs. What it touches comes back, what it holds stays, and others leave to
make room; what it needs beyond the budget it gets, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from teraio.errors import EvictedError, StoreError
from teraio.units import fmt_bytes

from .guard import Guard
from .moves import Mover
from .records import Record, State
from .residency import Residency

log = logging.getLogger("teraio")

RAW = frozenset({"data_ptr", "untyped_storage", "storage", "_typed_storage"})  # not seen: what is written so


class UserCode:
    def __init__(self, residency: Residency, mover: Mover) -> None:
        self.residency = residency
        self.mover = mover
        self.guard = Guard(self)
        self.kept: set[tuple[int, str]] = set()  # in this step: (call, tensor) that was exposed when it ended

    def exposed(self, call: int) -> list[Record]:
        """User code runs after this call. What it could reach unseen is resident then, over the budget if it
        must be, and may be written."""
        self.residency.bury()
        if not self.guard.off and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.expose_all("torch.distributed reads and writes weights")
        exposed = [r for r in self.residency.reachable.values() if self.guard.exposed(r)]
        for record in exposed:
            record.clean = False
            self.kept.add((call, record.name))
        return exposed

    def expose_all(self, why: str) -> None:
        """From now on all weights are resident whenever user code runs."""
        if not self.guard.off:
            log.warning("teraio: %s unseen: between programs all of them are in memory", why)
            self.guard.end()
            self.residency.bring_back(self.residency.reachable.values())

    def forget_others(self) -> None:
        for record in self.residency.reachable.values():
            record.forget_others()

    def hand_over(self) -> None:
        """A program has returned: user code runs."""
        self.residency.serial += 1
        self.guard.put_on()

    def open(self, records: list[Record], place: str) -> list[tuple[int, int]]:
        """User code is about to use these: they come back. Returns who had them before."""
        for record in records:
            record.pins += 1
        self.bring(records, 0, place)
        return [record.watch_others() for record in records]

    def close(self, records: list[Record], place: str, before: list[tuple[int, int]]) -> None:
        for record in records:
            record.pins -= 1
        for record, others in zip(records, before):
            record.notice_others(others)
            record.pointed |= place in RAW
            if record.exposed:
                record.clean = False

    def bring(self, records: Sequence[Record], live_bytes: int, place: str) -> None:
        """For user code: makes these resident, over the budget if it must be."""
        residency = self.residency
        for record in records:
            if record.state is State.LEAVING:
                self.mover.undo_evict(record)
        missing = sum(record.size_bytes for record in records if record.state is State.AWAY)
        if not missing and not any(record.state is State.ARRIVING for record in records):
            return
        self.mover.counts.touches += 1
        for record in records:
            record.pins += 1
        try:
            self.forget_others()
            short, _ = residency.free(missing + live_bytes, None, self.guard.exposed)
            if short > 0:
                self._overrun(short, f"{place} {records[0].name}")
            residency.fetch(records)
        except StoreError as error:
            names = ", ".join(record.name for record in records)
            raise EvictedError(
                f"user code ({place}) needs {names}, which was away and could not be read back: {error}. "
                f"Load the last checkpoint if it stays so"
            ) from error
        finally:
            for record in records:
                record.pins -= 1

    def _overrun(self, short: int, place: str) -> None:
        counts = self.mover.counts
        if short > 2 * counts.overrun_bytes:  # not a line per tensor
            log.warning(
                "teraio: overrun: user code (%s) needs %s more than the memory of %s; it gets it",
                place,
                fmt_bytes(short, up=True),
                fmt_bytes(self.residency.budget_bytes),
            )
        counts.overrun_bytes = max(counts.overrun_bytes, short)

    def keeps_after_optimizer(self) -> None:
        """An optimizer's code saw plain weights: what it kept of them counts."""
        for record in self.residency.reachable.values():
            record.aliased |= record.references() > len(record.live_faces())
        self.forget_others()

    def end_step(self) -> frozenset[tuple[int, str]]:
        """What was exposed in the step. An address that was asked for is taken to be forgotten."""
        for record in self.residency.reachable.values():
            record.pointed = False
        kept = frozenset(self.kept)
        self.kept.clear()
        return kept
