"""A training on two ranks with DistributedDataParallel over gloo.

`ranks_train.py FOLDER MEMORY` trains plainly and within MEMORY per rank, and writes each rank's results.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import teraio

WIDTH, ROWS, STEPS = 256, 512, 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def work(rank: int, folder: str, memory: str) -> None:
    if not memory:
        os.environ["TERAIO_DISABLE"] = "1"
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")  # as torchrun does
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting{memory}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    options: Any = {"inner": "eager", "warmup": 2, "planning": "inline", "memory": memory or None}
    compiled = torch.compile(model, backend="teraio", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    moved = teraio.stats().get("evictions", 0)
    teraio.reset()
    weights = [parameter.detach() for parameter in model.parameters()]
    torch.save({"losses": losses, "weights": weights, "moved": moved}, f"{folder}/{memory or 'plain'}.{rank}")
    dist.destroy_process_group()


def main() -> None:
    folder, memory = sys.argv[1:]
    Path(folder).mkdir(exist_ok=True)
    for each in ("", memory):
        torch.multiprocessing.start_processes(work, (folder, each), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
