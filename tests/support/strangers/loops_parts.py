"""Models and random batches for loops of other projects whose library brings none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

STEPS = 5
BATCH, GIVEN, CLASSES, WORDS, LENGTH = 16, 64, 10, 512, 16


class Perceptron(nn.Module):
    """A perceptron whose hidden layers have one width. At the default size, its weights take 1 MiB."""

    def __init__(self, width: int = 256, depth: int = 4, given: int = GIVEN, made: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(given, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        out: torch.Tensor = self.last(x)
        return out


class Convolutions(nn.Module):
    """A small convolutional network for images, with batch norms."""

    def __init__(self, width: int = 64, depth: int = 4, given: int = 3, made: int = CLASSES) -> None:
        super().__init__()
        sizes = [given] + [width] * depth
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.last = nn.Linear(width, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = torch.relu(norm(layer(x)))
        out: torch.Tensor = self.last(x.mean((2, 3)))
        return out


class Words(nn.Module):
    """A language model of words. It consists of (1) an embedding, (2) recurrent layers or a mean over earlier
    words, and (3) a head.
    """

    def __init__(self, kind: type[nn.RNNBase] | None = None, width: int = 128, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, sparse=sparse)
        self.stack = kind(width, width, 2, batch_first=True) if kind else None  # type: ignore[arg-type]
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        if self.stack is None:
            x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        else:
            x, _ = self.stack(x)
        x = torch.relu(self.inner(x)) + x
        out: torch.Tensor = self.head(x)
        return out


def random(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(count: int = STEPS, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of random vectors with their classes."""
    drawn = random(seed)
    for _ in range(count):
        yield torch.randn(BATCH, GIVEN, generator=drawn), torch.randint(0, CLASSES, (BATCH,), generator=drawn)


def images(count: int = STEPS, size: int = 16, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    drawn = random(seed)
    for _ in range(count):
        yield torch.randn(8, 3, size, size, generator=drawn), torch.randint(0, CLASSES, (8,), generator=drawn)


def texts(count: int = STEPS, length: int = LENGTH, seed: int = 1) -> Iterator[torch.Tensor]:
    drawn = random(seed)
    for _ in range(count):
        yield torch.randint(0, WORDS, (8, length), generator=drawn)


def next_word(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = STEPS) -> list[float]:
    """Train a classifier of vectors in a plain loop, and return the losses."""
    losses = []
    for x, y in rows(count):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
