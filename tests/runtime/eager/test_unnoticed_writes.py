"""Writes to weights, gradients or results by code outside of compiled programs.

The writers are (1) hooks, (2) code that writes through a view of a result, (3) third-party optimizers, and
(4) third-party operators.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import tree
from children import forked
from untold_train import SCENARIOS, Clips, PerParameter

from teraio.runtime.optimizer import trial
from teraio.runtime.optimizer.strategy import Strategy

CHILD = tree.SUPPORT / "untold_train.py"
# In these scenarios the budget has room for a whole optimizer step.
WHOLE = {"clips if they are large", "hooks on a whole step"}


@cache
def results() -> dict[str, Any]:
    done = forked(CHILD, json.dumps(SCENARIOS))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stderr[-3000:])
    return {result["scenario"]: result for result in found}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_unnoticed_write_leaves_the_numbers_of_the_plain_run(scenario: str) -> None:
    assert scenario in results(), "the process ended in this scenario"
    result = results()[scenario]
    assert result["same"]
    if scenario not in WHOLE:
        assert result["counts"]["fetches"] > 40, "little moved: the test shows little"


def test_trial_runs_again_after_a_rule_of_the_optimizer_is_switched_on() -> None:
    """Check when the engine tries again in which way the optimizer may step.

    The trial runs again after a change of an attribute of the optimizer, such as `most`. A changed learning
    rate causes no trial, because rates may change in each step.
    """
    optimizer = Clips([torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(3)])
    optimizer.most = 0.0
    about = Strategy(0)
    about.run_trial_if_changed(optimizer)
    assert about.seen.reason is None
    for group in optimizer.param_groups:
        group["lr"] /= 2
    before = about.seen
    about.run_trial_if_changed(optimizer)
    assert about.seen is before
    optimizer.most = 0.5
    about.run_trial_if_changed(optimizer)
    assert about.seen.reason is not None and "depends on the others" in about.seen.reason


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RAdam])
def test_torch_optimizer_only_reads_gradients(kind: Any) -> None:
    """Check that gradients that were evicted in the backward are still clean after the optimizer's step. The
    engine need not write them again."""
    assert not trial.try_in_buckets(kind([torch.nn.Parameter(torch.zeros(4, 4))])).writes_gradients


class Begins(PerParameter):
    """An optimizer that makes its states in its first step and uses them in later steps. It also counts its
    steps.
    """

    calls = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.calls = 0
        self.param_groups[0]["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["k"] == self.calls == 0:
                    self.state[p]["seen"] = torch.zeros_like(p)
                p.sub_(self.state[p]["seen"].add_(p.grad))
            group["k"] += 1
        self.calls += 1


def test_trial_does_not_run_again_when_only_a_counter_changes() -> None:
    optimizer = Begins([torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(3)])
    about = Strategy(0)
    about.run_trial_if_changed(optimizer)
    before = about.seen
    assert before.reason is None
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(4, 4)
    optimizer.step()
    about.run_trial_if_changed(optimizer)
    assert about.seen is before


class Takes(PerParameter):
    """An optimizer that sets each gradient to None in its update."""

    def update(self, p: torch.nn.Parameter, state: dict[str, Any]) -> None:
        p.grad = None


def test_rows_are_refused_for_an_optimizer_that_removes_gradients() -> None:
    """Refuse to step by slices of rows: the optimizer would remove the gradient of a slice, but the parameter
    would keep its whole gradient."""
    optimizer = Takes([torch.nn.Parameter(torch.zeros(8, 4))])
    assert trial.try_in_buckets(optimizer).reason is None
    assert not trial.can_step_by_rows(optimizer)
