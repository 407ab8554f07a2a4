"""A training of the first model that a new process compiles. No earlier trace has changed the state of
Dynamo.

    first_compile_child.py caches|masks

The script prints one JSON object: losses, and a digest of the weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from train import digest

WIDTH, STEPS = 128, 3


class Marks(nn.Module):
    """A model that writes a trained row where a mask is true. AOTAutograd cannot trace the backward of such a
    write.

    Dynamo therefore breaks the graph before the write, and traces the frame again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.mark = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = x.long().clamp(0, 63)
        h = self.embed(index)
        h[index == 7] = self.mark.to(h.dtype)
        return h


class Caches(nn.Module):
    """A model that makes a tensor from a list, and then writes a row as `Marks` does. The weight of the
    embedding is also the weight of the model's last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks = Marks()

    def before(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.tensor([1.0, 2.0]).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return nn.functional.linear(self.marks(x), self.marks.embed.weight).square().mean()


class Masks(Caches):
    """A model that builds a mask with vmap, as transformers' attention does, and then writes a row as `Marks`
    does.
    """

    def before(self, h: torch.Tensor) -> torch.Tensor:
        at = torch.arange(WIDTH)
        return h * torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(at, at)[: h.shape[0]]


CASES: dict[str, Callable[[], nn.Module]] = {"caches": Caches, "masks": Masks}


def train(case: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CASES[case]()
    options: dict[str, Any] = {"memory": "min", "warmup": 1, "planning": "inline", "inner": "eager"}
    compiled = torch.compile(model, backend="teraio", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = compiled(torch.randn(16, WIDTH) * 20)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": digest(model, optimizer)}


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1])))
