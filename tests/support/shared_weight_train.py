"""A training of blocks that are compiled one by one. Two of the blocks use the same weight.

Autograd adds the two gradients of this weight in C++, without calling Python. Autograd also adds the
gradients of each batch to the gradients of the batch before. If the engine has evicted such a gradient, the
addition reads empty memory and the process crashes.

    shared_weight_train.py something nothing

The script prints one JSON line for each argument: whether losses and weights equal the plain training's, and
the moves. With `nothing`, the blocks that use the shared weight save no tensors for their backward.
"""

from __future__ import annotations

import json
import sys

import torch
from fetched import fetched
from torch import nn

import teraio

WIDTH, STEPS, BATCHES = 256, 3, 2
ORDER = (0, 1, 2, 3, 4, 0, 5)  # the number of each block's weight
MEMORY = 5 * 2**20  # teraio reserves 4 MiB; the remaining memory has room for four of six weights


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
    """Train, and return losses and weights."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 16) for _ in range(max(ORDER) + 1)]
    # The class of the blocks that use the first two weights. Blocks of the class `Adds` save nothing, so the
    # result of the first block is freed.
    first = Adds if saves == "nothing" else Block
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
        result = {"same": all(map(torch.equal, plain, ours)), "counts": counts}
        print(json.dumps({**result, "added": found["aten::add", "grad"]}), flush=True)


if __name__ == "__main__":
    main()
