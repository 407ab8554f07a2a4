"""The model of the demo: a small Llama in plain PyTorch.

It has RMS norm, rotary positions, grouped attention and SwiGLU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int = 4096
    hidden: int = 256
    intermediate: int = 704
    layers: int = 6
    heads: int = 4
    key_heads: int = 2


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = shape.heads, shape.key_heads, shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * self.width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * self.width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q = apply_rotary_positions(
            self.q_proj(x).view(batch, length, self.heads, self.width).transpose(1, 2), cos, sin
        )
        k = apply_rotary_positions(
            self.k_proj(x).view(batch, length, self.key_heads, self.width).transpose(1, 2), cos, sin
        )
        v = self.v_proj(x).view(batch, length, self.key_heads, self.width).transpose(1, 2)
        groups = self.heads // self.key_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, hidden))


def apply_rotary_positions(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """A language model that takes tokens and targets, and returns the mean cross entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        width = self.shape.hidden // self.shape.heads
        rate = 10000.0 ** (-torch.arange(0, width, 2, device=tokens.device) / width)
        angle = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rate).repeat(1, 2)
        x = self.embedding(tokens)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
