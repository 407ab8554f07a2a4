"""Cost of observing operators.

    python benchmarks/observed.py [--rounds 15] [--threads 1]

Operators on small tensors, one with a kernel of some 50 us, and a function of 50 tensors: with a tensor
evicted and the observer there, and without it, in turn. Printed are medians of the rounds' best in us, and
the difference.
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

from teraio.runtime import engine
from teraio.runtime.observer import Observer

WIDTH = 256
CALLS = {"foreach of 50": 100, "matmul": 500}
USUAL = 4000


def evicted() -> tuple[nn.Module, Observer]:
    """A trained model whose weights are evicted."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    compiled: Any = torch.compile(model, backend="teraio", options={"inner": "eager", "memory": "64MiB"})
    compiled(torch.ones(4, WIDTH)).sum().backward()
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    residency.serial += 1
    residency.free(2**40, None)
    assert residency.mover.counts.evictions
    assert engine.ENGINE.user.observer is not None
    return model, engine.ENGINE.user.observer


def best_us(work: Callable[[], Any], calls: int) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - began) / calls * 1e6)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, observer = evicted()
    a, b, large = torch.randn(8, 8), torch.randn(8, 8), torch.randn(128, 128)
    many = [torch.randn(8, 8) for _ in range(50)]
    works: dict[str, Callable[[], Any]] = {
        "add": lambda: a + b,
        "view": lambda: a.view(-1),
        "addmm": lambda: torch.addmm(a, a, b),
        "matmul": lambda: large @ large,
        "foreach of 50": lambda: torch._foreach_mul_(many, 1.0),
    }
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(args.rounds):
        for on in (True, False):
            observer.observes(on)
            for name, work in works.items():
                found.setdefault((name, on), []).append(best_us(work, CALLS.get(name, USUAL)))
    observer.observes(True)
    for name in works:
        seen, bare = (statistics.median(found[name, which]) for which in (True, False))
        more = seen - bare
        print(f"{name:15} {bare:8.2f} us {seen:8.2f} us observed {more:+7.2f} us {more / bare:+7.1%}")
    del model


if __name__ == "__main__":
    main()
