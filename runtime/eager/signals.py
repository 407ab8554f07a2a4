"""Handlers of signals. Python calls a handler, which is user code, between any two lines, even in the middle
of a move.

A handler may read weights, so it runs only where user code may run:

    a program is compiled or runs, the engine works, an optimizer steps    the handler is deferred to its end
    elsewhere                                                              the handler runs immediately

Python's own handler of Ctrl-C is deferred only (1) while the engine works and (2) during an optimizer's step,
so that weights and states belong to a whole step. Such a Ctrl-C ends a running program between two kernels.
The handler of a second Ctrl-C is never deferred, also if it is the user's.

On a GPU, autograd runs a backward on a thread of its own. Python runs no handler until the whole backward has
ended. Ctrl-C ends the backward sooner:

    signal_pipe.py    notices the signal
    the next slot     raises KeyboardInterrupt on autograd's thread
    autograd          carries the exception to the main thread
    the handler       runs on the main thread afterwards, and does nothing more
"""

from __future__ import annotations

import _thread
import functools
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any

import torch
import torch.autograd.graph
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code

import teraio.errors

from .signal_pipe import SignalPipe

log = logging.getLogger("teraio")

Answer = Callable[[int, FrameType | None], Any]

OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep  # the folder of the runtime
# Folders of torch and of Python's library. The engine, programs and user code all call functions of their
# files. So a frame of such a function counts as a frame of its caller. `<string>` is the file of code that
# Python generates, such as the `__init__` of a dataclass.
ANYONES = (os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<")
FACE = os.path.dirname(os.path.realpath(teraio.errors.__file__))
ANYONES_FOLDERS = {FACE, os.path.join(FACE, "formats"), os.path.join(FACE, "session")}
# Frames of these files surround a program. They compile the program, call it, and make views of its results.
AROUND_PROGRAMS = ("/_functorch/_aot_autograd/", "/_dynamo/convert_frame.py")
SET, GET = signal.signal, signal.getsignal
RECHECK_S = 0.001
AFTER_REMINDER_S = 0.05  # longer than RECHECK_S, because Python may take long to notice a signal
WARN_AFTER_S = 2.0  # a warning reports a handler that is deferred for longer


def _exclude_from_compilation(does: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a handler from compilation, because Python may call it where Dynamo compiles every function."""

    def called(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return does(*args)
        finally:
            set_eval_frame(prior)

    skip_code(called.__code__)
    return called


class SignalStandIn:
    """A handler that Python calls instead of the user's handler. The stand-in calls the user's handler
    immediately, or defers the call."""

    def __init__(self, answer: Answer, signals: Signals) -> None:
        self.answer, self.signals = answer, signals

    @_exclude_from_compilation
    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self.signals.call_or_defer(number, frame, self.answer)


class Signals:
    """The stand-ins for this process's handlers, and the signals whose handlers are deferred."""

    def __init__(self) -> None:
        # The code of the running optimizer step, from the step's first bucket to its end. Otherwise None.
        self.step: CodeType | None = None
        self.pid = 0
        self.due: dict[int, Answer] = {}  # deferred handlers by signal, in the order of arrival
        self.reminder: int | None = None  # the signal that makes the main thread check `due` again
        self.installed = False
        self.warned: set[int] = set()
        self.ear = SignalPipe(self._note_ctrl_c)
        # True: Ctrl-C came while the main thread waits for autograd. The next slot raises KeyboardInterrupt.
        self.struck = False
        # True: a slot has raised KeyboardInterrupt, so the handler of that Ctrl-C does nothing.
        self.answered = False

    # ---- stand-ins

    def install(self, apart: bool = False) -> None:
        """Put a stand-in before every handler written in Python, including handlers that are set later.
        `apart` means that autograd runs backwards on a thread of its own."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            return
        self.installed, self.pid = True, os.getpid()
        for number in signal.valid_signals():
            if callable(answer := GET(number)):
                SET(number, SignalStandIn(answer, self))
        free = (number for number in _real_time_signals() if GET(number) is signal.SIG_DFL)
        self.reminder = next(free, None)
        if self.reminder is not None:
            SET(self.reminder, self._answer_reminder)
        signal.signal, signal.getsignal = self._set_behind_stand_in, self._get_behind_stand_in  # type: ignore[assignment]
        if apart:
            self.ear.start_listening()

    def remove(self) -> None:
        """Remove the stand-ins. Then call the deferred handlers, which is safe because user code calls this
        function."""
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        self.installed = self.struck = self.answered = False
        self.ear.stop_listening()
        if signal.signal == self._set_behind_stand_in and signal.getsignal == self._get_behind_stand_in:
            signal.signal, signal.getsignal = SET, GET
        for number in signal.valid_signals():
            if isinstance(answer := GET(number), SignalStandIn):
                SET(number, answer.answer)
        if self.reminder is not None:
            SET(self.reminder, signal.SIG_DFL)
        self.call_due_when_idle()

    def _set_behind_stand_in(self, number: int, answer: Any) -> Any:
        """Set a handler behind a stand-in. User code calls this function in place of `signal.signal`, and
        never sees the stand-in."""
        stands_in = self.installed and callable(answer) and not isinstance(answer, SignalStandIn)
        return _answer_behind_stand_in(SET(number, SignalStandIn(answer, self) if stands_in else answer))

    def _get_behind_stand_in(self, number: int) -> Any:
        return _answer_behind_stand_in(GET(number))

    # ---- immediate and deferred calls of handlers

    def begin_optimizer_step(self, code: CodeType | None) -> None:
        """Begin an optimizer's step, which runs this code.

        An exception may end the step without a call of this class. So other functions search the stack for
        the code.
        """
        self.step = code

    def end_optimizer_step(self) -> None:
        """End an optimizer's step, and call deferred handlers."""
        self.step = None
        self.call_due_when_idle()

    def call_due_when_idle(self) -> None:
        """Call the deferred handlers that may run when the engine is idle and user code continues."""
        if self.due:
            self._call_due_if_allowed(_caller_of_engine(currentframe()))

    def call_due_after_program(self) -> None:
        """Call the deferred handlers after a program, although frames of AROUND_PROGRAMS are still on the
        stack. During an optimizer's step, the handlers remain deferred."""
        if self.due:
            frame = _caller_of_engine(currentframe())
            if not is_code_on_stack(self.step, frame):
                self._call_due_on_main_thread(frame, [*self.due])

    # ---- a backward on autograd's thread

    def _note_ctrl_c(self, number: int) -> None:
        """Record a Ctrl-C for the next slot, if the main thread waits for autograd and Python's own handler
        would run. The pipe's thread calls this method."""
        if number == signal.SIGINT and _is_main_waiting_for_autograd():
            answer = GET(number)
            self.struck = isinstance(answer, SignalStandIn) and answer.answer is signal.default_int_handler

    def raise_in_backward(self) -> None:
        """Raise KeyboardInterrupt on autograd's thread. The first slot after a Ctrl-C calls this method."""
        if not _is_main_waiting_for_autograd():  # the main thread runs the handler itself
            self.struck = False
        elif not is_code_on_stack(self.step, currentframe()):
            self.struck = False
            self.answered = self.due.pop(signal.SIGINT, None) is None
            raise KeyboardInterrupt

    def call_or_defer(self, number: int, frame: FrameType | None, answer: Answer) -> None:
        if number == signal.SIGINT:
            answered, self.answered, self.struck = self.answered, False, False
            if answered:
                return
        once_more = number == signal.SIGINT and number in self.due
        if not once_more and os.getpid() == self.pid and self._must_wait(frame, answer):
            if answer is signal.default_int_handler and is_code_on_stack(self.step, frame):
                log.warning("teraio: Ctrl-C deferred to the end of this optimizer step")
            if number not in self.due:
                self.due[number] = answer
                _thread.start_new_thread(self._remind_until_answered, (number,))
        else:
            self.due.pop(number, None)
            self._call_answer(number, frame, answer)

    @_exclude_from_compilation
    def _answer_reminder(self, _: int, frame: FrameType | None) -> None:
        self._call_due_if_allowed(frame)

    def _call_due_if_allowed(self, frame: FrameType | None) -> None:
        due = [*self.due.items()]  # a copy, because more signals may arrive meanwhile
        self._call_due_on_main_thread(
            frame, [number for number, answer in due if not self._must_wait(frame, answer)]
        )

    def _call_due_on_main_thread(self, frame: FrameType | None, numbers: list[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # on autograd's thread; the reminder makes the main thread call the handlers
        for number in numbers:
            # The answer is None if the signal came again and its handler has already run.
            if (answer := self.due.pop(number, None)) is not None:
                self._call_answer(number, frame, answer)

    def _call_answer(self, number: int, frame: FrameType | None, answer: Answer) -> None:
        answer(number, frame)

    def _must_wait(self, frame: FrameType | None, answer: Answer) -> bool:
        if is_code_on_stack(self.step, frame) or _is_engine_at_work(frame):
            return True
        return answer is not signal.default_int_handler and _is_inside_program(frame)

    def _remind_until_answered(self, number: int) -> None:
        """Send the reminder when the main thread could run the deferred handler.

        This function runs on a thread of its own, because Python runs handlers on the main thread only.
        """
        main = threading.main_thread().ident or 0
        began = time.monotonic()
        while (answer := self.due.get(number)) is not None:
            frame = sys._current_frames().get(main)
            waits, later = _is_backward_frame(frame), self._must_wait(frame, answer)
            if waits:  # during a backward, Python would not notice the reminder
                self.struck = self.struck or answer is signal.default_int_handler
            elif self.reminder is not None and not later:
                signal.pthread_kill(main, self.reminder)
            time.sleep(RECHECK_S if later and not waits else AFTER_REMINDER_S)
            if time.monotonic() - began > WARN_AFTER_S and number not in self.warned:
                self.warned.add(number)
                name = _signal_name(number)
                log.warning("teraio: %s handler deferred: a program or an optimizer step still runs", name)


def _real_time_signals() -> range:
    """Return the real-time signals, the last signal first, because other libraries use the first signals."""
    return range(signal.SIGRTMAX, signal.SIGRTMIN, -1)


def _signal_name(number: int) -> str:
    """Return the signal's name, or `signal N`, because most real-time signals have no name."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _answer_behind_stand_in(answer: Any) -> Any:
    return answer.answer if isinstance(answer, SignalStandIn) else answer


def _is_main_waiting_for_autograd() -> bool:
    """Return whether the main thread waits in C++ for a backward that other threads run."""
    return _is_backward_frame(sys._current_frames().get(threading.main_thread().ident or 0))


def _is_backward_frame(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def is_code_on_stack(code: CodeType | None, frame: FrameType | None) -> bool:
    """Return whether this frame or one of its callers executes the code."""
    return any(each.f_code is code for each in _frames_up_to_answer(frame))


def _is_inside_program(frame: FrameType | None) -> bool:
    files = (f.f_code.co_filename for f in _frames_up_to_answer(frame))
    return any(part in file for file in files for part in AROUND_PROGRAMS)


def _frames_up_to_answer(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame and its callers, up to the frame of a running handler. A handler is user code, whatever
    code it interrupted."""
    while frame is not None and frame.f_code is not Signals._call_answer.__code__:
        yield frame
        frame = frame.f_back


def _caller_of_engine(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called the engine."""
    while frame is not None and _is_runtime_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_engine_at_work(frame: FrameType | None) -> bool:
    """Return whether the engine itself is at work. A program or user code that the engine has called does not
    count as the engine."""
    while frame is not None and _is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _is_runtime_file(frame.f_code.co_filename)


@functools.cache
def _is_runtime_file(file: str) -> bool:
    return os.path.realpath(file).startswith(OURS)


@functools.cache
def _is_library_file(file: str) -> bool:
    return file.startswith(ANYONES) or os.path.dirname(os.path.realpath(file)) in ANYONES_FOLDERS


SIGNALS = Signals()
# Without this call, a forked child would write into its parent's pipe.
os.register_at_fork(after_in_child=SIGNALS.ear.stop_listening)
