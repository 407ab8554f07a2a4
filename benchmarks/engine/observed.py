"""Benchmark of the cost of observing operators.

    python benchmarks/engine/observed.py [--rounds 15] [--threads 1]
    python benchmarks/engine/observed.py --steps 200 [--inner inductor] [--memory 2GiB]
    python benchmarks/engine/observed.py --gradient-calls [--rounds 15]

The observer detects reads of evicted tensors. Without `--steps`, the script runs operators in three cases:
(1) on small tensors, (2) in a kernel of some 50 us, (3) on a list of 50 tensors. Some weights of a model are
evicted meanwhile. The observer is switched on and off alternately. Each round gives the best time with the
observer, and the best time without, in us. The script prints the medians of these times over the rounds, and
the difference of the medians.

With `--steps`, training steps run: 8 linear layers of 768 with activations, 512 rows, Adam. Every second step
runs without the observer. The script prints the medians in ms, and the median ratio of neighbouring steps.

With `--gradient-calls`, processes without and with teraio take turns. They call operators on a small tensor
that is no gradient. The operator `add_` has only the observer. The others also have a kernel of teraio, so
that norms and scalings of evicted gradients need no fetch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TERAIO_CACHE_DIR"] = "off"

import torch
from torch import nn

from teraio.runtime.engine import engine
from teraio.runtime.torch_extension.observer import Observer, observer_of_process

WIDTH = 256
CALLS = {"foreach of 50": 100, "matmul": 500}
USUAL = 4000
SMALL, ONE = torch.ones(16), torch.tensor(1.0)
GRADIENT_CALLS: dict[str, Callable[[], Any]] = {
    "add_": lambda: SMALL.add_(ONE),
    "mul_": lambda: SMALL.mul_(ONE),
    "clamp_": lambda: SMALL.clamp_(-1.0, 1.0),
    "vector_norm": lambda: torch.linalg.vector_norm(SMALL),
}


def evicted() -> tuple[nn.Module, Observer]:
    """Return a model with evicted weights, and the engine's observer."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    compiled: Any = torch.compile(
        model, backend="teraio", options={"inner": "eager", "memory": "64MiB", "planning": "inline"}
    )
    compiled(torch.ones(4, WIDTH)).sum().backward()
    assert engine.ENGINE is not None
    residency = engine.ENGINE.residency
    residency.advance_slot()
    residency.evict_until_fits(2**40, None)
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


def observed_steps(count: int, inner: str, memory: str) -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.GELU())]
    model = nn.Sequential(*layers)
    compiled: Any = torch.compile(
        model, backend="teraio", options={"inner": inner, "memory": memory, "planning": "inline"}
    )
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(512, 768)

    def step_ms() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
        return (time.perf_counter() - began) * 1e3

    for _ in range(12):
        step_ms()
    assert engine.ENGINE is not None
    observer = engine.ENGINE.user.observer
    assert observer is not None
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * count):
        on = number % 4 in (0, 3)
        observer.set_observing(on)
        took[on].append(step_ms())
    observer.set_observing(True)
    seen, bare = (statistics.median(took[which]) for which in (True, False))
    ratio = statistics.median(a / b for a, b in zip(took[True], took[False], strict=True))
    print(f"step of {inner}, {memory}: {bare:.2f} ms, {seen:.2f} ms observed, ratio {ratio:.4f}")
    print(f"fetches per step: {engine.ENGINE.mover.counts.fetches / (12 + 2 * count):.0f}")


def gradient_calls(rounds: int) -> None:
    """Measure the calls in new processes, in turns without and with teraio."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for which in ("without", "with"):
            command = [sys.executable, __file__, "--gradient-calls-here", which]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, took_us in zip(GRADIENT_CALLS, done.stdout.split(), strict=True):
                found.setdefault((name, which), []).append(float(took_us))
    for name in GRADIENT_CALLS:
        bare, seen = (statistics.median(found[name, which]) for which in ("without", "with"))
        print(f"{name:15} {bare:8.2f} us {seen:8.2f} us with teraio {seen - bare:+7.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--gradient-calls", action="store_true")
    parser.add_argument("--gradient-calls-here", choices=("without", "with"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.gradient_calls:
        gradient_calls(args.rounds)
        return
    if args.gradient_calls_here:
        gradient = torch.zeros(WIDTH)
        if args.gradient_calls_here == "with" and (observer := observer_of_process()) is not None:
            observer.note_gradient(gradient.untyped_storage(), "a gradient")
        print(*(best_us(work, 10 * USUAL) for work in GRADIENT_CALLS.values()))
        return
    if args.steps:
        observed_steps(args.steps, args.inner, args.memory)
        return
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
            observer.set_observing(on)
            for name, work in works.items():
                found.setdefault((name, on), []).append(best_us(work, CALLS.get(name, USUAL)))
    observer.set_observing(True)
    for name in works:
        seen, bare = (statistics.median(found[name, which]) for which in (True, False))
        more = seen - bare
        print(f"{name:15} {bare:8.2f} us {seen:8.2f} us observed {more:+7.2f} us {more / bare:+7.1%}")
    del model


if __name__ == "__main__":
    main()
