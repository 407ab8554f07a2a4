"""Checks of Ctrl-C during a backward, which runs on autograd's own thread.

Ctrl-C must end the backward between two kernels, and the training must be able to continue.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

import teraio
from teraio.backend import backend
from teraio.runtime.eager.signals import SIGNALS

SIDE, LAYERS, MIDDLE = 256, 8, 4
OPTIONS: dict[str, Any] = {
    "memory": "6MiB",
    "host_memory": "64MiB",
    "inner": "eager",
    "planner": "greedy",
}
HAPPENED: list[str] = []
RINGS: list[signal.Signals] = []


def _happens(x: torch.Tensor, what: str) -> torch.Tensor:
    if RINGS and what == "middle":
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), RINGS[0])
        time.sleep(0.2)
    if RINGS:
        HAPPENED.append(what)
    return x.clone()


@torch.library.custom_op("teraio_checks::happens", mutates_args=())
def happens(x: torch.Tensor, what: str) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("teraio_checks::happens_back", mutates_args=())
def happens_back(x: torch.Tensor, what: str) -> torch.Tensor:
    return _happens(x, what)


for op in (happens, happens_back):
    op.register_fake(lambda x, what: torch.empty_like(x))


def _keeps(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.what = inputs[1]


happens.register_autograd(
    lambda ctx, gradient: (happens_back(gradient, ctx.what), None), setup_context=_keeps
)


class Model(torch.nn.Module):
    """A model with a custom operator after each layer. In the backward, the operator adds its name to the
    list HAPPENED.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = happens(layer(x), "middle" if number == MIDDLE else str(number))
        return x


class Training:
    """A model and its optimizer. If `budget` is True, teraio compiles the model."""

    def __init__(self, budget: bool) -> None:
        HAPPENED.clear()
        RINGS.clear()
        torch.manual_seed(0)
        self.model = Model().cuda()
        self.called: Any = self.model
        if budget:
            self.called = torch.compile(self.model, backend=backend, dynamic=False, options=OPTIONS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number: int) -> float:
        drawn = torch.Generator().manual_seed(number)
        loss = self.called(torch.randn(64, SIDE, generator=drawn).cuda()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def _ended() -> None:
    RINGS.clear()
    teraio.reset()
    torch._dynamo.reset()


def _plain(steps: int) -> list[float]:
    training = Training(False)
    return [training.step(number) for number in range(steps)]


def check_ctrl_c_ends_a_backward_between_two_kernels() -> None:
    plain = _plain(10)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours = Training(True)
    try:
        losses = [ours.step(number) for number in range(6)]
        RINGS.append(signal.SIGINT)
        interrupted = 0
        try:
            ours.step(6)
        except KeyboardInterrupt:
            interrupted += 1
            for _ in range(10_000):  # gives a second KeyboardInterrupt time to arrive
                pass
        assert interrupted == 1
        assert [str(number) for number in range(LAYERS - 1, MIDDLE, -1)] + ["middle"] == HAPPENED, HAPPENED
        assert not SIGNALS.answered and not SIGNALS.struck and not SIGNALS.due
        RINGS.clear()
        ours.optimizer.zero_grad()
        losses += [ours.step(number) for number in range(6, 10)]
        assert losses == plain, "the numbers differ after repeating the interrupted step"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        _ended()


def check_later_ctrl_c_is_answered_too() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours = Training(True)
    try:
        for number in range(4):
            ours.step(number)
        for _ in range(3):
            RINGS.append(signal.SIGINT)
            try:
                ours.step(5)
                raise AssertionError("not interrupted")
            except KeyboardInterrupt:
                RINGS.clear()
            try:
                signal.raise_signal(signal.SIGINT)  # a signal while no backward runs
                raise AssertionError("not interrupted")
            except KeyboardInterrupt:
                pass
            ours.optimizer.zero_grad()
    finally:
        _ended()


def check_a_users_sigint_action_runs_once_after_the_backward() -> None:
    heard: list[tuple[bool, int]] = []
    ours = Training(True)

    def mine(number: int, frame: Any) -> None:
        at_main = threading.current_thread() is threading.main_thread()
        heard.append((at_main, len(HAPPENED)))
        assert all(bool(weight.isfinite().all()) for weight in ours.model.parameters())

    for answered in (signal.SIGTERM, signal.SIGINT):
        before = signal.signal(answered, mine)
        try:
            for number in range(4):
                ours.step(number)
            RINGS.append(answered)
            ours.step(5)
            assert heard == [(True, LAYERS)], heard
        finally:
            signal.signal(answered, before)
            RINGS.clear()
            HAPPENED.clear()
            heard.clear()
    _ended()


def check_signals_of_a_child_are_not_received() -> None:
    """Check that signals of a forked child do not reach the parent. The child has inherited the parent's
    handlers.
    """
    ours = Training(True)
    try:
        for number in range(4):
            ours.step(number)
        heard: list[int] = []
        SIGNALS.ear.heard = heard.append
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        os.waitpid(child, 0)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 10
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard == [signal.SIGUSR2], heard
    finally:
        _ended()
    assert SIGNALS.ear.pipe is None and signal.set_wakeup_fd(-1) == -1
