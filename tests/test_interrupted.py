"""Ctrl-C and `kill -9` in the middle of training: whole steps, whole checkpoints, nothing left behind."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from interrupted import WARM, Training, killed
from store_rig import Left

from teraio.runtime.interrupts import Interrupts

CHILD = Path(__file__).with_name("interrupted.py")


def test_after_ctrl_c_at_any_moment_training_goes_on_from_a_whole_step() -> None:
    ran = subprocess.run([sys.executable, str(CHILD), "8", "3"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["torn"] == found["errors"] == 0, ran.stderr[-3000:]
    assert found["interrupted"] + found["swallowed"] >= 8
    assert found["moved"] > 0


def test_after_a_kill_training_goes_on_from_the_last_checkpoint_and_nothing_is_left(root: Path) -> None:
    chance, plain, found, steps = random.Random(0), Training(None), Training(None), 0
    for _ in range(2):
        killed(root, chance)
        number = found.load(root / "last.pt")
        assert number >= steps + WARM
        for step in range(steps, number):
            plain.step(step)
        steps = number
        assert found.digest() == plain.digest()
        left = Left(root / "store")
        assert left.named_bytes == left.names_after_start == 0
        assert not left.owners


def test_ctrl_c_is_taken_only_from_python_itself_and_only_by_the_main_thread() -> None:
    taken = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for call in (taken.install, taken.remove):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        taken.install()
        taken.remove()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_outside_of_all_code_is_answered_at_once() -> None:
    pressed, guarded = Interrupts(), []
    pressed.guard = lambda: guarded.append(True)
    with pytest.raises(KeyboardInterrupt):
        pressed._pressed(signal.SIGINT, None)
    assert guarded and not pressed.waiting
