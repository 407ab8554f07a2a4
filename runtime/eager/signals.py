"""The handler of a signal is user code, and runs where user code does. Python calls it between any two lines:
also where the engine is in the middle of a move.

    a program is compiled or runs, the engine works, an optimizer steps    it waits for the end
    elsewhere                                                              at once

Ctrl-C, where the answer to it is Python's own, waits for the engine and for the end of an optimizer's step,
so that weights and states are those of a whole step; a program is ended between two kernels. Pressed once
more, whoever answers it, it waits for nothing.

On a GPU, autograd runs a backward on a thread of its own, and Python runs no handler until the whole backward
has ended. Ctrl-C ends it sooner: `signal_pipe.py` hears the signal, the next slot raises KeyboardInterrupt on
that thread, autograd carries it to the main thread, and the handler that runs there then has nothing left to
do.
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

OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep  # all of the runtime
# They are called by the engine, or by a program, or by user code: who called them decides. So it is with what
# Python writes itself, the `__init__` of a dataclass for one: its file is `<string>`.
ANYONES = (os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<")
FACE = os.path.dirname(os.path.realpath(teraio.errors.__file__))
ANYONES_FOLDERS = {FACE, os.path.join(FACE, "formats"), os.path.join(FACE, "session")}
# Their frames are around those of a program: they compile it, call it, and make views of what it returns.
AROUND_PROGRAMS = ("/_functorch/_aot_autograd/", "/_dynamo/convert_frame.py")
SET, GET = signal.signal, signal.getsignal
AGAIN_S = 0.001
SENT_S = 0.05  # it may be long until Python sees a signal
TOLD_S = 2.0  # a handler that waits longer is told of


def _exclude_from_compilation(does: Callable[..., Any]) -> Callable[..., Any]:
    """A handler may be called where Dynamo looks at every function, and is none that it is to compile."""

    def called(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return does(*args)
        finally:
            set_eval_frame(prior)

    skip_code(called.__code__)
    return called


class SignalStandIn:
    """What stands in for a handler."""

    def __init__(self, answer: Answer, signals: Signals) -> None:
        self.answer, self.signals = answer, signals

    @_exclude_from_compilation
    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self.signals.call_or_defer(number, frame, self.answer)


class Signals:
    def __init__(self) -> None:
        self.step: CodeType | None = None  # of an optimizer that is between its first bucket and its end
        self.pid = 0
        self.due: dict[int, Answer] = {}  # they wait, in the order in which they came
        self.reminder: int | None = None  # a signal of ours: the moment may be better now
        self.installed = False
        self.told: set[int] = set()
        self.ear = SignalPipe(self._note_ctrl_c)
        self.struck = False  # Ctrl-C came while the main thread waits for autograd: the next slot raises
        self.answered = False  # a slot has raised for a signal whose handler is still to run

    # ---- in whose place

    def install(self, apart: bool = False) -> None:
        """Stands in for all handlers that are written in Python: those that are there, and those to come.
        `apart`: autograd runs backwards on a thread of its own."""
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
        """What waits runs now: this is called by user code."""
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
        """In place of `signal.signal`: no one sees who stands in."""
        stands_in = self.installed and callable(answer) and not isinstance(answer, SignalStandIn)
        return _answer_behind_stand_in(SET(number, SignalStandIn(answer, self) if stands_in else answer))

    def _get_behind_stand_in(self, number: int) -> Any:
        return _answer_behind_stand_in(GET(number))

    # ---- now, or later

    def begin_optimizer_step(self, code: CodeType | None) -> None:
        """A step of an optimizer. An exception may end it, which no one tells us."""
        self.step = code

    def end_optimizer_step(self) -> None:
        """The step is whole."""
        self.step = None
        self.call_due_when_idle()

    def call_due_when_idle(self) -> None:
        """The engine has nothing left to do, and user code goes on."""
        if self.due:
            self._call_due_if_allowed(_caller_of_engine(currentframe()))

    def call_due_after_program(self) -> None:
        """Nor has it here, though the frames that called the program are there."""
        if self.due:
            frame = _caller_of_engine(currentframe())
            if not is_code_on_stack(self.step, frame):
                self._call_due_on_main_thread(frame, [*self.due])

    # ---- a backward on autograd's thread

    def _note_ctrl_c(self, number: int) -> None:
        """The ear's thread: a signal came, whose handler the main thread may not run for long."""
        if number == signal.SIGINT and _is_main_waiting_for_autograd():
            answer = GET(number)
            self.struck = isinstance(answer, SignalStandIn) and answer.answer is signal.default_int_handler

    def raise_in_backward(self) -> None:
        """A slot, when Ctrl-C has struck: raises KeyboardInterrupt on autograd's thread."""
        if not _is_main_waiting_for_autograd():  # the main thread answers it itself
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
                log.warning("teraio: Ctrl-C: after this step of the optimizer")
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
        due = [*self.due.items()]  # more may come in the middle of this
        self._call_due_on_main_thread(
            frame, [number for number, answer in due if not self._must_wait(frame, answer)]
        )

    def _call_due_on_main_thread(self, frame: FrameType | None, numbers: list[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # autograd's: the reminder comes when the main thread may
        for number in numbers:
            if (answer := self.due.pop(number, None)) is not None:  # else it came again, and has run
                self._call_answer(number, frame, answer)

    def _call_answer(self, number: int, frame: FrameType | None, answer: Answer) -> None:
        answer(number, frame)

    def _must_wait(self, frame: FrameType | None, answer: Answer) -> bool:
        if is_code_on_stack(self.step, frame) or _is_engine_at_work(frame):
            return True
        return answer is not signal.default_int_handler and _is_inside_program(frame)

    def _remind_until_answered(self, number: int) -> None:
        """A thread: sends the reminder when the main thread looks as if it could take it. That no other than
        the main thread runs handlers is Python's rule."""
        main = threading.main_thread().ident or 0
        began = time.monotonic()
        while (answer := self.due.get(number)) is not None:
            frame = sys._current_frames().get(main)
            waits, later = _is_backward_frame(frame), self._must_wait(frame, answer)
            if waits:  # it would see no reminder
                self.struck = self.struck or answer is signal.default_int_handler
            elif self.reminder is not None and not later:
                signal.pthread_kill(main, self.reminder)
            time.sleep(AGAIN_S if later and not waits else SENT_S)
            if time.monotonic() - began > TOLD_S and number not in self.told:
                self.told.add(number)
                log.warning("teraio: %s: its handler waits for the end of what runs", _signal_name(number))


def _real_time_signals() -> range:
    """The last comes first: the first are those that others use."""
    return range(signal.SIGRTMAX, signal.SIGRTMIN, -1)


def _signal_name(number: int) -> str:
    """Of those of real time only the first and the last have one."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _answer_behind_stand_in(answer: Any) -> Any:
    return answer.answer if isinstance(answer, SignalStandIn) else answer


def _is_main_waiting_for_autograd() -> bool:
    """Return whether the main thread waits in C++ for a backward, which other threads run."""
    return _is_backward_frame(sys._current_frames().get(threading.main_thread().ident or 0))


def _is_backward_frame(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def is_code_on_stack(code: CodeType | None, frame: FrameType | None) -> bool:
    """Whether this frame, or one that called it, executes the code."""
    return any(each.f_code is code for each in _frames_up_to_answer(frame))


def _is_inside_program(frame: FrameType | None) -> bool:
    files = (f.f_code.co_filename for f in _frames_up_to_answer(frame))
    return any(part in file for file in files for part in AROUND_PROGRAMS)


def _frames_up_to_answer(frame: FrameType | None) -> Iterator[FrameType]:
    """Who called whom. Where a handler runs, user code does, whoever was interrupted by it."""
    while frame is not None and frame.f_code is not Signals._call_answer.__code__:
        yield frame
        frame = frame.f_back


def _caller_of_engine(frame: FrameType | None) -> FrameType | None:
    """Who called the engine."""
    while frame is not None and _is_runtime_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_engine_at_work(frame: FrameType | None) -> bool:
    """Whether the engine is at work, and not a program or user code that it has called."""
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
os.register_at_fork(
    after_in_child=SIGNALS.ear.stop_listening
)  # or it would write into the pipe of its parent
