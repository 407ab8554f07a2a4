"""A training of a model with a graph break in the middle.

The code at the graph break runs eagerly, between two compiled programs. Autograd saves the tensors of this
code until the backward. The process counts every byte of every tensor.

    kept_train.py BUDGET [unseen]

The script prints one JSON object: (1) the losses, (2) the peak of each step, and (3) the engine's estimates.
Per call, the engine estimates the number of bytes that user code keeps. `unseen` plants a bug: the engine
does not count the bytes that user code keeps.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import counting_allocator
import torch
from torch import nn

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.step.eager_memory import EagerMemory

WIDTH, ROWS, LAYERS, SAVED = 512, 1024, 4, 8


@torch._dynamo.disable
def eager(x: torch.Tensor) -> torch.Tensor:
    for _ in range(SAVED):
        x = torch.tanh(x * 1.01)
    return x


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.tanh(layer(x))
        x = eager(x)
        for layer in self.after:
            x = torch.tanh(layer(x))
        return x.square().mean()


def main() -> None:
    counting = counting_allocator.install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Broken()
    optimizer = torch.optim.AdamW(model.parameters())
    options: Any = {
        "memory": sys.argv[1],
        "inner": "eager",
        "planner": "greedy",
        "warmup": 2,
        "planning": "inline",
    }
    compiled: Any = torch.compile(model, backend="teraio", options=options, dynamic=False)
    x = torch.randn(ROWS, WIDTH)
    result: dict[str, Any] = {"losses": [], "peaks": []}
    for _ in range(7):
        counting.reset_peak()
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item())
        result["peaks"].append(counting.peak_bytes())
    assert engine.ENGINE is not None
    result["kept"] = engine.ENGINE.tracker.expected.kept
    print(json.dumps(result))
    teraio.reset()


if __name__ == "__main__":
    with (
        patch.object(EagerMemory, "reserve_kept_bytes", lambda self: None)
        if "unseen" in sys.argv
        else patch.dict({})
    ):
        main()
