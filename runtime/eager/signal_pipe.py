"""Signals that come while Python runs no handler: a pipe into which Python's C handler writes their numbers.

On a GPU, autograd runs a backward on a thread of its own. The main thread waits for it in C++, and Python
runs handlers on the main thread only. So a thread of ours reads the pipe and calls back. One file per process
can be `signal.set_wakeup_fd`'s: an event loop that has it keeps it, and then nothing is heard here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable


class SignalPipe:
    """Hears the numbers of signals for which there is a handler in Python."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self.heard = heard
        self.pipe: int | None = None  # its end for writing

    def start_listening(self) -> None:
        """Listen from now on; called on the main thread."""
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
        """Stop listening; called on the main thread."""
        pipe, self.pipe = self.pipe, None
        if pipe is None:
            return
        with contextlib.suppress(ValueError):  # a child, forked by another thread than the main one
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, pipe):
                signal.set_wakeup_fd(before)
        os.close(pipe)  # the thread reads the end of the pipe

    def _report_signals_until_closed(self, reads: int) -> None:
        while numbers := os.read(reads, 64):
            for number in numbers:
                self.heard(number)
        os.close(reads)
