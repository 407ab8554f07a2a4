"""Blocks of generated models: one for each thing that a training program may contain.

All map (batch, length, width) to the same shape, and hold weights of 16 KiB and more. What a block does in
detail is drawn from the `Random` that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int  # a multiple of 32

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
    """Two weights in one storage, and halves of a result that are views."""

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
    """Along the length; its norms have buffers that each forward writes."""

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
    """The width as an image of channels."""

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
    """A mixture of experts; data decide which weights a token meets."""

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
        if self.way == "gather":  # one expert per row of the batch
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


class Reused(nn.Module):
    """One weight, many uses: transposed, in a loop, and under two names."""

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
    """Weights cut out of one flat parameter."""

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
    """Whatever is inside runs once more in the backward, with the same random numbers."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.inner = draw.choice([Noise, Mlp, Attention, Gated, Reused])(size, draw)
        self.reentrant = draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


class Buffered(nn.Module):
    """Buffers of 16 KiB and more: one constant, one that each forward writes."""

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
    """A frozen weight with a small trained one beside it."""

    def __init__(self, size: Size, draw: Random) -> None:
        super().__init__()
        self.frozen = nn.Linear(size.width, 2 * size.width).requires_grad_(False)
        self.down, self.up = weight(64, size.width), weight(2 * size.width, 64)
        self.out = nn.Linear(2 * size.width, size.width).requires_grad_(draw.random() < 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x) + F.linear(F.linear(x, self.down), self.up)
        return x + self.out(F.gelu(y))


class Spectral(nn.Module):
    """Complex numbers along the length."""

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
    """Weights of two bytes, and of four that are cast for each use."""

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
    """A weight that is computed from weights before each use."""

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
    """The same weights at each position of the length."""

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
    """Rows and columns that data choose."""

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
