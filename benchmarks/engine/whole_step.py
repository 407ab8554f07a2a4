"""Benchmark of whole trainings under a budget: gradient accumulation, clipping and AdamW, against plain
training.

    python benchmarks/engine/whole_step.py [--inner inductor] [--layers 6] [--batch 4] [--length 128]
                                           [--steps 10]

Plain training runs first; its peak is P. Trainings follow with budgets of 0.5 P, 0.3 P and the smallest
budget that the engine accepts. Each budget gives a row:

equal                 whether losses, gradient norms, weights and states are bit-equal
peak                  the largest peak of tensors, counted by an allocator
step, x plain         the step's time, and its ratio to the time of a plain step
read, written         bytes moved per step
drive                 the least time that the drive needs for these bytes
persistent            the most bytes of weights, gradients and states resident at the same time, between the
                      end of a backward and the end of `zero_grad`
bucket                the largest bucket of the optimizer

Tensors that fit are kept resident, so `persistent` grows with the budget. The last row shows the memory that
the step needs between the end of a backward and the end of `zero_grad`. Its budget is 0.5 P again, except
from the end of each backward to the end of `zero_grad`. In this phase the tensors get only the bytes of two
buckets and one parameter. Sizes are in MiB. The script prints the table to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import counting_allocator
import torch

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.errors import BudgetError
from teraio.options import Settings
from teraio.runtime.device import limits
from teraio.runtime.eager import user_code
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State
from teraio.runtime.optimizer import step_call
from teraio.session import session
from teraio.units import parse_bytes

PARTS = (0.5, 0.3)
ACCUMULATE = 4
NORM = 0.5
STEADY = 4  # number of last steps whose times and moves are reported
PROBES_MAX = 12
PERSISTENT = {"weight", "grad", "state"}
HEAD = (
    f"{'budget':>9} {'of plain':>8} {'equal':>6} {'peak':>9} {'step':>8} {'x plain':>8} {'read':>9} "
    f"{'written':>9} {'drive':>8} {'persistent':>10} {'bucket':>9}"
)


class Widest:
    """The most bytes of persistent tensors resident at the same time, and the bytes of the largest bucket."""

    def __init__(self) -> None:
        self.bytes = self.bucket_bytes = 0
        self.watching = False

    def look(self) -> None:
        if self.watching and engine.ENGINE is not None:
            records = engine.ENGINE.residency.records.values()
            live = [r for r in records if r.kind in PERSISTENT and not r.is_dead()]
            resident = [record for record in live if record.state is not State.EVICTED]
            self.bytes = max(self.bytes, sum(record.size_bytes for record in resident))

    def __enter__(self) -> None:
        opened, brought = step_call.OptimizerCall.open_bucket, user_code.UserCode.make_resident_for_user

        def open_bucket(call: Any, at: int) -> None:
            opened(call, at)
            sizes = {r.key: r.size_bytes for _, r in call.members[at] if r is not None}
            self.bucket_bytes = max(self.bucket_bytes, sum(sizes.values()))
            self.look()

        def bring(user: Any, records: Any, live_bytes: int, place: str) -> None:
            brought(user, records, live_bytes, place)
            self.look()

        self.patches: list[Any] = [
            patch.object(step_call.OptimizerCall, "open_bucket", open_bucket),
            patch.object(user_code.UserCode, "make_resident_for_user", bring),
        ]
        for one in self.patches:
            one.start()

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()


class Training:
    def __init__(self, args: argparse.Namespace, counting: counting_allocator.Counting) -> None:
        self.args, self.counting = args, counting
        self.model: Any = None
        self.optimizer: Any = None
        self.compiled: Any = None

    def run(self, budget: int, steps: int, confined: bool = False) -> dict[str, Any]:
        """Run one training from the start and return its results and costs."""
        self.confined = confined
        torch._dynamo.reset()
        self.model = self.optimizer = self.compiled = None  # frees the memory of the previous run
        gc.collect()
        os.environ.pop("TERAIO_DISABLE", None)
        os.environ.update({"TERAIO_MEMORY": str(budget)} if budget else {"TERAIO_DISABLE": "1"})
        torch.manual_seed(0)
        others = self.counting.alive_bytes()
        self.model = Llama(Shape(layers=self.args.layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.compiled = torch.compile(
            self.model,
            backend="teraio",
            options={"inner": self.args.inner, "warmup": 2, "planning": "inline"},
        )
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[float] = []
        self.widest = Widest()
        rows: list[dict[str, Any]] = []
        with self.widest:
            for _ in range(steps):
                rows.append(self.step(others))
        found: dict[str, Any] = {"budget_bytes": budget, "losses": self.losses, "rows": rows}
        if budget:
            links = {f"{link.source} {link.target}": link for link in session.SESSION.planning.machine.links}  # type: ignore[union-attr]
            out, back = links["device ssd"], links["ssd device"]
            found["rates"] = [out.bandwidth_bytes_per_s, back.bandwidth_bytes_per_s]
            found["persistent_bytes"], found["bucket_bytes"] = self.widest.bytes, self.widest.bucket_bytes
            found["parameter_bytes"] = max(parameter.nbytes for parameter in self.model.parameters())
            found["overrun_bytes"] = teraio.stats()["overrun_bytes"]
            teraio.reset()
        found["digest"] = self.digest()
        return found

    def step(self, others: int) -> dict[str, Any]:
        before, began = teraio.stats(), time.perf_counter()
        self.counting.reset_peak()
        for _ in range(ACCUMULATE):
            size = (self.args.batch, self.args.length + 1)
            tokens = torch.randint(0, self.model.shape.vocabulary, size, generator=self.generator)
            loss = self.compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            self.losses.append(loss.item())
            del loss
        with self.room() if self.confined and self.widest.bucket_bytes else nullcontext():
            self.widest.watching = len(self.losses) > 2 * ACCUMULATE
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
            self.losses.append(norm.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.widest.watching = False
        after = teraio.stats()
        moved = {
            "read_bytes": after.get("read_bytes", 0) - before.get("read_bytes", 0),
            "written_bytes": after.get("written_bytes", 0) - before.get("written_bytes", 0),
            "misses": after.get("misses", 0) - before.get("misses", 0),
        }
        peak = self.counting.peak_bytes() - others
        return {"seconds": time.perf_counter() - began, "peak_bytes": peak, **moved}

    @contextmanager
    def room(self) -> Iterator[None]:
        """Evict tensors until the resident tensors fit into the bytes of two buckets and one parameter. Limit
        the budget to this size.
        """
        running = engine.ENGINE
        assert running is not None
        residency = running.residency
        parameter = max(parameter.nbytes for parameter in self.model.parameters())
        room = 2 * self.widest.bucket_bytes + parameter + residency.fixed_bytes + residency.reserve_bytes
        with patch.object(residency, "budget_bytes", min(room, residency.budget_bytes)):
            residency.advance_slot()
            residency.evict_until_fits(0, None, running.user.must_be_resident)
            yield

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            states = self.optimizer.state[parameter].values()
            for tensor in (parameter, *states):
                digest.update(tensor.detach().clone().numpy().tobytes())
        return digest.hexdigest()

    def smallest(self, start: int) -> int:
        """Return the smallest budget that works. Each `BudgetError` states the memory needed at the place of
        the error; try this budget next.
        """
        budget = start
        for _ in range(PROBES_MAX):
            try:
                self.run(budget, 2)
                return budget
            except BudgetError as error:
                teraio.reset()
                named = re.search(r"Give at least ([\d.]+ \w+)", str(error))
                assert named, error
                budget = parse_bytes(named[1].removesuffix(" bytes"))
        raise AssertionError(f"no budget that works from {start} to {budget}")


def seconds(found: dict[str, Any]) -> float:
    return statistics.median(row["seconds"] for row in found["rows"][-STEADY:])


def row_of(found: dict[str, Any], plain: dict[str, Any], again: dict[str, Any], peak: int) -> dict[str, Any]:
    steady = found["rows"][-STEADY:]
    read, written = (statistics.median(row[key] for row in steady) for key in ("read_bytes", "written_bytes"))
    out, back = found["rates"]
    return {
        "budget_bytes": found["budget_bytes"],
        "of_plain": round(found["budget_bytes"] / peak, 3),
        "equal": (found["losses"], found["digest"]) == (plain["losses"], plain["digest"]),
        "peak_bytes": max(row["peak_bytes"] for row in found["rows"]),
        "seconds": round(seconds(found), 3),
        "against_plain": round(2 * seconds(found) / (seconds(plain) + seconds(again)), 3),
        "read_bytes": int(read),
        "written_bytes": int(written),
        "drive_seconds": round(max(read / back, written / out), 3),
        "misses": statistics.median(row["misses"] for row in steady),
        "persistent_bytes": found["persistent_bytes"],
        "bucket_bytes": found["bucket_bytes"],
        "parameter_bytes": found["parameter_bytes"],
        "overrun_bytes": found["overrun_bytes"],
    }


def show(row: dict[str, Any]) -> str:
    mib = {key: f"{value / 2**20:.1f}" for key, value in row.items() if key.endswith("_bytes")}
    return (
        f"{mib['budget_bytes']:>9} {row['of_plain']:8.2f} {'yes' if row['equal'] else 'NO':>6} "
        f"{mib['peak_bytes']:>9} {row['seconds']:7.2f}s {row['against_plain']:8.3f} {mib['read_bytes']:>9} "
        f"{mib['written_bytes']:>9} {row['drive_seconds']:7.2f}s {mib['persistent_bytes']:>10} "
        f"{mib['bucket_bytes']:>9}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    limits.make_malloc_return_memory()
    training = Training(args, counting_allocator.install_over_ours())
    torch.set_num_threads(1)
    Settings.parse({"inner": args.inner})
    plain = training.run(0, args.steps)
    peak = max(row["peak_bytes"] for row in plain["rows"])
    budgets = [int(part * peak) for part in PARTS]
    budgets.append(training.smallest(min(budgets) // 4))
    print(f"plain: {peak / 2**20:.1f} MiB, {seconds(plain):.2f} s a step\n{HEAD}", file=sys.stderr)
    rows = []
    for budget, confined in [*((budget, False) for budget in budgets), (budgets[0], True)]:
        found = training.run(budget, args.steps, confined)
        again = training.run(0, args.steps)
        rows.append({"confined": confined, **row_of(found, plain, again, peak)})
        print(show(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "benchmark": "whole_step",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        **vars(args),
        "plain_peak_bytes": peak,
        "plain_seconds": round(seconds(plain), 3),
        "rows": rows,
    }
    print(json.dumps(result))
    last = rows[-1]
    narrow = last["persistent_bytes"] <= 2 * last["bucket_bytes"] + last["parameter_bytes"]
    good = all(row["equal"] and row["peak_bytes"] <= row["budget_bytes"] for row in rows)
    return 0 if good and narrow else 1


if __name__ == "__main__":
    sys.exit(main())
