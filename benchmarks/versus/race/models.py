"""The trained models by name: Llamas of several sizes and a convolutional network, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from teraio.cli.demo_model import Llama, Shape

Batch = tuple[torch.Tensor, torch.Tensor]


class Bottleneck(nn.Module):
    """ResNet's bottleneck block: convolutions 1x1 to a narrow width, 3x3, 1x1 to a wide width, and a
    shortcut.
    """

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.narrow = nn.Conv2d(inner, width, 1, bias=False)
        self.middle = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.wide = nn.Conv2d(width, outer, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (width, width, outer))
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.narrow(x)))
        y = F.relu(self.norms[1](self.middle(y)))
        return F.relu(self.norms[2](self.wide(y)) + self.short(x))


class ResNet(nn.Module):
    """A ResNet that returns the mean cross entropy; with 3, 4, 6, 3 blocks it is ResNet-50."""

    def __init__(self, depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        layers, inner = [], 64
        for stage, depth in enumerate(depths):
            for number in range(depth):
                width = 64 << stage
                layers.append(Bottleneck(inner, width, 2 if stage and not number else 1))
                inner = 4 * width
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(inner, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(images), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True, slots=True)
class Subject:
    make: Callable[[], Any]  # makes the model; its attribute `layers` holds the blocks
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], Batch]
    tokens: int  # tokens or images in a batch
    about: str


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def llama(shape: Shape, batch: int, length: int, about: str) -> Subject:
    def text(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, shape.vocabulary, (batch, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Subject(lambda: Llama(shape), _adamw, text, batch * length, about)


def resnet(depths: tuple[int, ...], batch: int, side: int, about: str) -> Subject:
    def images(generator: torch.Generator) -> Batch:
        labels = torch.randint(0, 1000, (batch,), generator=generator)
        return torch.randn(batch, 3, side, side, generator=generator), labels

    return Subject(lambda: ResNet(depths), _momentum, images, batch, about)


SUBJECTS: dict[str, Subject] = {
    "llama-7m": llama(Shape(), 8, 256, "6 layers of 256, AdamW, 8 x 256 tokens"),
    "llama-32m": llama(Shape(8192, 512, 1408, 8, 8, 4), 4, 512, "8 layers of 512, AdamW, 4 x 512 tokens"),
    "llama-175m": llama(
        Shape(16384, 1024, 2816, 12, 16, 8), 2, 512, "12 layers of 1024, AdamW, 2 x 512 tokens"
    ),
    "llama-554m": llama(
        Shape(16384, 1536, 4096, 20, 24, 8), 1, 512, "20 layers of 1536, AdamW, 1 x 512 tokens"
    ),
    "resnet-50": resnet((3, 4, 6, 3), 16, 160, "3, 4, 6, 3 blocks, momentum, 16 images of 160 x 160"),
}


def subject_of(asked: str) -> Subject:
    """Return a subject by name, or a small Llama with changes such as
    `layers=12,batch=4,length=128,hidden=256`.
    """
    if asked in SUBJECTS:
        return SUBJECTS[asked]
    given = {name: int(value) for name, value in (pair.split("=") for pair in asked.split(","))}
    batch, length = given.pop("batch", 8), given.pop("length", 256)
    hidden = given.setdefault("hidden", 256)
    given.setdefault("intermediate", hidden * 11 // 4)
    return llama(Shape(**given), batch, length, asked)
