"""Ranks of a distributed training: each rank has its own engine, store and plan."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import tree
from children import ended, forked


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


SHARDED = """
import os, torch, torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)
    def forward(self, x):
        return torch.tanh(self.linear(x))
model = Model()
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="teraio", options={"memory": "64MiB", "inner": "eager"})
compiled(torch.randn(8, 256)).sum().backward()
optimizer.step()
"""


def test_sharded_parameters_are_refused_by_name() -> None:
    done = ended([sys.executable, "-c", SHARDED])
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedError: AdamW steps parameters of type DTensor" in last
