"""A training of a small model in its own process. The budget is about half of the memory that the model
needs.

    cache_train.py [steps]

The script prints, for each step, the loss and the engine's counts of planned moves and of misses. A miss is a
fetch that no plan contains.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import teraio

WIDTH, LAYERS, BATCH = 256, 8, 1024
MEMORY_BYTES = 14 * 2**20  # without a budget, the backward needs about 26 MiB


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: Any = {"inner": "eager", "memory": MEMORY_BYTES}
    compiled = torch.compile(model, backend="teraio", options=options)
    rows = []
    for number in range(int(sys.argv[1]) if sys.argv[1:] else 6):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts = teraio.stats()
        rows.append([loss.item().hex(), counts.get("planned_moves", 0), counts.get("misses", 0)])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
