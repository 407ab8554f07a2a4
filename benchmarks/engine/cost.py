"""What teraio costs where it has nothing to do: everything fits into the budget.

    python benchmarks/engine/cost.py [--layers 4] [--batch 6] [--length 256] [--rounds 15] [--repeats 300]

step   a Llama with AdamW on plain Inductor and with slots, interleaved, one compute thread: the median over
       rounds of the ratio of the two; a step takes 0.3 s or more
slot   a slot with nothing to do, of whose kernel all is there: visited often where it stands, in CPU time of
       the thread (neighbours on the machine do not count); `all` is forward and backward of a chain of small
       products, with slots less plainly, by the number of slots: with it, all that is counted as it is made,
       named and forgotten, gradients among it. For both inner programs

Prints one JSON object.
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
SETTLE = 6  # steps: compile, optimizer states, three that measure, the plan
MEMORY = "80%"

Step = Callable[[], float]


class Chain(nn.Module):
    """Many kernels that take next to no time."""

    def __init__(self, layers: int = 40, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def compiled_with_slots(model: nn.Module, inner: str) -> Any:
    return torch.compile(model, backend="teraio", options={"inner": inner, "memory": MEMORY})


def compiled_plainly(model: nn.Module, inner: str, *inputs: torch.Tensor) -> Any:
    """Plain Inductor, or the same FX graph without slots."""
    if inner == "inductor":
        return torch.compile(model)
    # Other options than the one with slots, or Dynamo may take its program.
    options: Any = {"inner": inner, "memory": MEMORY, "on_fallback": "warn"}
    plain = torch.compile(model, backend="teraio", options=options)
    with patch.dict(os.environ, TERAIO_DISABLE="1"):
        plain(*inputs).backward()  # both programs are compiled here
    return plain


def trainer(model: Any, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor, whole: bool) -> Step:
    """A step that returns its seconds: the whole of it, or CPU time of the compiled programs alone."""

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
    """(ours, plain), in turn; the plain step meets no engine."""
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
    """The median over slots; a slot that was just visited can be visited again."""
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
    ours()  # the engine is there before a plain step's optimizer could start one of its own
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
