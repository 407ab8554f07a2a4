"""Signals that arrive while the main thread waits in C++ for autograd's thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from teraio.runtime.eager import signals
from teraio.runtime.eager.signal_pipe import SignalPipe
from teraio.runtime.eager.signals import Signals

SOON_S = 10.0


@pytest.fixture
def answered() -> Iterator[list[int]]:
    """Set two signal handlers: for SIGUSR2 a Python function, and for Ctrl-C Python's default handler.

    Yield the list of signals that the Python function has handled.
    """
    found: list[int] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR2, signal.SIGINT)}
    signal.signal(signal.SIGUSR2, lambda number, _: found.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    for number, answer in before.items():
        signal.signal(number, answer)


@pytest.fixture
def installed(answered: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    """Install teraio's stand-ins for the signal handlers.

    Also make the main thread appear to wait for autograd.
    """
    made = Signals()
    made.install(apart=True)
    monkeypatch.setattr(signals, "_is_main_waiting_for_autograd", lambda: True)
    yield made
    made.remove()


def until(happened: Any) -> None:
    end = time.monotonic() + SOON_S
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
    assert happened()


def test_pipe_reports_signals_until_it_stops_listening(answered: list[int]) -> None:
    heard: list[int] = []
    ear = SignalPipe(heard.append)
    ear.start_listening()
    os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: heard == [signal.SIGUSR2])
    ear.stop_listening()
    ear.stop_listening()
    os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: len(answered) == 2)
    assert heard == [signal.SIGUSR2] and signal.set_wakeup_fd(-1) == -1
    until(lambda: all(thread.name != "teraio-signals" for thread in threading.enumerate()))


def test_wakeup_file_of_an_event_loop_is_kept() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        signal.set_wakeup_fd(writes)
        ear = SignalPipe(lambda number: None)
        ear.start_listening()
        ear.stop_listening()
        assert signal.set_wakeup_fd(-1) == writes
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reads)
        os.close(writes)


def test_ctrl_c_in_a_backward_is_raised_once_in_the_slot(installed: Signals) -> None:
    """Check that the slot raises KeyboardInterrupt on autograd's thread. The handler runs later and does
    nothing."""
    installed._note_ctrl_c(signal.SIGINT)
    assert installed.struck
    with pytest.raises(KeyboardInterrupt):
        installed.raise_in_backward()
    assert not installed.struck
    os.kill(os.getpid(), signal.SIGINT)  # the signal for which the slot has already raised the exception
    time.sleep(0)
    assert not installed.answered
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SOON_S)


def test_ctrl_c_waits_for_an_optimizer_step_inside_a_backward(installed: Signals) -> None:
    def step() -> None:
        installed.begin_optimizer_step(sys._getframe().f_code)
        installed.raise_in_backward()
        installed.step = None

    installed.struck = True
    step()
    assert installed.struck
    with pytest.raises(KeyboardInterrupt):
        installed.raise_in_backward()


def test_only_ctrl_c_with_pythons_handler_ends_a_backward(installed: Signals, answered: list[int]) -> None:
    installed._note_ctrl_c(signal.SIGUSR2)
    signal.signal(signal.SIGINT, lambda number, _: answered.append(number))
    installed._note_ctrl_c(signal.SIGINT)
    assert not installed.struck


def test_deferred_handlers_run_on_the_main_thread_only(installed: Signals, answered: list[int]) -> None:
    installed.due[signal.SIGUSR2] = lambda number, _: answered.append(number)
    thread = threading.Thread(target=installed.call_due_when_idle)
    thread.start()
    thread.join()
    assert not answered and installed.due
    installed.call_due_when_idle()
    assert answered == [signal.SIGUSR2] and not installed.due
