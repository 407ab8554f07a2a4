"""A transfer of the store: the wait, the cancellation, and the retry of a write at another place.

    submitted --> active --> done
                    |  \\--> failed: first EIO of a write --> submitted again, to other pieces
                    |   \\-> failed --> `wait` raises; the tensor's bytes in memory are unchanged
                    \\-----> cancelled

Invariant: after a ticket is finished, the store neither reads nor writes the tensor's memory.
"""

from __future__ import annotations

import errno
from typing import Literal

from teraio import _native
from teraio.errors import StoreError, StoreWriteError, TransferTimeoutError

from . import kill_points
from .extents import Piece
from .space import Extent, Space

FirstTry = tuple[StoreWriteError, tuple[Piece, ...]]  # the error of the first write, and its pieces


class StoreTicket:
    """A pending transfer. The store makes it while it holds `Space.lock`."""

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
        self._finished = True  # no transfer is submitted yet
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
        # Times of submission, start and end in ns. They are 0 if the store does not record times.
        self.times = (0, 0, 0)
        try:
            self._submit_transfer()
        except BaseException:  # after Ctrl-C, the caller has no ticket, and may reuse the memory
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
            extent.begin_write()
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
        extent.begin_transfer(self._number, writes=self._op == "write")

    def done(self) -> bool:
        """Return True if the transfer has ended, with success or not. A later `wait` does not block."""
        self._space.refuse_in_fork()
        with self._space.lock:
            if self._finished:
                return True
            return self._space.transfers.state(self._number) != "active" and self._collect_result()

    def wait(self) -> None:
        """Block until the transfer has ended. If it failed, raise its StoreError.

        After Ctrl-C, cancel the transfer and raise KeyboardInterrupt. Even then, the transfer has ended.
        """
        try:
            self._space.refuse_in_fork()
            while not self._finished:
                self._wait_and_collect_result()
        except BaseException:  # for example Ctrl-C, which may come at any point of the wait
            self.cancel()
            raise
        if self._failure is not None:
            raise self._failure

    def _wait_and_collect_result(self) -> None:
        number = self._number
        try:
            self._space.transfers.wait(number, self._name, keep=True)
        except StoreError:
            pass  # `_collect_result` raises and handles this error again
        except ValueError:
            with self._space.lock:  # another waiting thread has collected the result
                assert self._finished or self._number != number
        self._collect_result()

    def promote_to_demand(self) -> bool:
        """Turn a prefetch into a demand, which overtakes prefetches. Return False if the transfer has
        started, or is a demand already."""
        self._demand = True
        return not self._finished and self._space.transfers.promote(self._number)

    def cancel(self) -> bool:
        """Cancel the transfer. Return True if the transfer has failed or was cancelled before its end. A
        later `wait` then raises an error.

        Return False if all bytes have arrived, or if the transfer had already finished.
        """
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
            except KeyboardInterrupt as signal:  # even after another Ctrl-C, the running part must end
                interrupt = signal
        self._collect_result(again=False)
        if interrupt is not None:
            raise interrupt
        return self._failure is not None

    def _cancel_queued_part(self) -> bool:
        """Cancel the operations of the transfer that have not started. Return True if other operations still
        run."""
        with self._space.lock:
            try:
                self._space.transfers.cancel(self._number)
                return self._space.transfers.state(self._number) == "active"
            except ValueError:  # the transfer was released: Ctrl-C interrupted `_collect_result`
                self._failure = self._failure or self._cancelled_error()
                self._space.note_transfer_finished(self._extent, self._number)
                self._finished = True
                return False

    def _cancelled_error(self) -> StoreError:
        return StoreError(
            f"the {self._op} of tensor '{self._name}' was cancelled",
            tensor=self._name,
            path=self._space.path_for_errors,
        )

    def _collect_result(self, again: bool = True) -> bool:
        """Collect the result of an ended transfer. Return False if a failed write was submitted again."""
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
            # Ctrl-C may interrupt at any line. So `_finished` is set last, and a second run of the other
            # lines does no harm.
            self._failure = failure
            if self._first is not None:
                (refused, pieces), self._first = self._first, None
                if failure is None:  # if the second write fails too, the whole drive may be at fault
                    space.retire_failed_block(refused)
                space.release_pieces(pieces)
            if isinstance(failure, TransferTimeoutError) and self._op == "write":
                space.abandon_extent_pieces(self._extent)
            space.note_transfer_finished(self._extent, self._number)
            self._finished = True
            return True

    def _resubmit_failed_write_elsewhere(self, failure: StoreError | None) -> bool:
        """Submit a write that failed with EIO a second time, to other pieces. Return False if this is not
        possible."""
        if not isinstance(failure, StoreWriteError) or failure.errno != errno.EIO or self._first is not None:
            return False
        space, extent = self._space, self._extent
        if extent.released or not space.is_open:
            return False
        try:
            elsewhere = space.reserve_pieces(extent.size_bytes, self._name)
        except StoreError:
            return False
        extent.end_transfer(self._number)
        self._first = (failure, extent.replace_pieces(elsewhere))
        try:
            self._submit_transfer()
        except StoreError:
            return False
        return True

    def __del__(self) -> None:
        if not self._finished:
            self._space.dropped.append((self._number, self._extent))
