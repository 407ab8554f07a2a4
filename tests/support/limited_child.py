"""A training under a hard memory limit of the system.

    limited_child.py plain|teraio EXTRA_BYTES      (0: no limit)

The script loads all modules and compiles a small model. It then sets the limit RLIMIT_DATA to the bytes in
use plus EXTRA_BYTES. A mapping beyond the limit fails. The script prints one JSON object: losses, a digest of
the weights, and counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import steady
import torch
from torch import nn

import teraio
from teraio.runtime.device import cpu

LAYERS, WIDTH, BATCH, STEPS = 20, 32, 1 << 17, 3
MEMORY = 112 << 20


class Chain(nn.Module):
    """A chain of layers. Each layer saves 16 MiB for the backward, and its weight has 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def data_bytes() -> int:
    """Return the number of bytes that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmData")).split()[1]) * 1024


def train(model: nn.Module, batch: int, steps: int) -> list[float]:
    torch.manual_seed(1)
    compiled = torch.compile(model, backend="teraio", options={"inner": "eager"}, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = compiled(torch.randn(batch, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return losses


def main() -> None:
    kind, extra = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    steady.plans()
    # The constructor makes malloc return freed memory to the system, in plain runs too. The limit counts
    # memory that malloc keeps.
    cpu.CpuDevice()
    os.environ.update({"TERAIO_DISABLE": "1"} if kind == "plain" else {"TERAIO_MEMORY": str(MEMORY)})
    os.environ |= {"TERAIO_WARMUP": "1", "TERAIO_PLANNING": "inline"}
    train(Chain(), 64, 2)
    teraio.reset()
    torch.manual_seed(0)
    model = Chain()
    base = data_bytes()
    if extra:
        resource.setrlimit(resource.RLIMIT_DATA, (base + extra, base + extra))
    result: dict[str, Any] = {"losses": train(model, BATCH, STEPS), "stats": teraio.stats()}
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result |= {"digest": hashlib.sha256(weights).hexdigest(), "grown_bytes": data_bytes() - base}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
