"""Benchmark of compile time: slots against plain Inductor, each with an empty cache and with a filled cache.

    python benchmarks/engine/compile.py [--rounds 3] [--layers 6] [--memory 4GiB]

Each measurement runs in its own process. The script times the demo's Llama from `torch.compile` to the end of
the first step (forward, lazily compiled backward, optimizer). From this time, the script subtracts the median
time of later steps. The time of teraio includes the start of its engine: opening the store and measuring the
links. Each cold process fills an Inductor cache of its own, which one warm process then uses. Inductor and
teraio change their order in every round. The figures are medians of the rounds. The script prints one JSON
object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

GOALS = {"cold": 1.1, "warm": 1.5}
BACKENDS = ("inductor", "teraio")
BATCH, LENGTH, STEPS = 8, 256, 4


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Return the wall time and the CPU time of one compilation. CPU time includes child processes."""
    import torch
    from torch._dynamo.utils import counters

    from teraio.cli.demo_model import Llama, Shape

    torch.manual_seed(0)
    model = Llama(Shape(layers=args.layers))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, model.shape.vocabulary, (BATCH, LENGTH + 1))
    options: dict[str, Any] = {"memory": args.memory} if args.child == "teraio" else {}
    clocks = [(time.perf_counter(), _cpu())]
    compiled = torch.compile(model, backend=args.child, options=options)
    for _ in range(STEPS):
        compiled(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        clocks.append((time.perf_counter(), _cpu()))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(clocks)]
    (wall, cpu), later = steps[0], steps[2:]
    return {
        "wall_s": wall - statistics.median(wall for wall, _ in later),
        "cpu_s": cpu - statistics.median(cpu for _, cpu in later),
        "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    }


def _cpu() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def measured(args: argparse.Namespace, backend: str, cache: str) -> dict[str, Any]:
    """Run one measurement in a new process.

    The process waits for the child processes that compile kernels. So its CPU time includes their CPU time.
    """
    command = [sys.executable, __file__, "--child", backend]
    command += ["--layers", str(args.layers), "--memory", args.memory]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the rounds. Each round also gives a ratio, teraio / Inductor; return the median
    ratio.
    """
    figures: dict[str, Any] = {}
    for clock in ("wall_s", "cpu_s"):
        for backend in BACKENDS:
            figures[f"{backend}_{clock}"] = round(statistics.median(run[clock] for run in runs[backend]), 2)
        ratios = [ours[clock] / plain[clock] for plain, ours in zip(*(runs[b] for b in BACKENDS))]
        figures[f"ratio_{clock.removesuffix('_s')}"] = round(statistics.median(ratios), 3)
        figures[f"ratios_{clock.removesuffix('_s')}"] = [round(ratio, 3) for ratio in ratios]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--memory", default="4GiB", help="teraio's budget; everything fits into the default")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return 0
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {backend: [] for backend in BACKENDS} for name in GOALS
    }
    for number in range(args.rounds):
        for backend in BACKENDS if number % 2 else BACKENDS[::-1]:
            with tempfile.TemporaryDirectory(prefix="teraio-compile-") as cache:
                for name in GOALS:  # the cold process runs first, and fills the cache for the warm process
                    run = measured(args, backend, cache)
                    assert bool(run["hits"]) == (name == "warm"), f"{backend} {name}: {run['hits']} hits"
                    runs[name][backend].append(run)
    result: dict[str, Any] = {"benchmark": "compile", "layers": args.layers, "rounds": args.rounds}
    for name, goal in GOALS.items():
        result[name] = {**summary(runs[name]), "goal": goal}
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
