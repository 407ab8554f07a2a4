"""Benchmark of how well transfers overlap compute, on one model and one slowed-down store.

    python benchmarks/engine/overlap.py [--layers 16] [--width 512] [--batch 1024] [--rounds 7]
                                        [--transfer 0.8] [--collectives 0.8]

compute   the plain program, which has no slots and no transfers
planned   the plan of the greedy planner, which issues transfers ahead of their use
forced    the moves of `planned`, each issued only when compute needs its bytes; compute waits for all of them

A shim around the I/O engine delays every operation of the drive. The script sets the delays so that the
writes and reads of a step take the share `--transfer` of its compute time. Writes get 0.3 of this transfer
time, because all evictions happen in the forward, which takes a third of the step. The benchmark uses one
compute thread. It runs `compute`, `planned` and `forced` alternately, and reports medians over rounds.
With `--collectives`, a collective begins before each product, and the program waits for it after the product.
The collectives of a step take this share of its compute time, and compute nothing. `planned` and `forced` run
with them; `compute` runs with collectives that take no time.

`--pace-ms` and `--attempts` are for machines with other load. The script prints one JSON object.

With the default sizes, a saved activation (2 MiB) occupies all concurrent operations of the drive. So a move
takes equally long alone and beside other moves. A smaller activation would take longer alone than beside
others. `forced` moves each activation alone, so its steps would take longer than the drive needs for the
bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import library, nn

import teraio
from teraio import _native
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.options import Settings
from teraio.passes.planner import planners
from teraio.passes.planner.problem import problem
from teraio.passes.planner.simulate import simulate
from teraio.runtime.engine import engine
from teraio.runtime.ledger.pending_evictions import PendingEvictions
from teraio.runtime.ledger.record import Record
from teraio.runtime.store.store import Store
from teraio.session import session

sys.path.insert(0, str(Path(__file__).parent))

from paced_collectives import PacedGroup, begin_group

# Share of writes in the transfer time. All writes happen in the forward, which is a third of the step.
WRITES_SHARE = 0.3
PLANNED_TARGET, FORCED_TARGET = 1.15, 1.6
LONGEST_TARGET = 1.1  # of a planned step, per the longest of compute, transfers and collectives
SLOTS = 8  # concurrent operations of the drive


@library.custom_op("teraio_overlap::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, pace_s: float) -> torch.Tensor:
    """Return the matrix product, after at least `pace_s` seconds.

    The minimum imitates a device that other load on this machine does not slow down.
    """
    began = time.perf_counter()
    result = a @ b
    time.sleep(max(0.0, pace_s - (time.perf_counter() - began)))
    return result


@product.register_fake
def _(a: torch.Tensor, b: torch.Tensor, pace_s: float) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.pace_s = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    a, b = ctx.saved_tensors
    begun = begin_collective(grad, 2 * MESSAGE)  # two products take twice the time of the forward's one
    of_a, of_b = product(grad, b.t(), ctx.pace_s), product(a.t(), grad, ctx.pace_s)
    return of_a, of_b if begun is None else of_b + 0 * wait(begun)[0], None


MESSAGE = 64  # elements of the collective beside a product
GROUPS: list[PacedGroup] = []  # the group of the collectives, if the products have collectives beside them


def begin_collective(tensor: torch.Tensor, count: int) -> torch.Tensor | None:
    """Begin a collective with some elements of the tensor. Return None if the program has no collectives."""
    if not GROUPS:
        return None
    message = tensor.detach().flatten()[:count].clone()
    begun: torch.Tensor = torch.ops._c10d_functional.all_reduce(message, "sum", GROUPS[0].group_name)
    return begun


def wait(begun: torch.Tensor) -> torch.Tensor:
    ended: torch.Tensor = torch.ops._c10d_functional.wait_tensor(begun)
    return ended


product.register_autograd(_backward, setup_context=_keep)


class Chain(nn.Module):
    """A chain of matrix products and activations; every layer saves tensors for its backward."""

    def __init__(self, layers: int, width: int, pace_s: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(layers))
        self.pace_s = pace_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = x.new_zeros(())
        for weight in self.weights:
            begun = begin_collective(x, MESSAGE)
            x = torch.relu(product(x, weight, self.pace_s) if self.pace_s else x @ weight)
            nothing = nothing if begun is None else nothing + 0 * wait(begun)[0]
        return x.square().mean() + nothing


class Bench:
    """One model, compiled plainly and with slots, and the shim that delays its store."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.message_s = 0.0  # duration of the collective beside the product of a forward
        self.folder = folder
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.x = torch.randn(args.batch, args.width)
        ours, plain = (Chain(args.layers, args.width, args.pace_ms / 1e3) for _ in range(2))
        self.compiled = torch.compile(ours, backend="teraio", options={"inner": "eager"})
        self.optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
        os.environ["TERAIO_DISABLE"] = "1"
        # `on_fallback` makes these options differ from the options of the program with slots. With equal
        # options Dynamo could reuse that program.
        options: Any = {"inner": "eager", "on_fallback": "warn"}
        self.plain = torch.compile(plain, backend="teraio", options=options)
        self.plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
        self.compute()
        del os.environ["TERAIO_DISABLE"]
        self.shim: _native.FaultIo

    def _train(self, model: Any, optimizer: torch.optim.Optimizer) -> float:
        began = time.perf_counter()
        model(self.x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    def compute(self) -> float:
        """Run a step of the plain program, without an engine."""
        with patch.object(engine, "ENGINE", None):
            return self._train(self.plain, self.plain_optimizer)

    def step(self) -> float:
        with slow_collectives(self.message_s):
            return self._train(self.compiled, self.optimizer)

    def pace_collectives(self, compute_s: float) -> None:
        """Make the collectives of a step take the share `--collectives` of this compute time."""
        messages = 3 * self.args.layers  # one per product: each layer has one in the forward, and two later
        self.message_s = self.args.collectives * compute_s / messages

    def start(self, budget_bytes: int, **settings: str) -> None:
        """Start an engine with this budget. The shim delays the engine's store."""

        def wrap(inner: _native.Io) -> _native.Io:
            self.shim = _native.FaultIo(inner)
            return self.shim

        def opened(*places: Any, **rest: Any) -> Store:
            return Store(*places, wrap=wrap, **rest)

        teraio.reset()
        os.environ.update(
            TERAIO_MEMORY=str(budget_bytes), TERAIO_PLANNER="none", TERAIO_STORE=str(self.folder), **settings
        )
        with patch.object(Store, "open", opened):
            session.ensure_session(Settings.parse({"inner": "eager"}))

    def throttle(self, write_s: float, read_s: float) -> None:
        self.shim.clear()
        self.shim.add("delay", "write", sticky=True, delay_s=write_s)
        self.shim.add("delay", "read", sticky=True, delay_s=read_s)

    def profile(self, budget_bytes: int, warmup: int) -> Profile:
        """Record a profile through the option `profile`, and return it."""
        path = str(self.folder / "run.profile.json")
        self.start(budget_bytes, TERAIO_PROFILE=path, TERAIO_WARMUP=str(warmup))
        for _ in range(warmup + 2):
            self.step()
        del os.environ["TERAIO_PROFILE"]
        return Profile.read(path)

    def busy(self) -> dict[str, float]:
        """Return the seconds and bytes of the drive's writes and reads since the store was opened."""
        assert engine.ENGINE is not None
        stats = engine.ENGINE.mover.store.space.transfers.stats()
        return {
            "write_s": stats["write_busy_s"],
            "read_s": stats["read_busy_s"],
            "written_bytes": stats["bytes_written"],
            "read_bytes": stats["bytes_read"],
            "collective_s": sum(group.busy_s for group in GROUPS),
        }

    def run(self, plan: Plan, steps: int = 1) -> tuple[float, dict[str, float]]:
        """Run some steps with this plan.

        Return the duration of the last step, and the counts of the drive and the engine in this step.
        """
        assert engine.ENGINE is not None
        engine.ENGINE.follow_plan(plan)
        took, did = 0.0, {}
        for _ in range(steps):
            before, counts = self.busy(), teraio.stats()
            took = self.step()
            did = {name: value - before[name] for name, value in self.busy().items()}
            did |= {name: teraio.stats()[name] - counts[name] for name in ("misses", "skipped_moves")}
            did["stall_s"] = (teraio.stats()["stall_ns"] - counts["stall_ns"]) / 1e9
        return took, did


def forced(plan: Plan) -> Plan:
    """Return a plan with the same moves. Issue each move only at the point where compute waits for it."""
    return replace(
        plan,
        moves=tuple(
            replace(move, trigger=move.ready)
            if isinstance(move, Fetch)
            else replace(move, trigger=None if move.trigger is None else move.free)
            for move in plan.moves
        ),
    )


@contextlib.contextmanager
def slow_collectives(message_s: float) -> Iterator[None]:
    """Let each message of the collectives take this time, in the `with` block."""
    for group in GROUPS:
        group.byte_s = message_s / (4 * MESSAGE)
    yield
    for group in GROUPS:
        group.byte_s = 0.0


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Make compute wait for every write before the kernel where the plan frees the bytes, even if no kernel
    needs the bytes yet.
    """

    def waits(self: PendingEvictions, record: Record, by_plan: bool = False) -> None:
        self.end_evict(record)

    with patch.object(PendingEvictions, "add", waits):
        yield


def budget_of(profile: Profile, part: float) -> int:
    """Return a budget. `part` 0 gives the smallest budget that works, `part` 1 the budget for everything."""
    most = check_plan_against_profile(Plan("", "none", 2**62), profile).peak_bytes
    least = problem.smallest_budget(profile)
    return int(least + part * (most - least))


def machine(write_rate: float, read_rate: float) -> Machine:
    links = (Link("device", "ssd", int(write_rate)), Link("ssd", "device", int(read_rate)))
    return Machine("throttled", (Tier("device", 2**50), Tier("ssd", 2**50)), links)


def moved(plan: Plan, profile: Profile) -> tuple[int, int]:
    """Return the bytes that a step writes and reads."""
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    writes = [move for move in plan.moves if isinstance(move, Evict) and move.trigger is not None]
    reads = [move for move in plan.moves if isinstance(move, Fetch)]
    return sum(sizes[m.tensor] for m in writes), sum(sizes[m.tensor] for m in reads)


def throttled_plan(bench: Bench, profile: Profile, budget: int, transfer_s: float) -> tuple[Plan, Machine]:
    """Set the drive's delays so that a step's writes and reads take `transfer_s`. Return a plan for the
    delayed drive.

    The plan depends on the delays, and the delays depend on the plan. So adjust both for a few rounds.
    """
    assert engine.ENGINE is not None
    chunk = engine.ENGINE.mover.store._slabs.slab_bytes * SLOTS
    wanted = (WRITES_SHARE * transfer_s, (1 - WRITES_SHARE) * transfer_s)
    excess = budget_of(profile, 1.0) - budget  # the least number of bytes that must move
    assert excess > 0, "everything fits, so nothing would move"
    rates = (excess / wanted[0], excess / wanted[1])
    delays = [chunk / rate for rate in rates]
    for _ in range(3):
        drive = machine(*rates)
        plan = planners.plan(profile, drive, budget)
        bench.throttle(*delays)
        with at_once():
            _, did = bench.run(forced(plan), steps=2)
        took = (did["write_s"], did["read_s"])
        delays = [delay * min(2.0, want / max(t, 1e-6)) for delay, want, t in zip(delays, wanted, took)]
        counts = moved(plan, profile)
        rates = (counts[0] / wanted[0], counts[1] / wanted[1])
    bench.throttle(*delays)
    drive = machine(*rates)
    return planners.plan(profile, drive, budget), drive


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if args.collectives:
        GROUPS.append(begin_group())
    bench = Bench(args, folder)
    budget = 2**30
    for _ in range(2):  # twice, because a budget includes the slabs, and the slabs shrink with the budget
        budget = budget_of(bench.profile(budget, warmup=1), args.part)
    profile = bench.profile(budget, warmup=3)
    result: dict[str, Any] = {}
    for attempt in range(1, args.attempts + 1):
        compute_s = statistics.median(bench.compute() for _ in range(3))
        bench.pace_collectives(compute_s)
        plan, drive = throttled_plan(bench, profile, budget, args.transfer * compute_s)
        predicted = simulate.simulate(plan, profile, drive)
        result = {
            "benchmark": "overlap",
            "attempt": attempt,
            "budget_bytes": budget,
            "moves": len(plan.moves),
            "predicted_per_compute": round(plan.predicted.step_ns / profile.step_ns, 3),
            "predicted_stall_s": round(sum(stall.ns for stall in predicted.stalls) / 1e9, 4),
            **rounds(bench, plan, args.rounds),
        }
        if all(passed for *_, passed in figures(result)):
            break
    teraio.reset()
    return result


def rounds(bench: Bench, plan: Plan, count: int) -> dict[str, Any]:
    """Run `compute`, `planned` and `forced` alternately, so that other load slows them equally. Return
    medians.
    """
    rows: dict[str, list[float]] = {"compute": [], "planned": [], "forced": []}
    did: dict[str, list[dict[str, float]]] = {"planned": [], "forced": []}
    for _ in range(count):
        rows["compute"].append(bench.compute())
        for name, one in (("planned", plan), ("forced", forced(plan))):
            with at_once() if name == "forced" else contextlib.nullcontext():
                took, what = bench.run(one, steps=2)
            rows[name].append(took)
            did[name].append(what)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    typical = {name: _medians(values) for name, values in did.items()}
    transfer_s = typical["forced"]["write_s"] + typical["forced"]["read_s"]
    own = typical["planned"]
    longest_s = max(medians["compute"], own["write_s"] + own["read_s"], own["collective_s"])
    return {
        "step_s": {name: round(value, 4) for name, value in medians.items()},
        "rounds_s": {name: [round(value, 4) for value in values] for name, values in rows.items()},
        "transfer_per_compute": round(transfer_s / medians["compute"], 3),
        "planned_per_compute": round(medians["planned"] / medians["compute"], 3),
        "forced_per_compute": round(medians["forced"] / medians["compute"], 3),
        "collectives_per_compute": round(typical["planned"]["collective_s"] / medians["compute"], 3),
        "planned_per_longest": round(medians["planned"] / longest_s, 3),
        **typical,
    }


def figures(result: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Return rows (name, value, target, passed)."""
    planned, forced_ = result["planned_per_compute"], result["forced_per_compute"]
    longest = result["planned_per_longest"]
    if result["collectives_per_compute"]:
        return [("planned-per-longest", longest, LONGEST_TARGET, longest <= LONGEST_TARGET)]
    return [
        ("planned-per-compute", planned, PLANNED_TARGET, planned <= PLANNED_TARGET),
        ("forced-per-compute", forced_, FORCED_TARGET, forced_ >= FORCED_TARGET),
    ]


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--pace-ms", type=float, default=0.0, help="least duration of a product")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", type=float, default=0.4, help="budget: 0 the smallest, 1 holds all")
    parser.add_argument("--transfer", type=float, default=0.8, help="time of transfers per time of compute")
    parser.add_argument("--collectives", type=float, default=0.0, help="their time per time of compute")
    parser.add_argument("--attempts", type=int, default=1, help="measure again if a target was missed")
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="teraio-overlap-", dir=args.dir) as folder:
        result = measure(args, Path(folder))
    print(json.dumps(result, indent=1))
    for name, value, target, passed in figures(result):
        print(f"overlap-{name} {value} {target} {'PASS' if passed else 'FAIL'}", file=sys.stderr)
    return int(not all(passed for *_, passed in figures(result)))


if __name__ == "__main__":
    sys.exit(main())
