"""A pipe for signals that arrive while Python cannot run a handler. Python's C handler writes the number of
each signal to the pipe.

On a GPU, autograd runs a backward on a thread of its own. The main thread waits for the backward in C++, and
Python runs handlers on the main thread only. So a thread of teraio reads the pipe and calls a function with
the signal's number.

`signal.set_wakeup_fd` takes one file per process. If an event loop has set its own file, teraio leaves that
file set. Then the pipe reports no signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable


class SignalPipe:
    """A pipe that reports the numbers of signals that have a handler in Python."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self.heard = heard
        self.pipe: int | None = None  # the write end of the pipe

    def start_listening(self) -> None:
        """Listen to signals from now on. Call this function on the main thread."""
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
        """Stop listening to signals. Call this function on the main thread."""
        pipe, self.pipe = self.pipe, None
        if pipe is None:
            return
        # ValueError is raised in a child process if a thread other than the main thread forked the child.
        with contextlib.suppress(ValueError):
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, pipe):
                signal.set_wakeup_fd(before)
        os.close(pipe)  # ends the thread that reads the pipe

    def _report_signals_until_closed(self, reads: int) -> None:
        while numbers := os.read(reads, 64):
            for number in numbers:
                self.heard(number)
        os.close(reads)
