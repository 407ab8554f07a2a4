"""Small models, one model for each feature that a program may contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


class Block(nn.Module):
    """A transformer block with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 4, 3 * WIDTH // 4).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        x = x + self.down(F.gelu(self.up(self.other_norm(x))))
        return x.square().mean()


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(lambda y: F.dropout(self.attend(y), 0.1), x, use_reentrant=False)
        return x.square().mean()


class Branch(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.out(x)
        wide, same = torch.cond(
            x.sum() > 0,
            lambda x: (F.gelu(self.up(x)).sigmoid(), x.sin()),
            lambda x: (self.up(x.cos()).sin().cos(), x.cos()),
            (x,),
        )
        return (self.down(wide) * same).square().mean()


class Loop(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        x = self.out(x)
        _, x = while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x.sin() + x), (torch.tensor(0), x))
        return self.out(x).square().mean()


class Scan(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        x = self.out(x)
        carry, y = scan(lambda c, x: (c + x, (c * x).sin()), torch.zeros_like(x[0]), x)
        return (self.out(y) + carry).square().mean()


class Region(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        @torch.compiler.nested_compile_region
        def body(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return F.linear(F.gelu(F.linear(x, up)).sin(), down)

        for _ in range(2):
            x = body(x, self.up.weight, self.down.weight)
        return x.square().mean()


class Flex(Block):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 4, 3 * WIDTH // 4).transpose(1, 2).chunk(3, -1)
        bias = self.bias
        y: Any = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[j])
        return y.square().mean()


class Rows(Block):
    """A block that selects rows by the values in a tensor, so that sizes depend on these values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.out(x)
        chosen = self.up(x[x[:, :, 0] > 0])
        return self.down(chosen.sin()).square().sum()


class Count(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        torch._check(count < 2**20)
        return self.out(x).square().mean() * torch.arange(count, dtype=torch.float32).sin().mean()


class Twice(Block):
    """A block that uses two views of one result, and only one of the two results of another operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(self.qkv(x).sin(), [WIDTH, 2 * WIDTH], -1)
        values, _ = first.max(-1)
        return (self.out(first) * values.unsqueeze(-1)).square().mean() + second.cumsum(1)[:, -1].mean()


@dataclass(frozen=True)
class About:
    make: Callable[[], nn.Module]
    batches: tuple[int, ...] = (4, 4, 4)
    dynamic: bool | None = False
    trains: bool = True
    length: int = 48

    def input(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, self.length, WIDTH)


SIZES = (4, 3, 2, 5, 1, 4)
MODELS = {
    "block": About(Block),
    "batches": About(Block, SIZES, None),
    "any batch": About(Block, SIZES, True),
    "checkpointed": About(Checkpointed),
    "branch": About(Branch),
    "branch of any batch": About(Branch, SIZES, True),
    "loop": About(Loop, trains=False),
    "scan": About(Scan),
    "region": About(Region),
    "flex": About(Flex, trains=False),
    "rows": About(Rows),
    "rows of any batch": About(Rows, SIZES, True),
    "count": About(Count),
    "tuples": About(Twice),
}


torch._dynamo.config.capture_dynamic_output_shape_ops = True
torch._dynamo.config.capture_scalar_outputs = True
