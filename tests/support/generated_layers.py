"""Common layers of generated models. The unusual ones are in generated_blocks.py.

All layers map (batch, length, width) to the same shape, and hold weights of 16 KiB and more. The passed
`Random` decides a layer's details.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int  # must be a multiple of 32

    @property
    def heads(self) -> int:
        return self.width // 32


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) / shape[-1] ** 0.5).to(dtype))


ACTIVATIONS: list[Any] = [F.gelu, F.relu, F.silu, torch.tanh, torch.sigmoid, torch.sin, F.softplus]


class Mlp(nn.Module):
    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        inner = size.width * draw.choice([1, 2, 4])
        self.norm = draw.choice([nn.LayerNorm, nn.RMSNorm])(size.width)
        self.up = nn.Linear(size.width, inner, bias=draw.random() < 0.5)
        self.down = nn.Linear(inner, size.width)
        self.act = draw.choice(ACTIVATIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Gated(nn.Module):
    """A block with two weights in one storage, which multiplies two results. The two results use views of
    this storage, or are views of one result.
    """

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.both = weight(4 * size.width, size.width)
        self.down = nn.Linear(2 * size.width, size.width, bias=False)
        self.views = draw.choice(["weight", "result"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.views == "weight":
            half = self.both.shape[0] // 2
            gate, up = F.linear(x, self.both[:half]), F.linear(x, self.both[half:])
        else:
            gate, up = F.linear(x, self.both).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=draw.random() < 0.3)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.way = draw.choice(["fused", "causal", "by hand", "rotary"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "rotary":
            angles = torch.arange(length, dtype=torch.float32)[:, None] / torch.arange(
                1, q.shape[-1] // 2 + 1
            )
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (torch.view_as_real(_pairs(t) * turn).flatten(-2) for t in (q, k))
        if self.way == "by hand":
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.way == "causal")
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())


class Conv(nn.Module):
    """A convolution along the length. With a batch norm, each forward writes to the norm's buffers."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        width = size.width
        groups = draw.choice([1, 2])
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        self.norm = draw.choice([nn.BatchNorm1d(width), nn.GroupNorm(4, width), nn.Identity()])
        self.back = nn.Conv1d(width, width, 1) if draw.random() < 0.5 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(F.relu(self.norm(self.conv(x.transpose(1, 2))))).transpose(1, 2)


class Conv2d(nn.Module):
    """A convolution over images. Each position's vector is reshaped to a small image with channels."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.channels = size.width // 4
        self.conv = nn.Conv2d(self.channels, self.channels, 3, padding=1)
        self.out = weight(size.width, size.width)
        self.pool = draw.choice([nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1), nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        image = x.reshape(batch * length, self.channels, 2, 2)
        y = self.pool(F.hardswish(self.conv(image))).reshape(batch, length, width)
        return x + y @ self.out


class Experts(nn.Module):
    """A mixture of experts. The values in a tensor decide which weights a token uses."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.count = draw.choice([2, 4])
        self.router = nn.Linear(size.width, self.count)
        self.experts = weight(self.count, size.width, size.width)
        self.way = draw.choice(["all", "gather", "mask", "scatter"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        best, chosen = gates.max(-1)
        if self.way == "all":
            return x + torch.einsum("bld,edk,ble->blk", x, self.experts, gates)
        if self.way == "gather":  # in this mode, one expert handles a whole row of the batch
            picked = self.experts[chosen[:, 0]]
            return x + torch.bmm(x, picked) * best.unsqueeze(-1)
        y = torch.zeros_like(x)
        for number in range(self.count):
            taken = chosen == number
            if self.way == "mask":
                y = torch.where(taken.unsqueeze(-1), x @ self.experts[number], y)
            else:
                y = y + (x @ self.experts[number]) * taken.unsqueeze(-1)
        return x + y * best.unsqueeze(-1)
