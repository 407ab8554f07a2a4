"""Tests of `teraio.stats()`. The figures of single steps must add up to the figures of the whole run."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import teraio
from teraio.runtime.step.stats import Phase, Stats, StepMeter

WIDTH, LAYERS = 256, 6


pytestmark = pytest.mark.usefixtures("nothing_left")


def train(steps: int, **options: Any) -> list[Stats]:
    """Train for `steps` steps. Return one result of `teraio.stats()` after each step of the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = {"inner": "eager", "memory": "10MiB", "warmup": 2, "planner": "greedy", **options}
    compiled = torch.compile(model, backend="teraio", options=wanted)
    found = []
    for _ in range(steps):
        compiled(torch.randn(16, WIDTH)).sum().backward()
        optimizer.step()
        found.append(teraio.stats())
        optimizer.zero_grad()
    return found


def test_stats_after_each_optimizer_step_add_up() -> None:
    assert teraio.stats() == {}
    rows = train(6)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # Step 1 makes the optimizer states. Steps 2 and 3 are measured. The plan is made before step 4.
    assert [row["phase"] for row in rows] == ["measuring"] * 3 + ["planned"] * 3
    # Steps 4 and 5 are the trial of the plan. Then the choice of late updates begins.
    assert [row["steady"] for row in rows[:5]] == [False] * 5
    assert sum(row["step_misses"] for row in rows) == rows[-1]["misses"] > 0
    assert sum(row["step_stall_ns"] for row in rows) <= rows[-1]["stall_ns"]
    assert sum(row["step_read_bytes"] for row in rows) <= rows[-1]["read_bytes"]
    assert all(0 <= row["step_stall_ns"] <= row["step_ns"] for row in rows)
    assert max(row["step_peak_bytes"] for row in rows) == rows[-1]["peak_bytes"] <= rows[-1]["budget_bytes"]


def test_a_planned_step_has_its_prediction_and_the_bound() -> None:
    first, *_, last = train(5)
    assert "predicted_step_ns" not in first and "above_bound" not in first
    assert last["predicted_step_ns"] >= last["bound_ns"] > 0
    assert last["above_bound"] == pytest.approx(last["step_ns"] / last["bound_ns"] - 1)


def test_phase_without_a_planner_is_on_demand() -> None:
    assert [row["phase"] for row in train(5, planner="none")][-1] == "on demand"


def test_stats_have_their_declared_types_and_survive_json() -> None:
    row = train(5)[-1]
    hints = get_type_hints(Stats)
    assert set(row) <= set(hints)
    for name, value in row.items():
        assert value in get_args(Phase) if name == "phase" else type(value) is hints[name], name
    assert json.loads(json.dumps(row)) == row


def test_step_that_is_counted_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the planted bug, the figures of each step include all earlier steps, so the sums are wrong."""
    begins = StepMeter.begin_step

    def forgets(self: StepMeter) -> None:
        begins(self)
        self.at_begin = (0, 0, 0, 0)

    monkeypatch.setattr(StepMeter, "begin_step", forgets)
    with pytest.raises(AssertionError):
        test_stats_after_each_optimizer_step_add_up()


def test_debug_log_has_a_line_per_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "teraio"):
        train(3)
    lines = [line for line in caplog.messages if line.startswith("teraio: step ")]
    pattern = r"teraio: step %d: .+s, of it .+s of waiting; misses: \d+; written .+B, read .+B"
    assert len(lines) == 3 and all(
        re.fullmatch(pattern % number, line) for number, line in enumerate(lines, 1)
    )
