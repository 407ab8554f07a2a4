"""Unusual blocks of generated models, one block for each feature that a training program may contain.

Like the layers in generated_layers.py, blocks map (batch, length, width) to the same shape, and hold weights
of 16 KiB and more.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from generated_layers import Attention, Conv, Conv2d, Experts, Gated, Mlp, Size, weight
from torch import nn
from torch.utils.checkpoint import checkpoint


class Reused(nn.Module):
    """A block that uses one weight several times: transposed, in a loop, and under two names."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.one = weight(size.width, size.width)
        self.other = self.one
        self.rounds = draw.choice([1, 2, 3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = x + torch.tanh(F.linear(x, self.one)) @ self.other
        return x


class Flat(nn.Module):
    """A block whose weights are parts of one flat parameter."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.flat = weight(2 * size.width, size.width)
        self.flat.data = self.flat.data.reshape(-1)
        self.way = draw.choice(["narrow", "split", "strided", "unbind"])
        self.width = size.width

    def parts(self) -> list[torch.Tensor]:
        width, whole = self.width, self.width * self.width
        match self.way:
            case "narrow":
                parts = [self.flat.narrow(0, 0, whole), self.flat.narrow(0, whole, whole)]
            case "split":
                parts = list(self.flat.split(whole))
            case "strided":
                return [self.flat.as_strided((width, width), (1, width), at) for at in (0, whole)]
            case _:
                parts = list(self.flat.view(2, -1).unbind(0))
        return [part.view(width, width) for part in parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.parts()
        return x + torch.tanh(x @ first) @ second.t()


class InPlace(nn.Module):
    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.linear = nn.Linear(size.width, size.width)
        self.scale = weight(size.length, size.width)
        self.way = draw.randrange(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        match self.way:
            case 0:
                y.mul_(2).add_(x).relu_()
            case 1:
                y[:, ::2] = x[:, ::2] * self.scale[::2]
            case 2:
                y[:, 1:].add_(x[:, :-1])
                y.view(-1).sigmoid_()
            case _:
                y = y.clone()
                y.transpose(1, 2).mul_(self.scale.t())
                y[0].zero_()
        return x + y


class Noise(nn.Module):
    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.linear = nn.Linear(size.width, size.width)
        self.ways = draw.sample(["dropout", "alpha", "uniform", "normal", "rows", "rrelu"], 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for way in self.ways:
            match way:
                case "dropout":
                    y = F.dropout(y, 0.2, self.training)
                case "alpha":
                    y = F.alpha_dropout(y, 0.2, self.training)
                case "uniform":
                    y = y * torch.rand_like(y)
                case "normal":
                    y = y + torch.randn(y.shape[-1])
                case "rows":
                    y = F.dropout1d(y, 0.3, self.training)
                case _:
                    y = F.rrelu(y, training=self.training)
        return x + y


class Checkpointed(nn.Module):
    """A block that recomputes its inner block in the backward, with the same random numbers as in the
    forward.
    """

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.inner = draw.choice([Noise, Mlp, Attention, Gated, Reused])(size, draw)
        self.reentrant = draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


class Buffered(nn.Module):
    """A block with two buffers of 16 KiB and more. One buffer is constant. Each forward writes to the other
    buffer.
    """

    table: torch.Tensor
    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(size.width, size.width) / 8, draw.random() < 0.5)
        self.register_buffer("mean", torch.zeros(size.width, size.width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.linear = nn.Linear(size.width, size.width)
        self.way = draw.randrange(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) @ self.table
        with torch.no_grad():
            now = x.detach().flatten(0, 1)
            now = now.t() @ now
            match self.way:
                case 0:
                    self.mean.lerp_(now, 0.1)
                case 1:
                    self.mean.copy_(self.mean * 0.9 + now)
                case _:
                    self.mean[: now.shape[0] // 2].add_(now[: now.shape[0] // 2])
            self.calls += 1
        return x + y + x @ self.mean.sigmoid()


class Lora(nn.Module):
    """A block with a frozen weight and a small trained weight."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.frozen = nn.Linear(size.width, 2 * size.width).requires_grad_(False)
        self.down, self.up = weight(64, size.width), weight(2 * size.width, 64)
        self.out = nn.Linear(2 * size.width, size.width).requires_grad_(draw.random() < 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x) + F.linear(F.linear(x, self.down), self.up)
        return x + self.out(F.gelu(y))


class Spectral(nn.Module):
    """A block that computes with complex numbers along the length."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.complex = draw.random() < 0.5
        shape = size.length // 2 + 1, size.width
        self.filter = weight(*shape, dtype=torch.complex64) if self.complex else weight(*shape, 2)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = self.filter if self.complex else torch.view_as_complex(self.filter)
        spectrum = torch.fft.rfft(x, dim=1) * by
        return x + self.out(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))


class Halves(nn.Module):
    """A block with a weight of two bytes per element, and a layer with four bytes per element. In half of the
    draws, autocast casts the layer's weight for each use.
    """

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.narrow = weight(2 * size.width, size.width, dtype=torch.bfloat16)
        self.linear = nn.Linear(2 * size.width, size.width)
        self.cast = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.bfloat16(), self.narrow)
        if not self.cast:
            return x + self.linear(y.float())
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.linear(F.silu(y)).float()


class Normed(nn.Module):
    """A block that computes a weight from other weights before each use."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.direction, self.length = weight(size.width, size.width), weight(size.width, 1)
        self.parts = nn.ParameterList([weight(size.width // 2, size.width) for _ in range(2)])
        self.way = draw.choice(["cat", "stack"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit = self.direction / self.direction.norm(dim=1, keepdim=True)
        both = (
            torch.cat(list(self.parts))
            if self.way == "cat"
            else torch.stack(list(self.parts), 1).flatten(0, 1)
        )
        return x + F.linear(F.relu(F.linear(x, unit * self.length)), both)


class Recurrent(nn.Module):
    """A recurrent block, which uses the same weights at each of several positions of the sequence."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.enter, self.again = weight(size.width, size.width), weight(size.width, size.width)
        self.positions = draw.choice([2, 4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for part in x[:, : self.positions].unbind(1):
            state = torch.tanh(part @ self.enter + state @ self.again)
            states.append(state)
        return torch.cat([x[:, : self.positions] + torch.stack(states, 1), x[:, self.positions :]], 1)


class Picked(nn.Module):
    """A block that selects rows and columns by the values in a tensor."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.table = weight(2 * size.width, size.width)
        self.linear = nn.Linear(size.width, size.width)
        self.way = draw.choice(["embedding", "sort", "topk", "scatter", "put", "cumsum"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        rows = (y[..., 0] * 1e3).long().remainder(self.table.shape[0])
        match self.way:
            case "embedding":
                return x + y * F.embedding(rows, self.table)
            case "sort":
                ordered, order = y.sort(dim=-1)
                return x + ordered * self.table[order[..., 0]]
            case "topk":
                values, places = y.topk(8, dim=-1)
                return x + torch.zeros_like(y).scatter(-1, places, values) @ self.table[: y.shape[-1]]
            case "scatter":
                sums = torch.zeros_like(self.table).index_add(0, rows.flatten(), y.flatten(0, 1))
                return x + (sums * self.table)[rows]
            case "put":
                filled = self.table.index_put((rows.flatten(),), y.flatten(0, 1), accumulate=True)
                return x + filled[rows]
            case _:
                return x + y.cumsum(1) * self.table[: x.shape[1]].logcumsumexp(0)


BLOCKS: tuple[type[nn.Module], ...] = (
    Mlp,
    Gated,
    Attention,
    Conv,
    Conv2d,
    Experts,
    Reused,
    Flat,
    InPlace,
    Noise,
    Checkpointed,
    Buffered,
    Lora,
    Spectral,
    Halves,
    Normed,
    Recurrent,
    Picked,
)
