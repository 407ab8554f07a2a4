"""A training within a budget below its peak, with a checkpoint in the middle.

    checkpoint_child.py straight|resumed PATH

With `straight`, the script saves the checkpoint and continues. With `resumed`, it loads the checkpoint and
trains the remaining steps. The script prints one JSON object with a hash of the final weights and optimizer
states. For `straight`, the object also holds the peak of memory and the engine's counts during the save.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import counting_allocator
import steady
import torch

import teraio

WIDTH, ROWS, LAYERS, STEPS, SAVED_AT = 256, 16, 8, 8, 5
MEMORY_BYTES = 31 * 2**20  # weights are 8 MiB, gradients 8 MiB, optimizer states 16 MiB


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.down = torch.nn.ModuleList(torch.nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x)))
        return x


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        layers = [*self.model.up, *self.model.down]
        self.optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in layers]
        options: Any = {"inner": "eager", "memory": str(MEMORY_BYTES), "warmup": 1, "planning": "inline"}
        self.compiled = torch.compile(self.model, backend="teraio", options=options)

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.compiled(x).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, its in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(its)

    def digest(self) -> str:
        teraio.reset()
        state = self.state()
        tensors = list(state["model"].values())
        for optimizer in state["optimizers"]:
            tensors += [tensor for its in optimizer["state"].values() for tensor in its.values()]
        whole = hashlib.sha256()
        for tensor in tensors:
            whole.update(tensor.detach().contiguous().numpy().tobytes())
        return f"{len(tensors)} {whole.hexdigest()}"


def main() -> None:
    torch.set_num_threads(1)
    steady.plans()
    counting = counting_allocator.install()
    how, path = sys.argv[1:]
    training = Training()
    found: dict[str, Any] = {}
    if how == "straight":
        training.train(0, SAVED_AT)
        counting.reset_peak()
        before = teraio.stats()
        teraio.save(training.state(), path)
        after = teraio.stats()
        found["peak_bytes"] = counting.peak_bytes()
        found["fetched"] = after["fetches"] - before["fetches"]
        found["overrun_bytes"] = after["overrun_bytes"]
        found["resident_bytes"] = after["resident_bytes"]
        training.train(SAVED_AT, STEPS)
    else:
        training.load(teraio.load(path))
        training.train(SAVED_AT, STEPS)
    print(json.dumps({**found, "digest": training.digest()}))


if __name__ == "__main__":
    main()
