"""Signal handlers. They run only where user code may run, and read the weights' true bytes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import tree
from children import ended
from interrupted import Training
from torch import library
from torch._C import DisableTorchFunctionSubclass

import teraio
from teraio.runtime.eager import signals
from teraio.runtime.eager.signals import SIGNALS, Signals

CHILD = tree.SUPPORT / "signalled.py"
SIDE = 256
NAMELESS = signal.SIGRTMIN + 5
SOON_S = 10.0


@pytest.mark.parametrize(("does", "count"), [("train", 30), ("infer", 60)])
def test_handler_reads_true_weights_and_states_at_any_time(does: str, count: int) -> None:
    ran = ended([sys.executable, str(CHILD), does, str(count), "1"])
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["left"] == found["wrong"] == found["errors"] == found["torn"] == 0, ran.stderr[-3000:]
    assert found["moved"] > 0


def test_sigterm_handler_saves_a_whole_step(root: Path) -> None:
    """Send SIGTERM, as a job scheduler does. The handler saves a checkpoint and exits."""
    path = root / "last.pt"
    with subprocess.Popen(
        [sys.executable, str(CHILD), "leave", str(path), "1"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"warm\n"
        time.sleep(0.05)
        child.terminate()
        assert child.wait(60) == 0
    plain, found = Training(None), Training(None)
    number = found.load(path)
    for step in range(number):
        plain.step(step)
    assert plain.digest() == found.digest()


# ---- a signal while a compiled model runs


@library.custom_op("teraio_tests::rings", mutates_args=())
def rings(x: torch.Tensor) -> torch.Tensor:
    if RINGING:
        signal.raise_signal(RINGING[0])
        HAPPENED.append("rang")
    return x.clone()


@rings.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


rings.register_autograd(lambda _, gradient: rings(gradient))

RINGING: list[signal.Signals] = []
HAPPENED: list[str] = []


class Ringing(torch.nn.Module):
    def __init__(self, views: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.views = views  # number of weights of which `forward` returns views
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.layers[:4]:
            x = layer(x)
        x = rings(x)
        for layer in self.layers[4:]:
            x = layer(x)
        return (x, *(layer.weight.t() for layer in [*self.layers][: self.views]))


class Rig:
    """The compiled model, and a signal handler that compares all weights with their initial values."""

    def __init__(self, memory: str, views: int = 0) -> None:
        self.model = Ringing(views)
        self.weights = [(p, p.detach().clone()) for p in self.model.parameters()]
        options: dict[str, Any] = {"memory": memory, "inner": "eager"}
        self.compiled: Any = torch.compile(self.model, backend="teraio", dynamic=False, options=options)
        self.x = torch.randn(8, SIDE)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self.reads)

    def reads(self, number: int, frame: FrameType | None) -> None:
        assert frame is not None
        HAPPENED.append("same" if all(torch.equal(*pair) for pair in self.weights) else "other")

    def infers(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [*self.compiled(self.x)]

    def trains(self) -> None:
        self.compiled(self.x)[0].square().mean().backward()


@pytest.fixture
def answers_of_before(one_thread: None) -> Iterator[None]:
    RINGING.clear()
    HAPPENED.clear()
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)}
    yield
    RINGING.clear()
    for number, answer in kept.items():
        signal.signal(number, answer)


@pytest.fixture
def rig(answers_of_before: None, root: Path) -> Rig:
    made = Rig("5MiB")
    for _ in range(5):
        made.infers()
    RINGING.append(signal.SIGUSR1)
    return made


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
    assert happened()


def test_handler_waits_for_the_end_of_the_program(rig: Rig) -> None:
    rig.infers()
    assert HAPPENED == ["rang", "same"]
    rig.infers()
    assert HAPPENED == ["rang", "same"] * 2


def test_each_deferred_handler_is_called_once(rig: Rig) -> None:
    def raises_another(*_: Any) -> None:
        signal.raise_signal(signal.SIGUSR2)
        HAPPENED.append("one")

    signal.signal(signal.SIGUSR1, raises_another)
    rig.infers()
    assert HAPPENED == ["rang", "same", "one"]
    RINGING[:] = [signal.SIGUSR2]
    rig.infers()
    assert HAPPENED == ["rang", "same", "one", "rang", "same"]


def test_handler_waits_for_the_end_of_the_backward(answers_of_before: None, root: Path) -> None:
    rig = Rig("7MiB")
    for _ in range(5):
        rig.trains()
    RINGING.append(signal.SIGUSR1)
    rig.trains()
    assert HAPPENED[:2] == ["rang", "same"]
    until(lambda: HAPPENED == ["rang", "same"] * 2)


def test_handler_waits_for_views_made_of_results(answers_of_before: None, root: Path) -> None:
    rig = Rig("5MiB", views=1)
    for _ in range(5):
        rig.infers()
    RINGING.append(signal.SIGUSR1)
    for times in range(1, 4):
        _, view = rig.infers()
        until(lambda: ["rang", "same"] * times == HAPPENED)  # noqa: B023
        assert torch.equal(view.t(), rig.weights[0][1])


def test_exception_of_a_handler_leaves_the_call_and_the_next_call_works(rig: Rig) -> None:
    def late(*_: Any) -> None:
        raise TimeoutError("late")

    signal.signal(signal.SIGUSR1, late)
    with pytest.raises(TimeoutError, match="late"):
        rig.infers()
    signal.signal(signal.SIGUSR1, rig.reads)
    rig.infers()
    assert HAPPENED == ["rang", "rang", "same"]


def test_handler_runs_where_torch_function_is_disabled(rig: Rig) -> None:
    """Raise a signal while torch functions are disabled.

    In each `zero_grad` and before each optimizer step, torch ends a range of the profiler with torch
    functions disabled.
    """
    with DisableTorchFunctionSubclass():
        signal.raise_signal(signal.SIGUSR1)
    assert HAPPENED == ["same"]


# ---- a signal while the engine's code or an optimizer runs


def at_work(number: int, seconds: float = 0.0, by: Sequence[str] = ()) -> None:
    """Raise the signal and sleep, in code that counts as code of the engine.

    This code is called by functions of the files in `by`.
    """
    text = "import signal, time\ndef run(n, s): signal.raise_signal(n); time.sleep(s)"
    run: Any = None
    for file in (*by, f"{signals.OURS}/no_such_file.py"):
        names: dict[str, Any] = {"called": run}
        exec(compile(text, file, "exec"), names)
        run, text = names["run"], "def run(n, s): called(n, s)"
    run(number, seconds)


def test_handler_deferred_by_the_engine_runs_when_user_code_continues(rig: Rig) -> None:
    heard = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    at_work(signal.SIGUSR1)
    assert not heard.is_set()
    assert heard.wait(SOON_S)  # only the handler sets the event
    assert not SIGNALS.due


BY = {
    "torch": f"{signals.ANYONES[0]}no_such_file.py",
    "the standard library": f"{signals.ANYONES[1]}no_such_file.py",
    "a dataclass": "<string>",
    "the package teraio": f"{signals.FACE}/no_such_file.py",
}


@pytest.mark.parametrize("by", BY.values(), ids=BY)
def test_library_code_that_the_engine_calls_counts_as_the_engine(rig: Rig, by: str) -> None:
    at_work(signal.SIGUSR1, by=[by])
    assert HAPPENED == []
    until(lambda: HAPPENED == ["same"])
    # In this call stack, the engine has called user code, so the handler runs immediately.
    at_work(signal.SIGUSR1, by=[by, __file__, by])
    assert HAPPENED == ["same"] * 2


def test_warning_of_a_long_deferred_handler_appears_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "WARN_AFTER_S", 0.01)
    monkeypatch.setattr(SIGNALS, "warned", set())
    with caplog.at_level(logging.WARNING, logger="teraio"):
        for times in (1, 2):
            at_work(signal.SIGUSR1, 0.3)
            until(lambda: ["same"] * times == HAPPENED)  # noqa: B023
    warnings = [r.getMessage() for r in caplog.records if "SIGUSR1" in r.getMessage()]
    assert warnings == ["teraio: SIGUSR1 handler deferred: a program or an optimizer step still runs"]


def test_handler_waits_for_the_end_of_an_optimizer_step(rig: Rig) -> None:
    def step() -> None:
        SIGNALS.begin_optimizer_step(step.__code__)
        signal.raise_signal(signal.SIGUSR1)
        HAPPENED.append("steps")
        SIGNALS.end_optimizer_step()

    step()
    assert HAPPENED == ["steps", "same"]


def test_first_ctrl_c_waits_for_the_engine_and_a_second_for_nothing(rig: Rig) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        at_work(signal.SIGINT)
        HAPPENED.append("worked")
        time.sleep(SOON_S)
    assert HAPPENED == ["worked"]

    def twice() -> None:
        SIGNALS.begin_optimizer_step(twice.__code__)
        signal.raise_signal(signal.SIGINT)
        HAPPENED.append("once")
        signal.raise_signal(signal.SIGINT)
        HAPPENED.append("once more")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert HAPPENED == ["worked", "once"] and not SIGNALS.due


def test_ctrl_c_ends_a_program_between_two_kernels(rig: Rig) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    RINGING[:] = [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        rig.infers()
    assert HAPPENED == []


def test_handler_in_a_forked_process_runs_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SIGNALS, "pid", os.getpid() + 1)
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    at_work(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] and not SIGNALS.due


# ---- functions of Python's signal module that the engine replaces


def test_signal_functions_return_the_users_handlers(rig: Rig) -> None:
    def mine(*_: Any) -> None: ...

    assert signal.getsignal(signal.SIGUSR2) == rig.reads
    assert signal.signal(signal.SIGUSR2, mine) == rig.reads
    assert signal.getsignal(signal.SIGUSR2) is mine
    assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is mine
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    assert signal.signal(signal.SIGUSR2, signal.SIG_DFL) is signal.SIG_IGN
    with pytest.raises(TypeError, match="must be"):
        signal.signal(signal.SIGUSR2, "mine")  # type: ignore[arg-type]


def test_reset_puts_all_handlers_and_signal_functions_back(answers_of_before: None, root: Path) -> None:
    def mine(*_: Any) -> None: ...

    before = signal.signal, signal.getsignal
    signal.signal(signal.SIGALRM, mine)
    rig = Rig("5MiB")
    rig.infers()
    assert signal.getsignal(signal.SIGALRM) is mine
    assert signals.GET(signal.SIGPIPE) is signal.SIG_IGN
    assert isinstance(signals.GET(signal.SIGALRM), signals.SignalStandIn)
    assert isinstance(signals.GET(signal.SIGUSR1), signals.SignalStandIn)
    reminder = SIGNALS.reminder
    assert reminder is not None and callable(signals.GET(reminder))
    teraio.reset()
    assert (signal.signal, signal.getsignal) == before
    assert signals.GET(signal.SIGALRM) is mine
    assert signals.GET(signal.SIGUSR1) == rig.reads
    assert signals.GET(reminder) is signal.SIG_DFL


def test_deferred_handler_is_called_by_reset(rig: Rig) -> None:
    SIGNALS.due[signal.SIGUSR1] = rig.reads
    teraio.reset()
    assert HAPPENED == ["same"]


def test_stand_ins_are_installed_only_from_the_main_thread() -> None:
    taken = Signals()
    before = signal.signal
    for call in (taken.install, taken.remove):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert not taken.installed and signal.signal is before


def test_ctrl_c_without_a_frame_is_answered_at_once() -> None:
    pressed = Signals()
    pressed.pid = os.getpid()
    with pytest.raises(KeyboardInterrupt):
        pressed.call_or_defer(signal.SIGINT, None, signal.default_int_handler)
    assert not pressed.due
