"""Benchmark of teraio's overhead when everything fits into the budget and nothing moves.

    python benchmarks/engine/cost.py [--layers 4] [--batch 6] [--length 256] [--rounds 15] [--repeats 300]

step   A Llama trains with AdamW on one compute thread. Steps with slots alternate with plain Inductor.
       A step takes 0.3 s or more. Each round gives the ratio of the two step times.
       The figure is the median ratio.
slot   The script visits one slot repeatedly. All tensors of this slot are resident. The figure is the CPU
       time of the thread, so that other load on the machine does not count.
all    The model is a chain of small products. The figure is (forward + backward with slots - the same without
       slots) / number of slots. The figure includes the time in which teraio registers, names and forgets
       tensors and gradients.

The script measures `slot` and `all` for both values of the option `inner`: `eager` and `inductor`.

The script prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.runtime.engine import engine

STEP_TARGET = 1.02
STEP_LEAST_S = 0.3
SLOT_TARGET_US = 3.0
VISITS = 1000
SETTLE = 6  # steps before timing: compile, optimizer states, three measured steps, planning
MEMORY = "80%"

Step = Callable[[], float]


class Chain(nn.Module):
    """A model of many kernels of negligible duration."""

    def __init__(self, layers: int = 40, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def compiled_with_slots(model: nn.Module, inner: str) -> Any:
    return torch.compile(
        model, backend="teraio", options={"inner": inner, "memory": MEMORY, "planning": "inline"}
    )


def compiled_plainly(model: nn.Module, inner: str, *inputs: torch.Tensor) -> Any:
    """Compile the model without slots: with plain Inductor, or with the teraio backend turned off."""
    if inner == "inductor":
        return torch.compile(model)
    # `on_fallback` makes these options differ from the options of the program with slots. With equal options
    # Dynamo could reuse that program.
    options: Any = {"inner": inner, "memory": MEMORY, "planning": "inline", "on_fallback": "warn"}
    plain = torch.compile(model, backend="teraio", options=options)
    with patch.dict(os.environ, TERAIO_DISABLE="1"):
        plain(*inputs).backward()  # compiles both programs
    return plain


def trainer(model: Any, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor, whole: bool) -> Step:
    """Return a function that runs a step and returns its duration.

    The duration is the wall time of the whole step, or the CPU time of the compiled programs alone.
    """

    clock = time.perf_counter if whole else time.thread_time

    def step() -> float:
        began = clock()
        model(*inputs).backward()
        between = clock()
        optimizer.step()
        optimizer.zero_grad()
        return (clock() if whole else between) - began

    return step


def pairs(ours: Step, plain: Step, count: int) -> list[tuple[float, float]]:
    """Run both steps alternately and return pairs (ours, plain). The plain step runs without an engine."""
    found = []
    for number in range(count):
        times = {}
        for name, step in (
            (("ours", ours), ("plain", plain)) if number % 2 else (("plain", plain), ("ours", ours))
        ):
            if name == "ours":
                times[name] = step()
            else:
                with patch.object(engine, "ENGINE", None):
                    times[name] = step()
        found.append((times["ours"], times["plain"]))
    return found


def step_cost(args: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(layers=args.layers)
    tokens = torch.randint(0, shape.vocabulary, (args.batch, args.length + 1))
    inputs = (tokens[:, :-1], tokens[:, 1:])
    steps = []
    for slots in (True, False):
        torch.manual_seed(0)
        model = Llama(shape)
        compiled = compiled_with_slots(model, "inductor") if slots else compiled_plainly(model, "inductor")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        steps.append(trainer(compiled, optimizer, *inputs, whole=True))
    ours, plain = steps
    pairs(ours, plain, SETTLE)
    before = teraio.stats()
    found = pairs(ours, plain, args.rounds)
    moved = {name: teraio.stats()[name] - before[name] for name in ("evictions", "fetches", "slots")}
    teraio.reset()
    ratios = sorted(one / other for one, other in found)
    return {
        "plain_s": round(statistics.median(other for _, other in found), 4),
        "ours_s": round(statistics.median(one for one, _ in found), 4),
        "ours_per_plain": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "slots_per_step": moved["slots"] // args.rounds,
        "moves": moved["evictions"] + moved["fetches"],
    }


def idle_slot_us(step: Step) -> float:
    """Return the median time of a slot, from repeated visits of the same slot."""
    running = engine.ENGINE
    assert running is not None
    visit, found = running.run_slot, []

    def often(program: Any, index: int, tensors: Any, live_bytes: int | None) -> None:
        visit(program, index, tensors, live_bytes)
        stop = program.stops[index]
        if 0 < index < program.last and stop.needed and not stop.made:
            began = time.thread_time()
            for _ in range(VISITS):
                visit(program, index, (), live_bytes)
            found.append((time.thread_time() - began) / VISITS)

    with patch.object(running, "run_slot", often):
        step()
    return statistics.median(found) * 1e6


def slot_cost(inner: str, repeats: int) -> dict[str, Any]:
    x = torch.randn(64, 64)
    steps = []
    for slots in (True, False):
        model = Chain()
        compiled = compiled_with_slots(model, inner) if slots else compiled_plainly(model, inner, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        steps.append(trainer(compiled, optimizer, x, whole=False))
    ours, plain = steps
    ours()  # starts the engine; without it, the plain step's optimizer could start another engine
    pairs(ours, plain, SETTLE)
    before = teraio.stats()["slots"]
    found = pairs(ours, plain, repeats)
    visited = (teraio.stats()["slots"] - before) // repeats
    idle_us = idle_slot_us(ours)
    teraio.reset()
    extra = statistics.median(one - other for one, other in found)
    return {
        "slots_per_step": visited,
        "plain_us": round(statistics.median(other for _, other in found) * 1e6, 1),
        "ours_us": round(statistics.median(one for one, _ in found) * 1e6, 1),
        "us_per_slot_all": round(extra / visited * 1e6, 2),
        "us_per_slot": round(idle_us, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--only", choices=("step", "slot"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "cost"}
    figures: list[tuple[str, float, float, bool]] = []
    if args.only != "slot":
        step = result["step"] = step_cost(args)
        figures.append(
            ("step-ratio", step["ours_per_plain"], STEP_TARGET, step["ours_per_plain"] <= STEP_TARGET)
        )
        figures.append(("plain-step-s", step["plain_s"], STEP_LEAST_S, step["plain_s"] >= STEP_LEAST_S))
    if args.only != "step":
        for inner in ("eager", "inductor"):
            slot = result[f"slot_{inner}"] = slot_cost(inner, args.repeats)
            figures.append(
                (
                    f"slot-us-{inner}",
                    slot["us_per_slot"],
                    SLOT_TARGET_US,
                    slot["us_per_slot"] <= SLOT_TARGET_US,
                )
            )
    print(json.dumps(result, indent=1))
    for name, value, target, passed in figures:
        print(f"cost-{name} {value} {target} {'PASS' if passed else 'FAIL'}", file=sys.stderr)
    return int(not all(passed for *_, passed in figures))


if __name__ == "__main__":
    sys.exit(main())
