"""A training of many small steps with mixed batch sizes, in its own process.

    growth_train.py '{"steps": 500, "budget": 6815744}'

The script measures (1) the process's memory after a step, (2) the peak within steps, and (3) the numbers of
descriptors, threads and files. It prints one JSON object with these figures after every 50 steps, after 50
steps with ample memory, and after the engine is closed. The same programs run with the small and the ample
budget.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from typing import Any

import torch
from torch import nn

import teraio
from teraio.options import Settings
from teraio.runtime.device import rss
from teraio.runtime.store.directories import choose_default_directories
from teraio.session import session

WIDTH, LAYERS = 64, 8
BATCHES = (1024, 2048, 1536)  # rows per batch; an activation takes 256 to 512 KiB
TURNS = 50
PLENTY = 39 * 2**20  # with this budget, the store has the same buffers as with the smaller budget


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.choose = random.Random(0)
        self.compiled: Any = torch.compile(
            self.model, backend="teraio", dynamic=False, options={"inner": "eager"}
        )

    def begin(self, budget: int) -> None:
        teraio.reset()
        os.environ.update(TERAIO_MEMORY=str(budget), TERAIO_WARMUP="1", TERAIO_PLANNING="inline")
        session.ensure_session(Settings.parse({"inner": "eager"}))
        for batch in BATCHES * 3:  # these steps compile, measure and plan
            self.step(batch)
        gc.collect()
        gc.freeze()  # excludes the compiler's objects from later collections

    def step(self, batch: int) -> None:
        self.compiled(torch.randn(batch, WIDTH)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> dict[str, int]:
        """Run `count` steps and return the figures afterwards. The figure `peak` covers only these steps."""
        gc.collect()
        rss.reset_peak()
        for _ in range(count):
            self.step(self.choose.choice(BATCHES))
        return self.figures()

    def figures(self) -> dict[str, int]:
        gc.collect()
        return {
            "resident": rss.resident_bytes(),
            "peak": rss.peak_bytes(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "files": sum(len(files) for _, _, files in os.walk(choose_default_directories()[0])),
        }


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trainer = Trainer()
    trainer.begin(request["budget"])
    before = {name: count for name, count in teraio.stats().items() if isinstance(count, int)}
    rows = [trainer.steps(TURNS) for _ in range(request["steps"] // TURNS)]
    after = {name: count for name, count in teraio.stats().items() if isinstance(count, int)}
    did = {name: after[name] - before[name] for name in before}
    trainer.begin(PLENTY)
    plenty = trainer.steps(TURNS)
    teraio.reset()
    print(json.dumps({"rows": rows, "did": did, "plenty": plenty, "left": trainer.figures()}))


if __name__ == "__main__":
    main()
