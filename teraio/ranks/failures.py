"""Failures of ranks. A rank publishes the error that has ended its program, and the other ranks end with
RankError. Otherwise they would wait in a collective for the failed rank until the time limit of the group.

    an error of teraio ends a program or an optimizer's step    the rank publishes it (`reporting`)
    the rank goes on: it compiles, or a program succeeds        the rank cancels it (`cancel`)
    a collective of another rank fails                          RankError names the published failure
    another rank begins a program, GRACE_S after the failure    RankError
    another rank waits in a collective for longer than GRACE_S  NCCL: the collective is aborted
                                                                else: a line on stderr, and the process ends

User code may catch the error and go on. GRACE_S is the time that the rank has for that.

A process group alone does not tie ranks together. A rank takes part from its first collective on.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import torch

from teraio.errors import RankError, TeraioError

from . import collective_names, collectives
from .collectives import Place
from .connections import is_any_closed, make_with_connections
from .processes import RankProcess
from .rank_store import STORE_ERRORS, RankStore, host_key

log = logging.getLogger("teraio")

LOOK_EVERY_S = 1.0
GRACE_S = 4.0  # a failure that is cancelled within this time ends no other rank
ABORT_S = 2.0  # time for a wait to end after the collective was aborted
EXPLAIN_S = 2.0  # a failed collective waits so long for the failure of the other rank
RECHECK_S = 0.1
JOIN_S = 2.0
MESSAGE_MAX_CHARACTERS = 4000
CHANGED = "failures"  # key of the number of the last change; so a look is one read for any number of ranks


@dataclass(frozen=True, slots=True)
class Failure:
    """The published failure of a rank. No two changes have the same number."""

    rank: int
    number: str
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


class RankFailures:
    """The failures of all ranks, as this rank sees them.

    `own` is the store of the threads that run programs. `watched` is the store of the thread that looks for
    failures.
    """

    def __init__(
        self, own: RankStore, watched: RankStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.own, self.watched, self.clock = own, watched, clock
        self.connections: list[int] = []  # descriptors of the connections of `watched`
        self.pid = os.getpid()
        self.lock = threading.Lock()  # for `own`
        self.has_failed = False  # True: this rank has published a failure, and has not cancelled it
        self.changed: str | None = None  # the number of the last change that a look has seen
        self.seen: dict[int, tuple[Failure, float]] = {}  # rank -> its failure, and when this rank saw it
        self.aborted_for: Failure | None = None  # the failure for which collectives were aborted
        self.aborted_at = 0.0
        self.waits: set[Place] = set()  # places of threads in collectives at the last look
        self.main_place: Place | None = None  # place of the main thread while a failure is seen
        self.main_since = 0.0
        self.ending = threading.Event()
        self.thread: threading.Thread | None = None

    # ---- this rank

    def begin(self) -> None:
        """Publish this rank's process, and cancel the failure of an earlier engine."""
        process = RankProcess.of_this_process()
        with self.lock:
            if process is not None:
                self.own.publish(_key_of_process(self.own.rank), str(process))
            self.has_failed = self._read_failure(self.own, self.own.rank) is not None
        self.cancel()

    def publish(self, error: TeraioError) -> None:
        """Publish an error of this rank. A RankError is not published, because its cause is published."""
        if isinstance(error, RankError) or os.getpid() != self.pid:
            return
        text = f"{type(error).__name__}: {error}"[:MESSAGE_MAX_CHARACTERS]
        self._publish_change("".join(c if c.isprintable() or c == "\n" else "?" for c in text))
        self.has_failed = True

    def cancel(self) -> None:
        """Cancel this rank's failure, because the rank goes on."""
        if self.has_failed and os.getpid() == self.pid:
            self.has_failed = False
            self._publish_change("")

    def _publish_change(self, text: str) -> None:
        number = f"{self.own.rank}.{time.time_ns()}"
        with self.lock, suppress(*STORE_ERRORS):
            self.own.publish(_key_of_failure(self.own.rank), f"{number}\n{text}")
            self.own.publish(CHANGED, number)

    # ---- the other ranks

    def look(self, store: RankStore) -> None:
        """Read the failures of the other ranks, if any rank's failure has changed."""
        changed = store.read(CHANGED)
        if changed == self.changed:
            return
        others = (rank for rank in range(store.ranks) if rank != store.rank)
        found = [each for rank in others if (each := self._read_failure(store, rank)) is not None]
        before, now = self.seen, self.clock()
        for failure in found:
            if failure.rank not in before or before[failure.rank][0] != failure:
                log.warning("teraio: %s. This rank ends too, unless rank %d goes on", failure, failure.rank)
        self.seen = {
            failure.rank: before[failure.rank]
            if failure.rank in before and before[failure.rank][0] == failure
            else (failure, now)
            for failure in found
        }
        self.changed = changed

    def _read_failure(self, store: RankStore, rank: int) -> Failure | None:
        number, _, text = (store.read(_key_of_failure(rank)) or "").partition("\n")
        return Failure(rank, number, text) if text else None

    def first_seen(self) -> Failure | None:
        """Return the failure of another rank that this rank has seen first, or None."""
        seen = min(self.seen.values(), key=lambda each: each[1], default=None)
        return None if seen is None else seen[0]

    def standing(self) -> Failure | None:
        """Return a failure of another rank that was not cancelled within GRACE_S, or None."""
        if self.aborted_for is not None:
            return self.aborted_for
        failure = self.first_seen()
        if failure is None or self.clock() - self.seen[failure.rank][1] < GRACE_S:
            return None
        return failure

    def explain(self, error: BaseException) -> RankError | None:
        """Return the failure of another rank that explains this error of a collective, or None."""
        if not collectives.is_error_of_collective(error) or os.getpid() != self.pid:
            return None
        until = self.clock() + EXPLAIN_S
        while True:
            with self.lock, suppress(*STORE_ERRORS):
                self.look(self.own)
            if (failure := self.aborted_for or self.first_seen()) is not None:
                return RankError(str(failure))
            if (ended := self._ended_rank()) is not None:
                return RankError(f"the process of rank {ended} has ended. The error was: {error}")
            if self.clock() > until:
                return None
            time.sleep(RECHECK_S)

    def _ended_rank(self) -> int | None:
        """Return a rank of this host whose process has ended, or None if no such rank is known."""
        with self.lock, suppress(*STORE_ERRORS):
            for rank in range(self.own.ranks):
                process = RankProcess.parse(self.own.read(_key_of_process(rank)))
                if process is not None and process.has_ended():
                    return rank
        return None

    # ---- the thread

    def start_thread(self, connections: list[int]) -> None:
        """Start the thread that looks for failures. It ends if one of the store's connections is closed."""
        self.connections = connections
        self.thread = threading.Thread(target=self._watch, name="teraio-ranks", daemon=True)
        self.thread.start()

    @property
    def is_watching(self) -> bool:
        """Return whether the thread runs in this process."""
        return self.thread is not None and self.thread.is_alive() and os.getpid() == self.pid

    def end(self) -> None:
        """End the thread. A failure that stands is not cancelled, because this rank may end next."""
        if os.getpid() != self.pid:
            return
        self.ending.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(JOIN_S)
        self.seen = {}

    def _watch(self) -> None:
        """Look for failures until the engine or the process group ends, or the store answers no more."""
        while not self.ending.wait(LOOK_EVERY_S) and torch.distributed.is_initialized():
            try:
                if not is_any_closed(self.connections):
                    self.look(self.watched)
                elif not self.seen:
                    return
            except STORE_ERRORS:
                if not self.seen:
                    return
            self.end_waits()

    def end_waits(self) -> None:
        """End the waits of this process's threads for a failed rank."""
        waits, main = collectives.places_in_collectives(), collectives.place_of_main_thread()
        if main != self.main_place:
            self.main_place, self.main_since = main, self.clock()
        lasting = waits & self.waits
        self.waits = waits
        failure = self.standing()
        if failure is None:
            return
        stuck = bool(lasting) or self.clock() - self.main_since >= GRACE_S
        if self.aborted_for is None:
            if stuck and collectives.can_abort():
                self.aborted_for, self.aborted_at = failure, self.clock()
                collectives.abort_groups()
                return
        elif self.clock() - self.aborted_at < ABORT_S:
            return
        if lasting:
            end_process(failure)


def end_process(failure: Failure) -> NoReturn:
    """End this process, because a thread waits in a collective for a rank that has failed. No exception can
    reach such a thread."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.write(f"teraio: RankError: {failure}. This rank waited for it in a collective\n")
        sys.stderr.flush()
    os._exit(1)


def _key_of_failure(rank: int) -> str:
    return f"failure/{rank}"


def _key_of_process(rank: int) -> str:
    return host_key(f"process/{rank}")


# ---- the failures of this process's group


class _Process:
    """The failures of the ranks, as this process takes part in them."""

    def __init__(self) -> None:
        self.failures: RankFailures | None = None
        self.counted = 0  # collectives until the last optimizer's step
        self.will_end = False  # True: `end` is called when the process exits

    def take_part(self) -> None:
        """Publish failures of this rank and look for failures of other ranks, from now on."""
        if self.failures is not None and (self.failures.is_watching or self.has_store_ended()):
            return
        with suppress(*STORE_ERRORS):
            store = RankStore.of_process()
            if store is not None:
                watched, connections = make_with_connections(store.for_thread)
                started = RankFailures(store.for_thread(), watched)
                started.begin()
                started.start_thread(connections)
                self.failures = started
        if not self.will_end:
            self.will_end = True
            atexit.register(end)

    def has_store_ended(self) -> bool:
        """Return whether the server of the store has closed a connection of this process."""
        failures = self.failures
        return failures is not None and os.getpid() == failures.pid and is_any_closed(failures.connections)

    def note_collectives(self) -> None:
        """Take part if collectives have run since the last call."""
        if self.failures is None or not self.failures.is_watching:
            before, self.counted = self.counted, collectives.collectives_so_far()
            if self.counted > before > 0:
                self.take_part()


_PROCESS = _Process()


def take_part() -> None:
    """Take part in the failures of ranks, because this rank has collectives. Without a group of several ranks
    this does nothing."""
    _PROCESS.take_part()


def take_part_if_collective(kernels: list[str]) -> None:
    """Take part if a program with these kernels has a collective."""
    if collective_names.has_collective(kernels):
        _PROCESS.take_part()


def end() -> None:
    """End the thread that looks for failures, because the engine ends."""
    if _PROCESS.failures is not None:
        _PROCESS.failures.end()


def cancel() -> None:
    """Cancel the failure of this rank, because the rank goes on."""
    if _PROCESS.failures is not None:
        _PROCESS.failures.cancel()


def has_store_ended() -> bool:
    """Return whether the store's server has ended. A new connection would wait for the server until the time
    limit of the process group."""
    return _PROCESS.has_store_ended()


def note_collectives() -> None:
    """Take part if eager code has run collectives between two steps of optimizers."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _PROCESS.note_collectives()


def raise_if_rank_failed() -> None:
    """Raise RankError if the failure of another rank was not cancelled in time."""
    failures = _PROCESS.failures
    if failures is not None and (failure := failures.standing()) is not None:
        raise RankError(str(failure))


@contextmanager
def reporting() -> Iterator[None]:
    """Publish an error of teraio that the block raises. If a collective fails in the block, raise RankError
    instead, if another rank's failure explains it."""
    try:
        yield
    except BaseException as error:
        report(error)
        raise


def report(error: BaseException) -> None:
    """Publish an error of teraio. For an error of a collective, raise RankError if another rank's failure
    explains it."""
    failures = _PROCESS.failures
    if failures is None:
        return
    if isinstance(error, TeraioError):
        failures.publish(error)
    elif (explained := failures.explain(error)) is not None:
        raise explained from error
