"""The model of `guard_train.py`: six blocks of two layers, with several ways in which user code uses
weights.
"""

from __future__ import annotations

import torch

WIDTH = 256


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Lent(Block):
    """A block that receives a weight from its caller.

    Dynamo reads properties of the weight, breaks the frame before any computation, and makes no program.
    Python then reads the weight.
    """

    def forward(self, x: torch.Tensor, lent: torch.Tensor | None = None) -> torch.Tensor:
        assert lent is not None and lent.requires_grad
        assert is_small(lent)
        return super().forward(x) + x * lent.mean(0)


@torch._dynamo.disable
def is_small(weight: torch.Tensor) -> bool:
    return 0 < weight.abs().max().item() < 100


@torch._dynamo.disable
def eagerly(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call the block eagerly. Autograd saves the block's weights until the backward, and no program contains
    these weights.
    """
    out: torch.Tensor = block(x)
    return out


class Model(torch.nn.Module):
    def __init__(self, scenario: str) -> None:
        super().__init__()
        self.lends = scenario == "lends"
        self.blocks = torch.nn.ModuleList(Lent() if self.lends else Block() for _ in range(6))
        self.breaks = scenario == "breaks"
        self.eager = scenario == "eager blocks"
        self.gives = scenario == "gives views"
        # Views of the model's weights, made after the compiled program has returned.
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.lends:
                x = block(x, lent=self.blocks[number - 1].up.weight)  # type: ignore[union-attr]
                continue
            if self.eager and number in {2, 4}:
                x = eagerly(block, x)
                continue
            if self.breaks and number == 3:
                torch._dynamo.graph_break()
                assert block.up.weight.abs().max().item() < 100  # type: ignore[union-attr, operator]
            x = block(x)
        if self.gives:
            self.given = [block.up.weight[:2] for block in self.blocks]  # type: ignore[index, union-attr]
        return x
