"""A state-space model with global convolutions over video, like S4ND.

Each axis has a diagonal state-space kernel. The outer product of these kernels is the kernel of a convolution
over all axes, computed by FFT.

    K[c, t, h, w] = k1[c, t] k2[c, h] k3[c, w],   ki[c, l] = dt[c] Re sum_n C[c, n] exp(l dt[c] A[c, n])
    y = irfft(rfft(x) rfft(K)), each axis padded to twice its length

The task: blobs drift through a video, and the model predicts the direction of the drift.

python examples/state_space.py --memory 130MiB
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from side_by_side import arguments, equal, mib, sizes, table, without_teraio
from torch import nn

import teraio

DIRECTIONS = 8


class Axis(nn.Module):
    """The convolution kernel of one axis. For each channel it is a sum of damped oscillations."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(channels, 1) * math.log(100) + math.log(1e-3))
        self.log_damping = nn.Parameter(torch.full((channels, states), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(channels, 1))
        self.mix = nn.Parameter(torch.randn(channels, states, 2) * states**-0.5)

    def forward(self, length: int) -> torch.Tensor:
        at = torch.arange(length) * self.log_step.exp()  # [channels, length]
        damped = torch.exp(-self.log_damping.exp()[..., None] * at[:, None])
        angle = self.frequency[..., None] * at[:, None]
        real, imaginary = self.mix[..., 0, None], self.mix[..., 1, None]
        return self.log_step.exp() * (damped * (real * angle.cos() - imaginary * angle.sin())).sum(1)


class Block(nn.Module):
    def __init__(self, channels: int, states: int, axes: int) -> None:
        super().__init__()
        self.axes = nn.ModuleList(Axis(channels, states) for _ in range(axes))
        self.skip = nn.Parameter(torch.ones(channels))
        self.norm = nn.GroupNorm(1, channels)
        self.gate = nn.Conv3d(channels, 2 * channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = x.shape[2:]
        kernel = x.new_ones(x.shape[1], *[1] * len(lengths))
        for number, (axis, length) in enumerate(zip(self.axes, lengths)):
            shape = [-1 if n == number else 1 for n in range(len(lengths))]
            kernel = kernel * axis(length).view(x.shape[1], *shape)
        where, padded = tuple(range(-len(lengths), 0)), tuple(2 * length for length in lengths)
        y = self.norm(x)
        spectrum = torch.fft.rfftn(y, padded, where) * torch.fft.rfftn(kernel, padded, where)
        z = torch.fft.irfftn(spectrum, padded, where)
        for number, length in enumerate(lengths):
            z = z.narrow(2 + number, 0, length)
        z = F.gelu(z + y * self.skip.view(-1, *[1] * len(lengths)))
        return x + F.glu(self.gate(z), 1)


class StateSpace(nn.Module):
    def __init__(self, channels: int, states: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, channels, 1)
        self.blocks = nn.Sequential(*(Block(channels, states, 3) for _ in range(layers)))
        self.head = nn.Linear(channels, DIRECTIONS)

    def forward(self, video: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.first(video)).mean((2, 3, 4))), direction)


def make_videos(args: argparse.Namespace, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pair. (1) Videos of a blob that drifts outwards, in shape [batch, 1, frames, side, side]. (2)
    The direction of the drift in each video.
    """
    direction = torch.randint(DIRECTIONS, (args.batch,), generator=random)
    angle = direction * (2 * math.pi / DIRECTIONS)
    way = torch.linspace(0, args.side / 3, args.frames)
    grid = torch.arange(args.side) - args.side / 2
    x = grid - (angle.cos()[:, None] * way)[..., None]
    y = grid - (angle.sin()[:, None] * way)[..., None]
    blob = torch.exp(-(x[..., None, :] ** 2 + y[..., None] ** 2) / (args.side / 8) ** 2)
    return (blob + 0.1 * torch.randn(blob.shape, generator=random))[:, None], direction


def losses(args: argparse.Namespace) -> Iterator[float]:
    torch.manual_seed(0)
    model = StateSpace(args.channels, args.states, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"memory": args.memory, "inner": args.inner}
    compiled = torch.compile(model, backend="teraio", options=options)
    random = torch.Generator().manual_seed(1)
    while True:
        loss = compiled(*make_videos(args, random))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    parser = arguments(__doc__ or "", memory="130MiB", steps=12, inner="eager")
    sizes(parser, channels=16, states=16, layers=12, batch=4, frames=8, side=32)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with two threads, sums differ in the last bit from run to run

    with without_teraio():
        plain = list(islice(losses(args), args.steps))
    training = losses(args)
    ours = list(islice(training, args.steps))
    budgeted = teraio.stats()
    teraio.set_memory("80%")  # 80 % of the machine's memory, so that no tensor moves
    list(islice(training, 2))
    stats = teraio.stats()
    needed_bytes = stats["step_peak_bytes"] - stats["reserve_bytes"]
    table(
        budgeted,
        loss=f"{ours[0]:.4f} at first, {ours[-1]:.4f} at last",
        losses_equal_plain_ones=equal(ours, plain),
        peak_if_nothing_moves=mib(needed_bytes),
        part_of_that_peak=f"{budgeted['peak_bytes'] / needed_bytes:.0%}",
    )


if __name__ == "__main__":
    main()
