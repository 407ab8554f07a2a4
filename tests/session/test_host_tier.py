"""Tests of training with a host tier, which is host memory for evicted tensors of a device.

RAM stands in for device memory and for host memory, and the tests really copy bytes between the two. If host
memory is full, tensors are evicted to the SSD.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ram_device import Arrived, Ram, RamDevice
from torch import nn

import teraio
from teraio.errors import UnsupportedError
from teraio.formats.plan import Fetch, Plan
from teraio.options import Settings
from teraio.runtime.device import choose, cpu, limits
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import Record
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.store.store import Store
from teraio.session import session, tiers

WIDTH, LAYERS, BATCH = 256, 8, 1024
# In MiB, activations take 16, weights 2, gradients 2, and optimizer states 4. teraio reserves 4 for other
# memory.
MIB = 2**20
STEPS = 7
OPTIONS: dict[str, Any] = {"inner": "eager", "memory": 15 * MIB, "warmup": 1}


@pytest.fixture
def host(one_thread: None, steady_plans: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def of(limit_bytes: int) -> None:
        monkeypatch.setattr(choose, "choose_device", lambda kind=None: RamDevice())
        monkeypatch.setattr(tiers, "host_limit_bytes", lambda options: limit_bytes)

    return of


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def train(**options: Any) -> tuple[list[float], list[torch.Tensor], dict[str, Any]]:
    """Train a model. Return (1) the losses, (2) the final weights, and (3) the engine's counts at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled: Any = torch.compile(model, backend="teraio", options={**OPTIONS, **options})
    losses, to_host = [], [0]
    for step in range(STEPS):
        loss = compiled(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
        to_host.append(teraio.stats().get("to_host_bytes", 0))
    counts = {**teraio.stats(), "to_host_in_steps": [after - before for before, after in pairwise(to_host)]}
    teraio.reset()
    return losses, [parameter.detach().clone() for parameter in model.parameters()], counts


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[torch.Tensor]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as disabled:
        disabled.setenv("TERAIO_DISABLE", "1")
        losses, weights, _ = train()
    torch.set_num_threads(threads)
    return losses, weights


def same(
    run: tuple[list[float], list[torch.Tensor], Any], plain: tuple[list[float], list[torch.Tensor]]
) -> bool:
    return run[0] == plain[0] and all(torch.equal(one, other) for one, other in zip(run[1], plain[1]))


@pytest.mark.parametrize("limit", [64 * MIB, 6 * MIB, MIB // 4])
def test_training_is_bit_equal_for_each_size_of_host_memory(
    limit: int, host: Callable[[int], None], plain: Any
) -> None:
    host(limit)
    run = train()
    assert same(run, plain)
    counts = run[2]
    assert counts["peak_bytes"] <= 15 * MIB
    assert counts["from_host_bytes"] > limit // 2
    # With 64 MiB, host memory has room for all evicted tensors, so a run may write no byte to the SSD.
    # Evictions without a plan also prefer host memory.
    assert counts["written_bytes"] > MIB or limit == 64 * MIB
    assert (counts["to_host_bytes"] > 2 * counts["written_bytes"]) == (limit == 64 * MIB)


@pytest.mark.parametrize("limit", [10 * MIB, 6 * MIB])
def test_plan_with_host_and_ssd_is_followed(
    limit: int, host: Callable[[int], None], plain: Any, tmp_path: Path
) -> None:
    """Before the plan exists, evictions fill host memory. The plan's evictions to host memory must still find
    room."""
    host(limit)
    moved: Counter[str] = Counter()
    files = {name: str(tmp_path / f"run.{name}.json") for name in ("timeline", "profile")}
    installed: list[Plan] = []
    install = engine.Engine.follow_plan

    def seen(self: engine.Engine, plan: Plan) -> None:
        installed.append(plan)
        install(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Engine, "follow_plan", seen)
        patch.setattr(engine.Engine, "settle_plan", lambda self, plan, *order: seen(self, plan))
        run = train(**files)
    assert same(run, plain)
    for move in installed[0].moves:
        moved[move.source if isinstance(move, Fetch) else move.to] += 1
    assert moved["host"] > 4 and moved["ssd"] > 4
    assert run[2]["planned_moves"] > 20 * run[2]["skipped_moves"]
    assert run[2]["to_host_in_steps"][-1] >= 0.9 * limit
    lanes = {span["track"].partition(":")[2] for span in spans(files["timeline"])}
    assert {"host", "ssd"} <= lanes


class Moving:
    """Two tensors of 1 MiB that move between a device, host memory of 1 MiB and a store on disk. RAM stands
    in for the device's memory."""

    def __init__(self, disk: Path) -> None:
        self.store = Store(disk, 8 * MIB)
        self.mover = Residency(self.store, cpu.CpuDevice(), 8 * MIB, 0, Ram(MIB)).mover
        self.tensors = {name: torch.randn(MIB // 4) for name in ("one", "other")}
        self.wanted = {name: tensor.clone() for name, tensor in self.tensors.items()}
        named = self.tensors.items()
        self.one, self.other = (Record(t.untyped_storage(), name, "weight", True) for name, t in named)

    def evict_and_fetch(self, record: Record, tier: str | None) -> str | None:
        """Evict the tensor of a record, fetch it, and check its values. Return the tier to which the tensor
        was evicted. If `tier` is None, the mover chooses the tier."""
        self.mover.begin_evict(record, tier)
        self.mover.end_evict(record)
        home = record.copy_tier
        self.mover.begin_fetch(record)
        self.mover.end_fetch(record)
        assert torch.equal(self.tensors[record.name], self.wanted[record.name])
        return home


@pytest.fixture
def moving(root: Path) -> Iterator[Moving]:
    found = Moving(root)
    yield found
    found.store.close()


def test_plan_reclaims_host_places_of_other_copies(moving: Moving) -> None:
    assert moving.evict_and_fetch(moving.one, "host") == "host"
    assert moving.evict_and_fetch(moving.other, None) == "ssd", (
        "a clean copy is kept if no plan wants its place"
    )
    moving.mover.expect_host_copies({"other"})
    assert moving.evict_and_fetch(moving.other, "host") == "host"
    assert moving.evict_and_fetch(moving.one, None) == "ssd"


def test_host_place_is_no_copy_before_it_is_written(moving: Moving) -> None:
    """A tensor is clean if a copy in a slower tier has its bytes. After a tensor gets a place in host memory,
    the tensor is not clean until a copy has filled this place. A copy on the SSD does not change that."""
    assert moving.evict_and_fetch(moving.one, "ssd") == "ssd" and moving.mover.is_clean(moving.one)
    assert moving.mover.reserve_host_place(moving.one) and not moving.mover.is_clean(moving.one)
    assert moving.evict_and_fetch(moving.one, None) == "host"


def spans(path: str) -> list[dict[str, Any]]:
    found = [
        json.loads(line.rstrip(",")) for line in Path(path).read_text().splitlines() if '"track"' in line
    ]
    return [span for span in found if "track" in span]


def test_unpinnable_host_memory_is_warned_of_and_not_used(
    host: Callable[[int], None], plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host(64 * MIB)
    monkeypatch.setattr(RamDevice, "refusal", "the driver refuses to pin 1 GiB")
    with caplog.at_level(logging.WARNING, "teraio"):
        run = train()
    assert same(run, plain)
    assert run[2]["to_host_bytes"] == 0 < run[2]["written_bytes"]
    (line,) = [r.getMessage() for r in caplog.records if "host memory" in r.getMessage()]
    assert "refuses to pin 1 GiB" in line
    with pytest.raises(UnsupportedError, match="refuses to pin 1 GiB"):
        session.ensure_session(Settings.parse({**OPTIONS, "on_fallback": "error"}, {}))
    assert session.SESSION is None


def test_host_memory_option_on_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="for a GPU; on the CPU, tensors are in host memory"):
        session.ensure_session(Settings.parse({"memory": "1GiB", "host_memory": "1GiB"}, {}))


def test_host_limit_follows_option() -> None:
    for options, part in ({"host_memory": "3GiB"}, None), ({}, 0.5), ({"host_memory": "25%"}, 0.25):
        most = tiers.host_limit_bytes(Settings.parse(options, {}))
        obtainable = limits.read_memory_limits().obtainable_bytes
        assert most == 3 * 2**30 if part is None else abs(most / obtainable - part) < 0.05
    assert tiers.host_limit_bytes(Settings.parse({"host_memory": "min"}, {})) == 0


def test_planted_bug_in_copy_out_changes_numbers(
    host: Callable[[int], None], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the planted bug, a copy to host memory ends without copying bytes. The training must then give
    other numbers."""
    host(6 * MIB)
    monkeypatch.setattr(Ram, "copy_out_starter", lambda ram, place: lambda storage, mark: Arrived())
    assert not same(train(), plain)
