"""Trainings of the same model in several surroundings, compared with one plain training.

A surrounding is a folder on some file system for the store, limits of the system, or an event on the file
system during the training.

    surroundings_child.py '[{"name": "few files", "store": "/folder", "limits": {"RLIMIT_NOFILE": 64}}, ...]'

The script prints one JSON object with an entry per name. The entry tells whether losses and weights equal the
plain training's losses and weights. The entry also holds the error, if any.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import teraio
from teraio.errors import TeraioError

WIDTH, LAYERS, STEPS = 512, 6, 5
MEMORY = "24MiB"  # weights, gradients and optimizer states take 25 MiB
MIB = 2**20


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def train(case: dict[str, Any]) -> list[Any]:
    """Train, and return the losses and the final weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"inner": "eager", "memory": MEMORY, "warmup": 1, "planning": "inline", "store": case["store"]}
    compiled = torch.compile(
        model, backend="teraio", options=options if case["store"] else {"inner": "eager"}
    )
    losses = []
    for step in range(STEPS):
        loss = compiled(torch.randn(16, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == STEPS // 2:
            happens(case)
    return [losses, [parameter.detach().clone() for parameter in model.parameters()]]


def happens(case: dict[str, Any]) -> None:
    """Let the surrounding's event happen in the middle of the training."""
    if filled := case.get("fill"):
        with contextlib.suppress(OSError), open(Path(filled) / "other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(MIB))
    if command := case.get("run"):
        subprocess.run(command, check=True)


@contextlib.contextmanager
def limited(limits: dict[str, int]) -> Iterator[None]:
    before = {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, before[name][1]))
    try:
        yield
    finally:
        for name, pair in before.items():
            resource.setrlimit(getattr(resource, name), pair)


def outcome(case: dict[str, Any], expected: list[Any]) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    error = ""
    same = False
    with limited(case.get("limits", {})):
        try:
            losses, weights = train(case)
            same = losses == expected[0] and all(map(torch.equal, weights, expected[1]))
            moved = dict(teraio.stats())
        except TeraioError as raised:
            error = f"{type(raised).__name__}: {raised}"
        except Exception as raised:  # noqa: BLE001  an error that is not teraio's own is a finding
            error = f"not an error of teraio: {type(raised).__name__}: {raised}"
        finally:
            with contextlib.suppress(TeraioError):
                teraio.reset()
    fetches, evictions = moved.get("fetches", 0), moved.get("evictions", 0)
    return {"same": same, "error": error, "fetches": fetches, "evictions": evictions}


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(sys.argv[1])
    with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
        expected = train({"store": ""})
    print(json.dumps({case["name"]: outcome(case, expected) for case in cases}))


if __name__ == "__main__":
    main()
