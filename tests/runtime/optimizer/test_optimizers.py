"""Gradients and optimizer states within the budget, for many optimizers and training loops."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import tree
from children import forked, one_by_one
from optimizer_loops import LOOPS, OPTIMIZERS, WHOLE

from teraio.runtime.optimizer.buckets import BucketedGroups, split_into_buckets

CHILD = tree.SUPPORT / "optimizer_train.py"
MIB = 2**20
BUDGET, RESERVE = 6 * MIB, 4 * MIB
# Slow scenarios, which only tests/long/optimizers.py runs.
SLOWER = {
    "Adagrad",
    "NAdam",
    "RMSprop",
    "Adafactor",
    "Adam amsgrad",
    "inherited step",
    "swaps the optimizer",
    "anomaly",
    "autograd.grad",
    "backward twice",
    "clips values",
    "reads spent",
    "scheduler",
    "zeroes before",
}
SCENARIOS = sorted({*LOOPS, *OPTIMIZERS} - SLOWER)
# Upper limit for the loop's own tensors. The largest of these tensors is as large as a weight, 144 KiB.
USERS_OWN_BYTES = 256 * 1024
BY_HAND = {"fused by hand"}  # scenarios in which user code updates the weights without an optimizer
REASONS = {
    "global norm": "depends on the others",
    "LBFGS": "keeps more than its groups",
    "compiled step": "its step is compiled",
    "one counter": "two of them share a state",
}
# Scenarios in which user code holds gradients. These gradients are resident even if they exceed the budget.
KEPT = {"hooks"}


def run(scenarios: Sequence[Any]) -> subprocess.CompletedProcess[str]:
    return forked(CHILD, json.dumps(scenarios))


def said(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@cache
def child() -> subprocess.CompletedProcess[str]:
    return run(SCENARIOS)


def results() -> dict[str, Any]:
    return {result["scenario"]: result for result in said(child())}


def result_of(scenario: str) -> dict[str, Any]:
    assert scenario in results(), f"exit {child().returncode}: {child().stderr[-3000:]}"
    result: dict[str, Any] = results()[scenario]
    return result


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_optimizer_gives_the_losses_weights_states_and_groups_of_the_plain_run(scenario: str) -> None:
    assert result_of(scenario)["same"]


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s not in WHOLE | BY_HAND])
def test_step_runs_bucket_by_bucket_within_the_budget(scenario: str) -> None:
    """Check that the engine evicts optimizer states between steps. They take most of the memory.

    The model is made before the engine exists. After the engine is made, tensors must fit in the budget less
    the reserve.
    """
    result = result_of(scenario)
    assert result["buckets"] >= 11
    assert result["away"].get("state", 0) >= 24
    assert result["away"].get("weight", 0) >= 4
    if scenario not in KEPT:
        assert result["counts"]["overrun_bytes"] == 0
        assert max(result["peaks"][1:]) <= BUDGET - RESERVE + USERS_OWN_BYTES
    assert max(result["peaks"]) <= BUDGET - RESERVE + 2 * MIB


@pytest.mark.parametrize("scenario", ["AdamW", "AdamW foreach", "SGD momentum"])
def test_planned_optimizer_step_has_no_miss(scenario: str) -> None:
    """Check that fetches in the optimizer's step find room.

    Gradients remain resident after the optimizer has used them, but no plan counts them. A fetch therefore
    evicts gradients if it needs room.
    """
    counts = result_of(scenario)["counts"]
    assert counts["step_misses"] == 0 < counts["step_read_bytes"]


@pytest.mark.parametrize("scenario", sorted(WHOLE))
def test_optimizer_that_cannot_be_split_steps_whole_with_a_warning(scenario: str) -> None:
    result_of(scenario)
    optimizer = {"global norm": "GlobalNorm", "compiled step": "AdamW", "one counter": "AdamW"}.get(
        scenario, scenario
    )
    warnings = [line for line in child().stderr.splitlines() if f"{optimizer} steps all" in line]
    assert len(warnings) >= 1
    reason = REASONS[scenario]
    assert any(reason in line for line in warnings)


def test_gradients_are_evicted_between_micro_batches_and_during_clipping() -> None:
    """Train with four micro-batches per step. Each micro-batch adds to gradients, which are evicted between
    micro-batches."""
    assert result_of("accumulates")["counts"]["touches"] > 100
    assert result_of("clips")["counts"]["touches"] > 0, "clipping fetched no gradient"
    assert result_of("zeroes in place")["away"]["grad"] > 0, "no gradient was evicted"
    assert result_of("AdamW")["counts"]["touches"] == 0, "user code fetched a tensor"


def lines(script: str, cases: Sequence[str]) -> list[Any]:
    """Return the script's result for each case. If a case ends the process, its result is the error."""

    def run(left: Sequence[str]) -> list[Any]:
        done = forked(CHILD.with_name(script), *left)
        errors = [done.stderr[-3000:]] if done.returncode else []
        return [*said(done), *errors]

    found = one_by_one(cases, run)
    assert len(found) == len(cases), f"the script failed after the last case: {found[-1]}"
    return found


SAVES = ("something", "nothing")


@cache
def shared_weights() -> dict[str, Any]:
    return dict(zip(SAVES, lines("shared_weight_train.py", SAVES)))


@pytest.mark.parametrize("saves", SAVES)
def test_weight_of_two_programs_gets_both_gradients_of_every_batch(saves: str) -> None:
    result = shared_weights()[saves]
    assert isinstance(result, dict), f"its process ended: {result}"
    assert result["same"]
    assert result["added"] == 0, "a gradient was evicted just before autograd added to it"
    assert result["counts"]["evictions"] > 50, "little moved: the test shows little"


def test_forward_is_open_until_its_own_backward_has_run() -> None:
    done = forked(CHILD.with_name("open_forward_train.py"))
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout} {done.stderr[-3000:]}"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 3
    assert all(result["same"] and result["added"] == 0 for result in found), found


def test_group_without_parameters_is_stepped_too() -> None:
    """Step two groups: one with parameters, and one with only an option, the counter `t`.

    The step must add 1 to each counter, although the first group is stepped in two buckets.
    """
    parameters = [torch.zeros(4), torch.zeros(4)]
    groups: list[dict[str, Any]] = [{"params": parameters, "t": 0}, {"params": [], "t": 5}]
    buckets = split_into_buckets(groups, limit_bytes=16)
    assert [len(bucket.parameters) for bucket in buckets] == [1, 1, 0]
    for group in BucketedGroups(groups, lambda: iter(buckets)):
        group["t"] += 1
    assert [group["t"] for group in groups] == [1, 6]


ENDS = ("pressed", "lost")


@cache
def ends() -> dict[str, Any]:
    return dict(zip(ENDS, lines("torn_train.py", ENDS)))


def torn(how: str) -> dict[str, Any]:
    result = ends()[how]
    assert isinstance(result, dict), f"its process ended: {result}"
    return result


def test_ctrl_c_waits_for_the_end_of_the_optimizer_step() -> None:
    result = torn("pressed")
    assert result["updated"] == result["of"]
    assert [error.partition(":")[0] for error in result["raised"]] == ["KeyboardInterrupt"]
    assert result["here"]


def test_step_that_cannot_be_completed_is_torn_and_later_steps_are_refused() -> None:
    result = torn("lost")
    assert 0 < result["updated"] < result["of"], "the step did not end in the middle: the test shows nothing"
    assert [error.partition(":")[0] for error in result["raised"]] == ["TornStepError", "TornStepError"]
    assert f"ended after {result['updated']} of {result['of']} buckets" in result["raised"][0]
    assert "load the last checkpoint" in result["raised"][0]
    assert result["here"]


PLANTED = {
    "updates are forgotten": "AdamW",
    "gradients are not fetched": "accumulates",
    "nothing is tried": "global norm",
    "groups are not written back": "counter in the group",
    "operators write unnoted": "scaler",
}


@cache
def planted_results() -> list[Any]:
    """Run one scenario with each planted bug, and finally a scenario without a bug."""
    pairs = [*((scenario, bug) for bug, scenario in PLANTED.items()), ("AdamW", "")]
    return one_by_one(pairs, lambda left: said(run(left)))


@pytest.mark.parametrize("bug", PLANTED)
def test_these_tests_find_a_planted_bug(bug: str) -> None:
    *found, afterwards = planted_results()
    result = dict(zip(PLANTED, found))[bug]
    assert result is None or (result["bug"] == bug and not result["same"])
    assert afterwards["same"], "a bug has left something behind"
