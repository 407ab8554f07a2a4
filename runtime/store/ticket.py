"""A transfer that is under way: waiting for it, giving it up, and a second try when a block cannot be
written.

    submitted --> active --> done
                    |  \\--> failed: EIO in a write, the first time --> submitted again, to another extent
                    |   \\-> failed --> `wait` raises; the tensor's copy in memory is untouched
                    \\-----> cancelled

Whatever happens: once a ticket is finished, nothing reads or writes the tensor's memory any more.
"""

from __future__ import annotations

import errno
from typing import Literal

from teraio import _native
from teraio.errors import StoreError, StoreWriteError, TransferTimeoutError

from . import kill_points
from .extents import Piece
from .space import Extent, Space

FirstTry = tuple[StoreWriteError, tuple[Piece, ...]]  # what went wrong, and where


class StoreTicket:
    """A pending transfer. Made by the store, under its lock."""

    __slots__ = (
        "_address",
        "_demand",
        "_event",
        "_extent",
        "_failure",
        "_finished",
        "_first",
        "_name",
        "_number",
        "_op",
        "_space",
        "times",
    )

    def __init__(
        self,
        space: Space,
        op: Literal["write", "read"],
        extent: Extent,
        address: int,
        name: str,
        demand: bool,
        event: int,
    ) -> None:
        self._finished = True  # until something is under way
        self._space = space
        self._op = op
        self._extent = extent
        self._address = address
        self._name = name
        self._demand = demand
        self._event = event
        self._failure: StoreError | None = None
        self._first: FirstTry | None = None
        self._number = 0
        self.times = (0, 0, 0)  # submitted, started, finished in ns, where the store keeps them
        try:
            self._submit_transfer()
        except BaseException:  # Ctrl-C: nobody has this ticket, and its memory goes to others
            self.cancel()
            raise

    def _submit_transfer(self) -> None:
        extent, transfers = self._extent, self._space.transfers
        if not extent.pieces:
            raise StoreError(
                f"tensor '{self._name}' has no bytes in the store: its last write failed",
                tensor=self._name,
                path=self._space.path_for_errors,
            )
        if self._op == "write":
            extent.generation += 1
        submit = transfers.out if self._op == "write" else transfers.into
        try:
            self._number = submit(
                self._address,
                extent.size_bytes,
                extent.pieces,
                extent.tag,
                extent.generation,
                self._demand,
                self._event,
            )
        except _native.QueueFull as full:
            raise StoreError(
                f"tensor '{self._name}': {full}", tensor=self._name, path=self._space.path_for_errors
            ) from None
        kill_points.reach("submitted")
        self._finished = False
        extent.pending.add(self._number)
        if self._op == "write":
            extent.writing = self._number

    def done(self) -> bool:
        """Finished, well or badly; `wait` says which and then does not block."""
        self._space.refuse_in_fork()
        with self._space.lock:
            if self._finished:
                return True
            return self._space.transfers.state(self._number) != "active" and self._collect_result()

    def wait(self) -> None:
        """Returns when the bytes have arrived. Raises the StoreError of what failed, or KeyboardInterrupt;
        the transfer is over then as well."""
        try:
            self._space.refuse_in_fork()
            while not self._finished:
                self._wait_and_collect_result()
        except BaseException:  # Ctrl-C, anywhere in there
            self.cancel()
            raise
        if self._failure is not None:
            raise self._failure

    def _wait_and_collect_result(self) -> None:
        number = self._number
        try:
            self._space.transfers.wait(number, self._name, keep=True)
        except StoreError:
            pass  # met again in _settle
        except ValueError:
            with self._space.lock:  # another thread that waits has settled it
                assert self._finished or self._number != number
        self._collect_result()

    def promote_to_demand(self) -> bool:
        """Somebody needs it now: it overtakes prefetches. False: it was a demand already, or is under way."""
        self._demand = True
        return not self._finished and self._space.transfers.promote(self._number)

    def cancel(self) -> bool:
        """Gives the transfer up. True: its bytes have not arrived and `wait` raises. False: it was
        finished."""
        if self._finished:
            return False
        self._space.refuse_in_fork()
        interrupt: KeyboardInterrupt | None = None
        transfers = self._space.transfers
        while not self._finished and self._cancel_queued_part():
            try:
                transfers.wait(self._number, self._name, keep=True)
            except StoreError:
                break
            except KeyboardInterrupt as signal:  # once more Ctrl-C: what runs must end all the same
                interrupt = signal
        self._collect_result(again=False)
        if interrupt is not None:
            raise interrupt
        return self._failure is not None

    def _cancel_queued_part(self) -> bool:
        """Drops what is queued; whether something of it still runs."""
        with self._space.lock:
            try:
                self._space.transfers.cancel(self._number)
                return self._space.transfers.state(self._number) == "active"
            except ValueError:  # released already: Ctrl-C came while its result was taken
                self._failure = self._failure or self._cancelled_error()
                self._space.note_transfer_finished(self._extent, self._number)
                self._finished = True
                return False

    def _cancelled_error(self) -> StoreError:
        return StoreError(
            f"the {self._op} of tensor '{self._name}' was given up",
            tensor=self._name,
            path=self._space.path_for_errors,
        )

    def _collect_result(self, again: bool = True) -> bool:
        """Takes the result of a transfer that has ended. False: it was submitted once more."""
        space = self._space
        with space.lock:
            if self._finished:
                return True
            failure: StoreError | None = None
            if space.keeps_times:
                self.times = space.transfers.times(self._number)
            try:
                if not space.transfers.wait(self._number, self._name):
                    failure = self._cancelled_error()
            except StoreError as error:
                failure = error
            if again and self._resubmit_failed_write_elsewhere(failure):
                return False
            # Ctrl-C may come between any two lines: `_finished` is last, doing the rest twice does no harm.
            self._failure = failure
            if self._first is not None:
                (refused, pieces), self._first = self._first, None
                if failure is None:  # else the whole drive fails, and no block is to blame
                    space.retire_failed_block(refused)
                space.release_pieces(pieces)
            if isinstance(failure, TransferTimeoutError) and self._op == "write":
                space.abandon_extent_pieces(self._extent)
            space.note_transfer_finished(self._extent, self._number)
            self._finished = True
            return True

    def _resubmit_failed_write_elsewhere(self, failure: StoreError | None) -> bool:
        """A block that cannot be written is no reason to give up: once, the tensor goes to another extent."""
        if not isinstance(failure, StoreWriteError) or failure.errno != errno.EIO or self._first is not None:
            return False
        space, extent = self._space, self._extent
        if extent.released or not space.is_open:
            return False
        try:
            elsewhere = space.reserve_pieces(extent.size_bytes, self._name)
        except StoreError:
            return False
        extent.pending.discard(self._number)
        self._first = (failure, extent.pieces)
        extent.pieces = elsewhere
        try:
            self._submit_transfer()
        except StoreError:
            return False
        return True

    def __del__(self) -> None:
        if not self._finished:
            self._space.dropped.append((self._number, self._extent))
