"""Handlers of signals. Python may call a handler between any two lines, even while the engine moves a tensor.

A handler is user code and may read weights. So teraio runs a handler only where user code may run:

    while a program is compiled or runs, while the engine works,    the handler is deferred until this ends
    during an optimizer's step
    at any other time                                               the handler runs immediately

Python's own handler of Ctrl-C raises KeyboardInterrupt. It is deferred only while the engine works, and
during an optimizer's step. All weights and states therefore belong to the same step. It is not deferred while
a program runs: it ends the program between two kernels. The handler of a second Ctrl-C is never deferred,
even if the handler is the user's.

On a GPU, autograd runs a backward on a thread of its own. Python runs no handler until the whole backward has
ended. teraio ends the backward sooner after a Ctrl-C:

    signal_pipe.py    notices the signal
    the next slot     raises KeyboardInterrupt on autograd's thread
    autograd          raises the exception again on the main thread
    Python's handler  runs on the main thread after that. teraio makes it do nothing, because the
                      exception has been raised already
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

OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep  # the folder `runtime`
# Folders of torch and of Python's library. Both the engine and user code call functions of these libraries.
# So a frame of such a function counts as a frame of its caller. `<` is for `<string>`: the file name of code
# that Python generates, such as the `__init__` of a dataclass.
ANYONES = (os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<")
FACE = os.path.dirname(os.path.realpath(teraio.errors.__file__))
ALL_OURS = tuple(
    os.path.realpath(os.path.join(FACE, *part)) + os.sep for part in ((), ("passes",), ("runtime",))
)
ANYONES_FOLDERS = {FACE, os.path.join(FACE, "formats"), os.path.join(FACE, "session")}
# Files of torch that compile a program, call the program, and make views of its results. While a program is
# compiled or runs, a function of these files is on the stack.
AROUND_PROGRAMS = ("/_functorch/_aot_autograd/", "/_dynamo/convert_frame.py")
SET, GET = signal.signal, signal.getsignal
RECHECK_S = 0.001
AFTER_REMINDER_S = 0.05  # pause after a reminder; long, because Python may notice the signal late
WARN_AFTER_S = 2.0  # if a handler is deferred for longer, a warning reports it


def _exclude_from_compilation(does: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a handler from compilation by Dynamo. A signal may arrive while Dynamo compiles each called
    function."""

    def called(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return does(*args)
        finally:
            set_eval_frame(prior)

    skip_code(called.__code__)
    return called


class SignalStandIn:
    """A handler that Python calls in place of another handler (the user's, or Python's for Ctrl-C). The
    stand-in calls that handler immediately, or defers the call."""

    def __init__(self, answer: Answer, signals: Signals) -> None:
        self.answer, self.signals = answer, signals

    @_exclude_from_compilation
    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self.signals.call_or_defer(number, frame, self.answer)


class Signals:
    """The stand-ins for this process's handlers, and the signals whose handlers are deferred."""

    def __init__(self) -> None:
        # The code object of the running optimizer's step function. None if no optimizer's step runs.
        self.step: CodeType | None = None
        # True: a backward has run updates, and `step()` has not confirmed them yet (backward_updates.py).
        self.in_backward_updates = False
        self.pid = 0
        self.due: dict[int, Answer] = {}  # signal number -> deferred handler, in the order of arrival
        self.reminder: int | None = None  # number of the signal that makes the main thread check `due` again
        self.installed = False
        self.warned: set[int] = set()
        self.ear = SignalPipe(self._note_ctrl_c)
        # True: a Ctrl-C came while the main thread waited for autograd. The next slot raises
        # KeyboardInterrupt.
        self.struck = False
        # True: a slot has raised KeyboardInterrupt for a Ctrl-C. Python's later call of the handler for this
        # Ctrl-C does nothing.
        self.answered = False

    # ---- stand-ins

    def install(self, apart: bool = False) -> None:
        """Replace every handler written in Python by a stand-in, also handlers that user code sets later.
        `apart` is True if autograd runs backwards on a thread of its own."""
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
        """Restore the handlers that stand-ins replaced, and call the deferred handlers. Call this method
        where user code may run."""
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
        """Set a handler, with a stand-in in its place. While stand-ins are installed, this function is
        `signal.signal`. It returns the previous handler, and never a stand-in."""
        stands_in = self.installed and callable(answer) and not isinstance(answer, SignalStandIn)
        return _answer_behind_stand_in(SET(number, SignalStandIn(answer, self) if stands_in else answer))

    def _get_behind_stand_in(self, number: int) -> Any:
        return _answer_behind_stand_in(GET(number))

    # ---- immediate and deferred calls of handlers

    def begin_optimizer_step(self, code: CodeType | None) -> None:
        """Begin an optimizer's step. `code` is the code object of its step function.

        An exception may end the step without a call of `end_optimizer_step`. So a step counts as running only
        while `code` is on the stack.
        """
        self.step = code

    def end_optimizer_step(self) -> None:
        """End an optimizer's step, and call the handlers that were deferred meanwhile."""
        self.step = None
        self.call_due_when_idle()

    def begin_backward_updates(self) -> None:
        """Begin to defer all handlers, because a backward runs updates. Until `step()` has confirmed the
        updates, weights belong to no whole step."""
        self.in_backward_updates = True

    def end_backward_updates(self) -> None:
        """End the time since `begin_backward_updates`. Deferred handlers run when the engine's work ends."""
        self.in_backward_updates = False

    def call_due_when_idle(self) -> None:
        """Call the deferred handlers that may run now that the engine has ended its work."""
        if self.due:
            self._call_due_if_allowed(_caller_of_engine(currentframe()))

    def call_due_after_program(self) -> None:
        """Call all deferred handlers, because a program has ended. The stack still has functions of
        AROUND_PROGRAMS, but they are ignored. During an optimizer's step, call no handler."""
        if self.due:
            frame = _caller_of_engine(currentframe())
            if not self._is_stepping(frame):
                self._call_due_on_main_thread(frame, [*self.due])

    # ---- a backward on autograd's thread

    def _note_ctrl_c(self, number: int) -> None:
        """Record a Ctrl-C for the next slot. The thread of the signal pipe calls this method.

        Record it only if the main thread waits for autograd, and if Python's own handler is set for Ctrl-C.
        """
        if number == signal.SIGINT and _is_main_waiting_for_autograd():
            answer = GET(number)
            self.struck = isinstance(answer, SignalStandIn) and answer.answer is signal.default_int_handler

    def raise_in_backward(self) -> None:
        """Raise KeyboardInterrupt on autograd's thread. A slot calls this method after a Ctrl-C."""
        if not _is_main_waiting_for_autograd():  # the main thread can run the handler itself
            self.struck = False
        elif not self._is_stepping(currentframe()):
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
            if answer is signal.default_int_handler and self._is_stepping(frame):
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
            return  # this is autograd's thread; a reminder will make the main thread call the handlers
        for number in numbers:
            # `due` has no handler any more if the signal came again, and its handler ran immediately.
            if (answer := self.due.pop(number, None)) is not None:
                self._call_answer(number, frame, answer)

    def _call_answer(self, number: int, frame: FrameType | None, answer: Answer) -> None:
        answer(number, frame)

    def _is_stepping(self, frame: FrameType | None) -> bool:
        """Return whether weights belong to no whole step: an optimizer's step runs on the stack of this
        frame, or a backward has run updates."""
        return self.in_backward_updates or is_code_on_stack(self.step, frame)

    def _must_wait(self, frame: FrameType | None, answer: Answer) -> bool:
        if self._is_stepping(frame) or _is_engine_at_work(frame):
            return True
        return answer is not signal.default_int_handler and _is_inside_program(frame)

    def _is_main_busy(self, main: int, answer: Answer) -> tuple[bool, bool]:
        """Return whether the main thread waits for a backward, and whether the handler must still wait.

        No frame of the main thread may be kept. A frame of a backward keeps gradients alive, and autograd
        would then copy them.
        """
        frame = sys._current_frames().get(main)
        return _is_backward_frame(frame), self._must_wait(frame, answer)

    def _remind_until_answered(self, number: int) -> None:
        """Send the reminder signal to the main thread as soon as the deferred handler may run.

        This method runs on a thread of its own. Python runs handlers only on the main thread, so the main
        thread must receive a signal to check `due` again.
        """
        main = threading.main_thread().ident or 0
        began = time.monotonic()
        while (answer := self.due.get(number)) is not None:
            waits, later = self._is_main_busy(main, answer)
            if waits:  # the main thread waits for a backward in C++, and would not notice the reminder
                self.struck = self.struck or answer is signal.default_int_handler
            elif self.reminder is not None and not later:
                signal.pthread_kill(main, self.reminder)
            time.sleep(RECHECK_S if later and not waits else AFTER_REMINDER_S)
            if time.monotonic() - began > WARN_AFTER_S and number not in self.warned:
                self.warned.add(number)
                name = _signal_name(number)
                log.warning("teraio: %s handler deferred: a program or an optimizer step still runs", name)


def _real_time_signals() -> range:
    """Return the numbers of real-time signals, the last first, because other libraries use the first ones."""
    return range(signal.SIGRTMAX, signal.SIGRTMIN, -1)


def _signal_name(number: int) -> str:
    """Return the signal's name. For a signal without a name, such as most real-time signals, return
    `signal N`."""
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
    """Yield the frame and its callers. Stop before the frame that calls a handler: a handler is user code,
    and the code that it interrupted does not count."""
    while frame is not None and frame.f_code is not Signals._call_answer.__code__:
        yield frame
        frame = frame.f_back


def _caller_of_engine(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside of the engine's files, which is the engine's caller."""
    while frame is not None and _is_runtime_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_engine_at_work(frame: FrameType | None) -> bool:
    """Return whether the frame belongs to the engine, or to a library function that the engine has called.

    A frame of user code or of a program does not belong to the engine, even if the engine has called it.
    """
    while frame is not None and _is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _is_runtime_file(frame.f_code.co_filename)


@functools.cache
def _is_runtime_file(file: str) -> bool:
    return os.path.realpath(file).startswith(OURS)


@functools.cache
def _is_library_file(file: str) -> bool:
    return file.startswith(ANYONES) or os.path.dirname(os.path.realpath(file)) in ANYONES_FOLDERS


def is_user_file(file: str) -> bool:
    """Return whether this file belongs neither to teraio, nor to torch, nor to Python's library. Code that
    Inductor has generated is torch's."""
    ours = os.path.realpath(file).startswith(ALL_OURS)
    return not (ours or _is_library_file(file) or "torchinductor" in file)


SIGNALS = Signals()
# A forked child has its parent's pipe. The child must not write its signals into this pipe.
os.register_at_fork(after_in_child=SIGNALS.ear.stop_listening)
