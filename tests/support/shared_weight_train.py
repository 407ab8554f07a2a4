"""Blocks that are compiled one by one, two of which use the same weight: autograd adds its gradients in C++,
before anyone is asked, and those of a batch to those of the batch before. A gradient that is away then is
read where nothing is: that ends the process.

    shared_weight_train.py something nothing

prints one JSON line for each: whether losses and weights are those of the plain training, and what moved.
With `nothing`, the blocks of the shared weight save nothing that anyone could see.
"""

from __future__ import annotations

import json
import sys

import torch
from fetched import fetched
from torch import nn

import teraio

WIDTH, STEPS, BATCHES = 256, 3, 2
ORDER = (0, 1, 2, 3, 4, 0, 5)  # which weight each block has
MEMORY = 5 * 2**20  # 4 MiB of it in reserve: four of six weights


class Block(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + x


class Adds(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * 2)[: len(x)] + x


def train(saves: str, backend: str, **options: object) -> list[torch.Tensor]:
    """Losses and weights."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 16) for _ in range(max(ORDER) + 1)]
    first = Adds if saves == "nothing" else Block  # two of them: the result of one is gone
    blocks = nn.ModuleList((first if number < 2 else Block)(weights[number]) for number in ORDER)
    for block in blocks:
        block.compile(backend=backend, **options)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        for _ in range(BATCHES):
            x = torch.randn(8, WIDTH)
            for block in blocks:
                x = block(x)
            loss = x.square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(weight.detach().clone() for weight in weights)]


def main() -> None:
    torch.set_num_threads(1)
    for saves in sys.argv[1:] or ["something"]:
        plain = train(saves, "aot_eager")
        with fetched() as found:
            ours = train(saves, "teraio", options={"memory": MEMORY, "inner": "eager", "planner": "none"})
        counts = teraio.stats()
        teraio.reset()
        told = {"same": all(map(torch.equal, plain, ours)), "counts": counts}
        print(json.dumps({**told, "added": found["aten::add", "grad"]}), flush=True)


if __name__ == "__main__":
    main()
