"""Trainings of generated models under random valid plans. All results must equal the results of a plain
training, bit for bit.

    differential_run.py '{"seeds": [0, 1, 2], "plans": 10, "hostile": 0, "inner": "eager", "plants": [""],
                          "steps": 3}'

The script prints one JSON object per model. The object holds (1) the model's description, and (2) the names
of the results that differ between two plain trainings. Per plan, it also holds (3) the request, (4) the
engine's counts, and (5) the names of the results whose bits differ from plain training.

The script runs in its own process for two reasons: it counts every byte from the start, and a planted bug may
end the process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import counting_allocator
import torch
from differential_plants import planted
from generated_models import Generated, Seen, make, train
from generated_plans import (
    gaps,
    hostile_plan,
    moved_share,
    random_plan,
    resident_bytes,
    working_set_bytes,
)

import teraio
from teraio import _native
from teraio.errors import TeraioError
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.options import Settings
from teraio.passes.slots.lifetimes import profile_of_steps
from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.device.pending_transfer import Pending
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State
from teraio.runtime.store.store import Store
from teraio.session import session

Call = Callable[..., Any]

# The peak may exceed the budget by this number of bytes. The engine does not count (1) storages below 4 KiB,
# and (2) memory that library operators use internally. In these models, convolutions use the most internal
# memory: 97 KiB.
UNSEEN_BYTES = 160 * 1024

OPTIONS = {"memory": "1GiB", "planner": "none", "store_size": "64MiB"}
# A gap is an idle interval of a tensor between two uses. A plan moves at least one of these shares of the
# bytes in gaps.
SHARES = (0.3, 0.6, 1.0)

# Positions of a plan's budget. At 0 the budget is the largest working set, and at 1 it is the memory of all
# living tensors.
LEVELS = (0.0, 1.0, 0.1, 0.5, 0.0, 0.25, 0.03, 0.75, 0.0, 0.4)


@dataclass
class Waits:
    """A counter. `early` is the number of fetches that a plan began, but that were unfinished when their
    tensor was needed.
    """

    early: int = 0


WAITS = Waits()


@contextlib.contextmanager
def watched_device() -> Iterator[None]:
    """Count waits for unfinished fetches. Fill the memory of each fetch with NaN before the read begins, so
    that a kernel that uses this memory too early gives NaN.
    """
    end_copy_in, resize = CpuDevice.end_copy_in, CpuDevice.resize_storage

    def counted(self: CpuDevice, pending: Pending) -> bool:
        ticket: Any = pending.ticket
        WAITS.early += not ticket._demand and not ticket.done()
        return end_copy_in(self, pending)

    def poisoned(self: CpuDevice, storage: Any, size_bytes: int) -> None:
        resize(self, storage, size_bytes)
        if size_bytes:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)

    with patch.object(CpuDevice, "end_copy_in", counted), patch.object(CpuDevice, "resize_storage", poisoned):
        yield


@contextlib.contextmanager
def drive(seed: int) -> Iterator[str]:
    """Choose by `seed` the drive of all stores that are opened in this block, and yield its name. The drive
    is (1) a file, (2) a file with late operations, or (3) memory that receives bytes only when a caller
    waits.
    """

    def late(inner: _native.Io) -> _native.Io:
        shim = _native.FaultIo(inner)
        shim.add("delay", "any", 1, True, delay_s=0.0005)
        return shim

    def last_moment(inner: _native.Io) -> _native.Io:
        return _native.MemoryIo(size_bytes=2**27, jitter=0.9, seed=seed)

    kinds: dict[str, Callable[[_native.Io], _native.Io]] = {
        "file": lambda inner: inner,
        "late": late,
        "last moment": last_moment,
    }
    name = list(kinds)[seed % 3]
    with patch.object(
        Store, "open", lambda *places, **settings: Store(*places, wrap=kinds[name], **settings)
    ):
        yield name


@dataclass
class Row:
    """The request for one plan, and the outcome of the training under this plan."""

    plan: int
    level: float
    share: float
    moved: float = 0.0
    budget_bytes: int = 0
    kind: str = "none"  # "none", "random", or the kind of the hostile plan
    over_bytes: int = 0  # the largest excess of the peak over the budget
    planned: int = 0
    skipped: int = 0
    misses: int = 0
    steady_skipped: int = 0  # moves skipped in the last step, after two steps with the plan
    steady_misses: int = 0
    early: int = 0
    fetches: int = 0
    evictions: int = 0
    drops: int = 0
    differences: list[str] = field(default_factory=list)
    error: str = ""


@dataclass
class Result:
    seed: int
    plant: str
    what: str
    drive: str
    # Names of results that differ between two plain trainings.
    unstable: list[str] = field(default_factory=list)
    untraced: str = ""  # why Dynamo cannot trace the model under any backend
    gaps: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class Rig:
    """A model that is compiled two times: plainly, and with slots that call the engine."""

    def __init__(self, seed: int, request: Asked, counting: counting_allocator.Counting) -> None:
        self.model = make(seed, request.most_blocks)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.counting = counting
        self.others_bytes = self.peak_bytes = 0
        self.begun: dict[str, int] = {}
        # The engine's counts between the beginning of the last step and the end of its backward.
        self.steady: dict[str, int] = {}
        self.options = {**OPTIONS, "inner": request.inner}
        self.ours = compiled(self.model, self.options)
        # The options of the two compilations must differ. With equal options, Dynamo would use the first
        # compiled program for both.
        self.plain = compiled(self.model, {"inner": request.inner})

    def run(self, call: Call, steps: int) -> Seen:
        self.model.load_state_dict(self.start)
        self.peak_bytes = 0
        return train(self.model, call, steps, self.watch)

    def run_plain(self, steps: int) -> Seen:
        with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
            return self.run(self.plain, steps)

    def watch(self, when: str, optimizer: torch.optim.Optimizer) -> None:
        """Update the engine's counts and the peak. The peak excludes memory that the test itself holds."""
        stats = {name: count for name, count in teraio.stats().items() if isinstance(count, int)}
        self.steady = {key: stats.get(key, 0) - self.begun.get(key, 0) for key in stats}
        if when == "begin":
            self.begun = stats
            self.others_bytes = self.counting.alive_bytes() - own_bytes(self.model, optimizer)
            self.counting.reset_peak()
        else:
            self.peak_bytes = max(self.peak_bytes, self.counting.peak_bytes() - self.others_bytes)

    def measure(self, steps: int) -> tuple[Seen, Profile]:
        """Train with every tensor resident. Return the results, and a profile of the last step: its kernels
        in order, and its tensors.
        """
        measured: list[Step | None] = []
        session.ensure_session(Settings.parse(self.options))
        running().on_step = measured.append
        seen = self.run(self.ours, steps)
        running().end_step()  # measure the last step, because it has the largest batch
        running().on_step = None
        return seen, profile_of_steps([step for step in measured if step is not None][-1:], "generated")

    def follow(self, plan: Plan, budget_bytes: int, steps: int, row: Row) -> Seen:
        residency = running().residency
        running().follow_plan(plan)
        before, WAITS.early = teraio.stats(), 0
        seen: Seen = {}
        try:
            with patch.object(residency, "budget_bytes", budget_bytes):
                seen = self.run(self.ours, steps)
                row.over_bytes = self.peak_bytes + residency.reserve_bytes - budget_bytes
        except Exception as error:  # noqa: BLE001  every error is a finding
            row.error = f"{type(error).__name__}: {error}"
            self.model.zero_grad()
        after = teraio.stats()
        row.planned, row.skipped, row.misses, row.fetches, row.evictions, row.drops = (
            after[key] - before[key]
            for key in ("planned_moves", "skipped_moves", "misses", "fetches", "evictions", "drops")
        )
        row.steady_skipped, row.steady_misses = (self.steady[key] for key in ("skipped_moves", "misses"))
        row.early = WAITS.early
        return seen


def nothing_beside(what: str) -> bool:
    """Return True if the model is compiled whole with static sizes, and user code allocates nothing large.

    Such user code does not even add two gradients. Only the optimizer touches weights and gradients outside
    of the compiled programs.
    """
    style, manner, _, extra = what.split(" | ")[1].split(", ")[:4]
    return style == "whole" and manner == "once" and not extra.startswith("weight")


def running() -> engine.Engine:
    assert engine.ENGINE is not None
    return engine.ENGINE


def compiled(model: Generated, options: dict[str, Any]) -> Call:
    if model.style != "blocks":
        dynamic = model.style == "dynamic"
        whole: Call = torch.compile(model, backend="teraio", options=options, dynamic=dynamic)
        return whole
    blocks = [torch.compile(block, backend="teraio", options=options) for block in model.blocks]

    def call(*arguments: torch.Tensor) -> Any:
        model.run = blocks
        return model(*arguments)

    return call


def own_bytes(model: Generated, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of resident bytes of the model, its gradients and its optimizer states."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    known = engine.ENGINE.residency.records if engine.ENGINE is not None else {}
    evicted = {key for key, record in known.items() if record.state is State.EVICTED}
    return sum(size for key, size in storages.items() if key not in evicted)


def differences(expected: Seen, got: Seen, without: Sequence[str] = ()) -> list[str]:
    """Return the names of results that differ in any bit, and of results that only one run has."""
    names = [name for name in expected if name not in without]
    missing = [f"{name} (only in one run)" for name in expected.keys() ^ got.keys()]
    return missing + [name for name in names if name in got and not same(expected[name], got[name])]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def examine(seed: int, plant: str, request: Asked, counting: counting_allocator.Counting) -> Result:
    began = time.perf_counter()
    with drive(seed) as name, watched_device():
        result = Result(seed, plant, "", name)
        try:
            _examine(Rig(seed, request, counting), request, result)
        except Exception:  # noqa: BLE001  continue with the next model
            result.error = traceback.format_exc()[-3000:]
        with contextlib.suppress(TeraioError):
            teraio.reset()
    torch._dynamo.reset()
    gc.collect()
    result.seconds = round(time.perf_counter() - began, 2)
    return result


def untraced(rig: Rig) -> str:
    """Run the model under torch's backend `eager`, without teraio. Return the error, or an empty string if
    the model runs.

    Dynamo itself fails with some models, for example with models that recompute parts of changing sizes.
    """
    torch._dynamo.reset()
    try:
        rig.run(torch.compile(rig.model, backend="eager", dynamic=rig.model.style == "dynamic"), 1)
    except Exception as error:  # noqa: BLE001  an error of Dynamo's own
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _examine(rig: Rig, request: Asked, result: Result) -> None:
    result.what = rig.model.what
    try:
        expected = rig.run_plain(request.steps)
    except Exception:
        result.untraced = untraced(rig)
        if not result.untraced:
            raise
        return
    result.unstable = differences(expected, rig.run_plain(request.steps))
    strange = [n for n, v in expected.items() if v.is_floating_point() and not v.isfinite().all()]
    assert not strange, f"the plain results are not finite: {strange[:5]}"
    with planted(result.plant):
        seen, profile = rig.measure(request.steps)
        different = differences(expected, seen, result.unstable)
        if different:
            result.error = f"differs although nothing moves: {different[:5]}"
        result.gaps = len(gaps(profile))
        lowest, highest = max(working_set_bytes(profile)), max(resident_bytes(profile))
        for number in range(-1, request.plans + request.hostile):
            level, share = LEVELS[number % len(LEVELS)], SHARES[number % len(SHARES)]
            drawn = result.seed * 1000 + number
            if number == -1:
                # An empty plan, so that the engine fetches only on demand.
                level, share, plan = 0.0, 0.0, Plan("", "none", lowest)
            budget = lowest + int(level * (highest - lowest))
            if 0 <= number < request.plans:
                plan = random_plan(profile, budget, share, drawn)
            elif number >= 0:
                share, plan = 0.0, hostile_plan(profile, budget, drawn)
            moved = round(moved_share(profile, plan), 3) if share else 0.0
            row = Row(number, level, share, moved, budget, plan.planner)
            got = rig.follow(plan, budget, request.steps, row)
            if not row.error:
                row.differences = differences(expected, got, result.unstable)[:5]
            result.rows.append(row)


@dataclass(frozen=True)
class Asked:
    seeds: list[int]
    plans: int = 10
    hostile: int = 0
    inner: str = "eager"
    most_blocks: int = 4
    plants: tuple[str, ...] = ("",)
    steps: int = 3


def main() -> None:
    counting = counting_allocator.install()
    torch.set_num_threads(1)
    request = Asked(**json.loads(sys.argv[1]))
    gc.freeze()  # excludes torch's own modules from each collection, which saves a tenth of the time
    gc.set_threshold(50_000, 20, 100)
    for seed in request.seeds:
        for plant in request.plants:
            print(json.dumps(asdict(examine(seed, plant, request, counting))), flush=True)


if __name__ == "__main__":
    main()
