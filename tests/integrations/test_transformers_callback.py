"""TeraioCallback in Hugging Face's Trainer: it compiles the model, and its figures reach every log.

`tests/end_to_end/test_trainers.py` has the Trainer with checkpoints, resuming and accumulation.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import tree
from children import forked

RUNS = ("logged", "adapted", "model_init", "refusals", "logged=1", "adapted=1")
FIGURES = {
    *("phase", "step_seconds", "step_stall_seconds", "step_written_bytes", "step_read_bytes"),
    *("written_per_day_bytes", "step_peak_bytes", "budget_bytes", "written_bytes"),
}


@cache
def process(folder: Path) -> CompletedProcess[str]:
    return forked(tree.SUPPORT / "callback_child.py", str(folder), *RUNS)


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    done = process(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callback")


def figures_in(log: dict[str, Any]) -> set[str]:
    return {name.removeprefix("teraio/") for name in log if name.startswith("teraio/")}


def test_figures_are_in_the_history_of_training_steps_only(folder: Path) -> None:
    history = runs(folder)[""]["logged"]["history"]
    training = [entry for entry in history if "loss" in entry]
    others = [entry for entry in history if "loss" not in entry]
    assert [entry["step"] for entry in training] == [1, 2, 3, 4] and len(others) == 3
    assert all(figures_in(entry) == FIGURES for entry in training)
    assert not any(figures_in(entry) for entry in others)
    assert all(entry["teraio/step_seconds"] > 0 for entry in training)
    assert all(0 < e["teraio/step_peak_bytes"] <= e["teraio/budget_bytes"] for e in training)
    assert training[0]["teraio/phase"] == "measuring"


def test_figures_reach_callbacks_that_precede_the_callback_of_teraio(folder: Path) -> None:
    run = runs(folder)[""]["logged"]
    training = [entry for entry in run["history"] if "loss" in entry]
    for name in FIGURES - {"phase"}:  # TensorBoard gets the phase as text
        points = run["scalars"][f"train/teraio/{name}"]
        assert [step for step, _ in points] == [1, 2, 3, 4]
        assert [value for _, value in points] == pytest.approx([e[f"teraio/{name}"] for e in training])
    assert [figures_in(log) for log in run["seen"] if "loss" in log] == [FIGURES] * 4


@pytest.mark.parametrize("name", ["logged", "adapted"])
def test_budget_changes_no_number(folder: Path, name: str) -> None:
    within, plain = runs(folder)[""][name], runs(folder)["1"][name]
    assert within["counts"]["evictions"] > 5 and plain["counts"] == {}
    for entry in plain["history"]:
        assert not figures_in(entry)
    numbers = ("loss", "grad_norm", "eval_loss", "learning_rate")
    trained = [[[entry.get(key) for key in numbers] for entry in run["history"]] for run in (within, plain)]
    assert trained[0] == trained[1]
    assert within["weights"] == plain["weights"]


def test_compilation_changes_no_key_of_the_state_dict(folder: Path) -> None:
    within = runs(folder)[""]
    assert within["logged"]["keys"] == ["embed.weight", "head.weight", "head.bias"]
    assert not any("_orig_mod" in key for key in within["adapted"]["keys"])


def test_model_of_model_init_is_compiled_by_a_callback_that_is_added_later(folder: Path) -> None:
    run = runs(folder)[""]["model_init"]
    assert run["counts"]["step"] == 2 and run["counts"]["evictions"] > 0
    assert figures_in(run["history"][0]) == FIGURES


def test_second_compiler_of_the_trainer_is_refused(folder: Path) -> None:
    found = runs(folder)[""]["refusals"]
    assert found["torch_compile"].startswith("OptionError: TrainingArguments compile the model with backend")
    assert "'inductor'" in found["torch_compile"] and "Leave out torch_compile" in found["torch_compile"]
    assert found["untouched"]


def test_wrong_option_is_refused_before_there_is_a_trainer(folder: Path) -> None:
    assert "did you mean memory?" in runs(folder)[""]["refusals"]["option"]


def test_model_that_the_user_compiled_is_left_as_it_is(folder: Path) -> None:
    found = runs(folder)[""]["refusals"]
    assert found["compiled"] == [True, True]
    expected = "compiles nothing, because its module 'head' is already compiled; its options have no effect"
    assert [line.endswith(expected) for line in found["lines"][:2]] == [True, True]


def test_second_trainer_of_a_model_keeps_its_compiled_calls(folder: Path) -> None:
    """Compare the compiled call before and after. No further line may be printed."""
    assert runs(folder)[""]["refusals"]["second"] == [True, True, 2]


def test_callback_is_first_in_order_or_warns(folder: Path) -> None:
    found = runs(folder)[""]["refusals"]
    assert found["first in order"]
    assert "list of callbacks was not found" in found["no list"]


def test_accelerate_refuses_the_name_of_the_backend(folder: Path) -> None:
    """Check a fact that docs/cookbook.md and docs/upstream/accelerate.md state."""
    assert runs(folder)[""]["refusals"]["accelerate"] == "ValueError: 'TERAIO' is not a valid DynamoBackend"
