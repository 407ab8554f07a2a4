"""A pipe that reports signals while Python cannot run a handler.

Python runs handlers of signals on the main thread only. On a GPU, autograd runs a backward on another thread,
and the main thread waits in C++. In this time Python runs no handler, but its C code still writes the number
of each signal to a pipe (`signal.set_wakeup_fd`). A thread of teraio reads the pipe, and calls a function
with the number.

A process can have only one such pipe. If an event loop has set its own, teraio does not replace it, and
reports no signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable


class SignalPipe:
    """A pipe for the numbers of signals that have a handler in Python, and the thread that reads the pipe."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self.heard = heard
        self.pipe: int | None = None  # the write end of the pipe

    def start_listening(self) -> None:
        """Begin to report signals. Call this method on the main thread."""
        before = signal.set_wakeup_fd(-1)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        reads, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        threading.Thread(
            target=self._report_signals_until_closed, args=(reads,), name="teraio-signals", daemon=True
        ).start()

    def stop_listening(self) -> None:
        """Stop reporting signals. Call this method on the main thread."""
        pipe, self.pipe = self.pipe, None
        if pipe is None:
            return
        # set_wakeup_fd raises ValueError outside of the main thread. This happens in a child process that
        # another thread forked.
        with contextlib.suppress(ValueError):
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, pipe):
                signal.set_wakeup_fd(before)
        os.close(pipe)  # the thread that reads the pipe then ends

    def _report_signals_until_closed(self, reads: int) -> None:
        while numbers := os.read(reads, 64):
            for number in numbers:
                self.heard(number)
        os.close(reads)
