"""Hand-written models of the zoo, in addition to the models of Hugging Face."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, VOCABULARY = 304, 96, 1024


def loss_of(value: torch.Tensor) -> Any:
    return SimpleNamespace(loss=value)


class Residual(nn.Module):
    """A residual block of two convolutions with batch norm. Its activation functions write in place."""

    def __init__(self, inner: int, outer: int, stride: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)])
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += self.short(x)
        return y.relu_()


class Convolutions(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 448]
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True))
        self.stages = nn.Sequential(*map(Residual, widths, widths[1:]), Residual(448, 448, 1))
        self.head = nn.Linear(448, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.stages(self.stem(pixels)).mean((2, 3))
        return loss_of(F.cross_entropy(self.head(x), labels))

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Any]:
        labels = torch.randint(0, 10, (12,), generator=generator)
        return {"pixels": torch.randn(12, 3, 48, 48, generator=generator), "labels": labels}


def some_text(generator: torch.Generator) -> dict[str, Any]:
    return {"ids": torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 4, WIDTH // 4).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(WIDTH, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


class NanoGPT(nn.Module):
    """A GPT made of plain modules, with learned positions, one projection for q, k and v, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids[:, :-1]) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return loss_of(F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten()))

    batch = staticmethod(some_text)


class Tied(nn.Module):
    """A model with one table for input and output words. It uses one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10 * VOCABULARY, 512)
        self.layer = nn.Sequential(nn.Linear(512, 1536), nn.GELU(), nn.Linear(1536, 512))
        self.head = nn.Linear(512, 10 * VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids[:, :-1])
        for _ in range(3):
            x = x + self.layer(F.layer_norm(x, (512,)))
        return loss_of(F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten()))

    batch = staticmethod(some_text)


class Spectral(nn.Module):
    """A model that mixes positions by complex weights in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        shape = (LENGTH // 2 + 1, WIDTH)
        self.filters = nn.ParameterList(
            [nn.Parameter(torch.complex(torch.randn(shape), torch.randn(shape)) * 0.02) for _ in range(7)]
        )
        self.ups = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(7)])
        self.downs = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(7)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids[:, :-1])
        for weights, up, down in zip(self.filters, self.ups, self.downs):
            x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * weights, n=LENGTH, dim=1)
            x = x + down(F.silu(up(F.layer_norm(x, (WIDTH,)))))
        return loss_of(F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten()))

    batch = staticmethod(some_text)
