"""Benchmark of reading weights and gradients through numpy in every step.

    python benchmarks/engine/looking.py [--steps 12] [--memory 9MiB]

The model has 16 layers of 256 x 256, trained with SGD, `inner="eager"` and one thread. Four kinds of steps
alternate. They read (1) no weight, (2) one weight, (3) all weights, (4) all gradients. For each kind of step
the script prints the median time, and its ratio to a step that reads nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["TERAIO_CACHE_DIR"] = "off"

import torch
from torch import nn

WIDTH, LAYERS, ROWS, WARM = 256, 16, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory", default="9MiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    options: dict[str, Any] = {
        "memory": args.memory,
        "inner": "eager",
        "planner": "greedy",
        "planning": "inline",
    }
    compiled: Any = torch.compile(model, backend="teraio", dynamic=False, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(ROWS, WIDTH)
    weights = list(model.parameters())

    def step(looks: Callable[[], Any]) -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        looks()
        optimizer.step()
        return time.perf_counter() - began

    ways: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "one weight": lambda: float(weights[0].detach().numpy()[0].sum()),
        "all weights": lambda: [float(w.detach().numpy().flat[0]) for w in weights],
        "all gradients": lambda: [float(w.grad.numpy().flat[0]) for w in weights if w.grad is not None],
    }
    for _ in range(WARM):
        step(ways["none"])
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.steps):
        for name, looks in ways.items():
            took[name].append(step(looks))
    none_s = statistics.median(took["none"])
    for name, seconds in took.items():
        median_s = statistics.median(seconds)
        print(f"{name:14} {median_s * 1e3:8.1f} ms  {median_s / none_s:6.2f}")


if __name__ == "__main__":
    main()
