"""Ranks: each has an engine, a store and a plan of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch


def test_two_ranks_with_ddp_train_bit_equal_within_their_budgets(tmp_path: Path) -> None:
    child = Path(__file__).with_name("ranks_train.py")
    command = [sys.executable, str(child), str(tmp_path / "ranks"), "9.25MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.distributed reads and writes weights unseen" in done.stderr
    for rank in (0, 1):
        plain, ours = (torch.load(tmp_path / "ranks" / f"{name}.{rank}") for name in ("plain", "9.25MiB"))
        assert plain["losses"] == ours["losses"]
        assert all(torch.equal(one, other) for one, other in zip(plain["weights"], ours["weights"]))
        assert ours["moved"] > 5, "nothing moved: the test shows nothing"
