"""Ctrl-C and `kill -9` during a training: each step and each checkpoint is complete, and the store leaves no
files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import tree
from interrupted import WARM, Training, killed
from store_rig import Left

CHILD = tree.SUPPORT / "interrupted.py"


def test_training_after_ctrl_c_resumes_from_whole_step() -> None:
    ran = subprocess.run([sys.executable, str(CHILD), "8", "3"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["torn"] == found["errors"] == 0, ran.stderr[-3000:]
    assert found["interrupted"] + found["swallowed"] >= 8
    assert found["moved"] > 0


def test_training_after_kill_resumes_from_checkpoint_without_leftovers(root: Path) -> None:
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
