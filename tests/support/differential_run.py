"""Generated models train under random valid plans and must agree with plain training in every bit.

    differential_run.py '{"seeds": [0, 1, 2], "plans": 10, "hostile": 0, "inner": "eager", "plants": [""],
                          "steps": 3}'

prints one JSON object per model: what it is, where plain training differs from itself, and per plan what it
asked for, what the engine did, and where the bits differ. A process of its own, because every byte is counted
from the start and a planted bug may end it.
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

# What the ledger cannot see: storages below 4 KiB, and what library operators take for themselves. In these
# models convolutions take the most, 97 KiB.
UNSEEN_BYTES = 160 * 1024

OPTIONS = {"memory": "1GiB", "planner": "none", "store_size": "64MiB"}
SHARES = (0.3, 0.6, 1.0)  # of the bytes of all gaps: each plan moves at least one of these

# Where the budget lies between the largest working set (0) and everything that is ever alive (1).
LEVELS = (0.0, 1.0, 0.1, 0.5, 0.0, 0.25, 0.03, 0.75, 0.0, 0.4)


@dataclass
class Waits:
    """Fetches that a plan had begun and whose bytes were not there yet when a kernel came."""

    early: int = 0


WAITS = Waits()


@contextlib.contextmanager
def watched_device() -> Iterator[None]:
    """Counts early waits, and fills fetched memory with NaN before its read begins: bytes that are used too
    early show."""
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
    """A real file, one whose operations come late, or memory whose bytes arrive when someone waits."""

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
    """One plan: what it asked for and what happened."""

    plan: int
    level: float
    share: float
    moved: float = 0.0
    budget_bytes: int = 0
    kind: str = "none"  # or `random`, or what is hostile in it
    over_bytes: int = 0  # peak less budget, at most
    planned: int = 0
    skipped: int = 0
    misses: int = 0
    steady_skipped: int = 0  # in the last step's programs: the plan is at work since two steps
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
    unstable: list[str] = field(default_factory=list)  # where plain differs from itself
    untraced: str = ""  # why Dynamo does not trace it, whoever the backend is
    gaps: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class Rig:
    """One model, compiled plainly and with slots, and an engine."""

    def __init__(self, seed: int, asked: Asked, counting: counting_allocator.Counting) -> None:
        self.model = make(seed, asked.most_blocks)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.counting = counting
        self.others_bytes = self.peak_bytes = 0
        self.begun: dict[str, int] = {}
        self.steady: dict[str, int] = {}  # what the engine did in the programs of the last step
        self.options = {**OPTIONS, "inner": asked.inner}
        self.ours = compiled(self.model, self.options)
        # Compiled with the same options, Dynamo would give both the program that comes first.
        self.plain = compiled(self.model, {"inner": asked.inner})

    def run(self, call: Call, steps: int) -> Seen:
        self.model.load_state_dict(self.start)
        self.peak_bytes = 0
        return train(self.model, call, steps, self.watch)

    def run_plain(self, steps: int) -> Seen:
        with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
            return self.run(self.plain, steps)

    def watch(self, when: str, optimizer: torch.optim.Optimizer) -> None:
        """What the test itself holds is not the model's."""
        stats = {name: count for name, count in teraio.stats().items() if isinstance(count, int)}
        self.steady = {key: stats.get(key, 0) - self.begun.get(key, 0) for key in stats}
        if when == "begin":
            self.begun = stats
            self.others_bytes = self.counting.alive_bytes() - own_bytes(self.model, optimizer)
            self.counting.reset_peak()
        else:
            self.peak_bytes = max(self.peak_bytes, self.counting.peak_bytes() - self.others_bytes)

    def measure(self, steps: int) -> tuple[Seen, Profile]:
        """Everything fits: the order of the step, its tensors, and what each kernel takes."""
        measured: list[Step] = []
        session.ensure_session(Settings.parse(self.options))
        running().on_step = measured.append
        seen = self.run(self.ours, steps)
        running().end_step()  # or the next step would tell of the last, which has the largest batch
        running().on_step = None
        return seen, profile_of_steps(measured[-1:], "generated")

    def follow(self, plan: Plan, budget_bytes: int, steps: int, row: Row) -> Seen:
        residency = running().residency
        running().follow_plan(plan)
        before, WAITS.early = teraio.stats(), 0
        seen: Seen = {}
        try:
            with patch.object(residency, "budget_bytes", budget_bytes):
                seen = self.run(self.ours, steps)
                row.over_bytes = self.peak_bytes + residency.reserve_bytes - budget_bytes
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
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
    """Compiled whole, with sizes that stay; user code computes nothing of size beside it, not even the sum of
    two gradients, and touches no weight and no gradient but through its optimizer."""
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
    """Return what the model and its optimizer have in memory now."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    known = engine.ENGINE.residency.records if engine.ENGINE is not None else {}
    away = {key for key, record in known.items() if record.state is State.AWAY}
    return sum(size for key, size in storages.items() if key not in away)


def differences(expected: Seen, got: Seen, without: Sequence[str] = ()) -> list[str]:
    """Names of what is not the same in every bit."""
    names = [name for name in expected if name not in without]
    missing = [f"{name} (only in one of them)" for name in expected.keys() ^ got.keys()]
    return missing + [name for name in names if name in got and not same(expected[name], got[name])]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def examine(seed: int, plant: str, asked: Asked, counting: counting_allocator.Counting) -> Result:
    began = time.perf_counter()
    with drive(seed) as name, watched_device():
        result = Result(seed, plant, "", name)
        try:
            _examine(Rig(seed, asked, counting), asked, result)
        except Exception:  # noqa: BLE001  the next model is another one
            result.error = traceback.format_exc()[-3000:]
        with contextlib.suppress(TeraioError):
            teraio.reset()
    torch._dynamo.reset()
    gc.collect()
    result.seconds = round(time.perf_counter() - began, 2)
    return result


def untraced(rig: Rig) -> str:
    """Dynamo itself fails with some models, such as those that recompute parts of changing sizes."""
    torch._dynamo.reset()
    try:
        rig.run(torch.compile(rig.model, backend="eager", dynamic=rig.model.style == "dynamic"), 1)
    except Exception as error:  # noqa: BLE001  Dynamo's own
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _examine(rig: Rig, asked: Asked, result: Result) -> None:
    result.what = rig.model.what
    try:
        expected = rig.run_plain(asked.steps)
    except Exception:
        result.untraced = untraced(rig)
        if not result.untraced:
            raise
        return
    result.unstable = differences(expected, rig.run_plain(asked.steps))
    strange = [n for n, v in expected.items() if v.is_floating_point() and not v.isfinite().all()]
    assert not strange, f"not finite, so it shows nothing: {strange[:5]}"
    with planted(result.plant):
        seen, profile = rig.measure(asked.steps)
        different = differences(expected, seen, result.unstable)
        if different:
            result.error = f"differs where nothing moves: {different[:5]}"
        result.gaps = len(gaps(profile))
        lowest, highest = max(working_set_bytes(profile)), max(resident_bytes(profile))
        for number in range(-1, asked.plans + asked.hostile):
            level, share = LEVELS[number % len(LEVELS)], SHARES[number % len(SHARES)]
            drawn = result.seed * 1000 + number
            if number == -1:
                level, share, plan = 0.0, 0.0, Plan("", "none", lowest)  # all on demand
            budget = lowest + int(level * (highest - lowest))
            if 0 <= number < asked.plans:
                plan = random_plan(profile, budget, share, drawn)
            elif number >= 0:
                share, plan = 0.0, hostile_plan(profile, budget, drawn)
            moved = round(moved_share(profile, plan), 3) if share else 0.0
            row = Row(number, level, share, moved, budget, plan.planner)
            got = rig.follow(plan, budget, asked.steps, row)
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
    asked = Asked(**json.loads(sys.argv[1]))
    gc.freeze()  # torch's own modules need not be looked through again and again: a tenth of the time
    gc.set_threshold(50_000, 20, 100)
    for seed in asked.seeds:
        for plant in asked.plants:
            print(json.dumps(asdict(examine(seed, plant, asked, counting))), flush=True)


if __name__ == "__main__":
    main()
