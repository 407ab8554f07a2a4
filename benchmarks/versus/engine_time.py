"""Breakdown of a step's time: kernels, waits, functions of the engine's Python code, and CPU time of threads.

    python benchmarks/versus/engine_time.py [--subject llama-7m] [--part 0.4] [--inner eager] [--steps 10]
                                            [--top 20]

A slot is a call of teraio between kernels. The script first measures the step and the time inside slots,
without a profiler. It uses the recorder that makes timelines. It then runs the same number of steps under
cProfile. This second run gives only the shares of functions, because the profiler slows the steps. The script
prints a table to stderr and one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
from race.bounds import while_planned
from race.models import subject_of
from race.trainee import Trainee

import teraio
from teraio.session import session

ENGINE = ("runtime", "passes", "teraio")  # folders with the engine's code
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--subject", default="llama-7m")
    parser.add_argument("--memory", default="", help="bytes; default: --part of the plain step's peak")
    parser.add_argument("--part", type=float, default=0.4)
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--top", type=int, default=20)
    args = parser.parse_args()
    request: dict[str, Any] = {
        "subject": args.subject,
        "threads": args.threads,
        "options": {"inner": args.inner},
    }
    subject_of(args.subject)
    plain = Trainee({**request, "way": "plain"}) if not args.memory else None
    memory = int(args.memory or args.part * max(plain.step()["tensors"] for _ in range(3)))  # type: ignore[union-attr]
    del plain
    trainee = Trainee({**request, "way": "teraio", "memory": memory})
    rows = [trainee.step() for _ in range(8)]
    assert rows[-1]["settled"], "no plan after 8 steps"
    found = {**shares(trainee, args.steps), **functions(trainee, args.steps, args.top)}
    print(json.dumps({"benchmark": "engine_time", **vars(args), "torch": torch.__version__, **found}))
    teraio.reset()


def shares(trainee: Trainee, steps: int) -> dict[str, Any]:
    """Return step time, time in slots, waits, moves and CPU time of threads, as means per step. Medians would
    hide rare events.
    """
    before, threads = teraio.stats(), thread_seconds()
    began = time.perf_counter()
    for _ in range(steps):
        trainee.step()
    step_ms = (time.perf_counter() - began) / steps * 1e3
    after = teraio.stats()
    counted = ("slots", "evictions", "fetches", "drops")
    each = {name: (after[name] - before[name]) / steps for name in counted}  # type: ignore[literal-required]
    busy = {name: (value - threads.get(name, 0)) / steps * 1e3 for name, value in thread_seconds().items()}
    assert session.SESSION is not None
    ((profile, _),) = session.SESSION.sources()
    _, in_slots_ns = while_planned(profile, trainee.step)
    waits_ms = (after["stall_ns"] - before["stall_ns"]) / steps / 1e6
    print(
        f"a step {step_ms:.1f} ms: in slots {in_slots_ns / 1e6:.1f} ms, of that waiting {waits_ms:.1f} ms\n"
        f"  {each['slots']:.0f} slots, {each['evictions']:.0f} evictions, {each['fetches']:.0f} fetches, "
        f"{each['drops']:.0f} drops",
        file=sys.stderr,
    )
    for name, value in sorted(busy.items()):
        if value >= 0.05:
            print(f"  thread {name}: {value:.1f} ms of CPU", file=sys.stderr)
    return {
        "step_ms": step_ms,
        "in_slots_ms": in_slots_ns / 1e6,
        "waits_ms": waits_ms,
        "each": each,
        "thread_ms": busy,
    }


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process's threads, by the name of the thread."""
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        fields = rest.split()
        found[name] = found.get(name, 0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def functions(trainee: Trainee, steps: int, top: int) -> dict[str, Any]:
    """Return the engine's functions with the most time, without time in the functions that they call, in
    milliseconds per step.
    """
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        trainee.step()
    profiler.disable()
    rows = []
    for (file, _, name), (_, calls, own_s, whole_s, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        place = Path(file)
        if place.parent.name in ENGINE or "_native" in name:
            rows.append((f"{place.stem}.{name}", calls / steps, own_s / steps * 1e3, whole_s / steps * 1e3))
    rows.sort(key=lambda row: -row[2])
    print(f"{'function':44} {'calls':>7} {'own ms':>8} {'whole ms':>8}", file=sys.stderr)
    for name, calls, own, whole in rows[:top]:
        print(f"{name:44} {calls:7.0f} {own:8.2f} {whole:8.2f}", file=sys.stderr)
    print(f"{'all of them':44} {'':7} {sum(row[2] for row in rows):8.2f}", file=sys.stderr)
    return {"functions": [dict(zip(("name", "calls", "own_ms", "whole_ms"), row)) for row in rows[:top]]}


if __name__ == "__main__":
    main()
