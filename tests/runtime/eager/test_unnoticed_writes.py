"""Bytes that change where no program tells are not taken for those of before: by hooks, views that a program
gave, others' optimizers, operators and libraries."""

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
WHOLE = {"clips if they are large", "hooks on a whole step"}  # in a budget that has room for that


@cache
def results() -> dict[str, Any]:
    done = forked(CHILD, json.dumps(SCENARIOS))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stderr[-3000:])
    return {result["scenario"]: result for result in found}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_losses_weights_states_and_gradients_are_those_of_the_plain_run(scenario: str) -> None:
    assert scenario in results(), "the process ended in it"
    result = results()[scenario]
    assert result["same"]
    if scenario not in WHOLE:
        assert result["counts"]["fetches"] > 40, "little moved: the test shows little"


def test_an_optimizer_is_tried_again_when_a_rule_of_its_own_is_switched_on() -> None:
    """Which may be an attribute, and no option of a group. Another number is no reason: rates change in each
    step."""
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
def test_of_torchs_own_it_is_known_that_gradients_are_only_read(kind: Any) -> None:
    """So that what left in the backward need not be written again."""
    assert not trial.try_in_buckets(kind([torch.nn.Parameter(torch.zeros(4, 4))])).writes_gradients


class Begins(PerParameter):
    """Makes its states in its first step, by a count of its own; without them, later ones fail."""

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


def test_what_an_optimizer_counts_is_no_reason_to_try_it_again() -> None:
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
    """Leaves no gradient."""

    def update(self, p: torch.nn.Parameter, state: dict[str, Any]) -> None:
        p.grad = None


def test_rows_are_not_stepped_by_an_optimizer_that_takes_the_gradient_away() -> None:
    """It would take that of the rows, and the parameter would keep its own."""
    optimizer = Takes([torch.nn.Parameter(torch.zeros(8, 4))])
    assert trial.try_in_buckets(optimizer).reason is None
    assert not trial.can_step_by_rows(optimizer)
