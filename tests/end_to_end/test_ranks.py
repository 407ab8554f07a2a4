"""Ranks of a distributed training: each rank has its own engine, store and plan."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import tree
from children import ended, forked

SCENARIOS = ("gradients_by_hand",)


def test_two_ranks_with_ddp_train_bit_equal_within_their_budgets(tmp_path: Path) -> None:
    child = tree.SUPPORT / "ranks_train.py"
    done = forked(child, str(tmp_path / "ranks"), "9.25MiB")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unseen" not in done.stderr, "the engine notices reads and writes of torch.distributed"
    for rank in (0, 1):
        plain, ours = (torch.load(tmp_path / "ranks" / f"{name}.{rank}") for name in ("plain", "9.25MiB"))
        assert plain["losses"] == ours["losses"]
        assert all(torch.equal(one, other) for one, other in zip(plain["weights"], ours["weights"]))
        assert ours["moved"] > 5, "nothing moved: the test shows nothing"


def test_sharded_models_train_bit_equal_within_their_budgets(tmp_path: Path) -> None:
    """Check a loop that sums, scales and clips gradients. tests/long/sharded.py has more loops."""
    child = tree.SUPPORT / "sharded_train.py"
    done = forked(child, str(tmp_path / "sharded"), "14MiB", "eager", *SCENARIOS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {(row["scenario"], row["rank"]) for row in rows} == {(n, r) for n in SCENARIOS for r in (0, 1)}
    for row in rows:
        assert row["difference"] == "", row
        assert row["values"] > 40


@cache
def refusals() -> dict[str, str]:
    done = ended([sys.executable, str(tree.SUPPORT / "shard_child.py")])
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no group", "this process has no process group. Start the program with torchrun"),
        ("twice", "this model is already sharded"),
        ("part before", "module Linear is already sharded"),
        ("optimizer before", "an optimizer (AdamW) already has weights of this model"),
        ("gradient before", "weight 0.weight has a gradient"),
        ("other device", "is on cpu, and the mesh is on meta"),
        ("recurrent", "LSTM._flat_weights has weights of the model beside its parameters"),
        ("fully_shard", "is divided among ranks by fully_shard"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(case: str, text: str) -> None:
    assert text in refusals()[case]


@pytest.mark.parametrize(
    "case", ["weight", "forward", "gradient", "name", "copy", "signature", "frozen weight"]
)
def test_a_sharded_model_behaves_like_the_model(case: str) -> None:
    assert refusals()[case] == "ok"


@pytest.mark.parametrize(
    "case", ["module added later", "weight in a closure", "block added later", "nothing added"]
)
def test_weights_that_each_rank_trains_for_itself_are_named_once(case: str) -> None:
    assert refusals()[case] == "ok"
