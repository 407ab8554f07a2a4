"""Common uses of a model. The results with a budget equal the results without a budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import scenarios_loops
import scenarios_people
import torch
from scenarios import SCENARIOS, Run

import teraio
from teraio.runtime.engine import engine

assert scenarios_loops and scenarios_people  # the imports of these modules fill SCENARIOS

# The model's weights and gradients take 2 MiB, and the reserve takes 4 MiB. Without teraio, each scenario
# needs 18 MiB or more.
MEMORY = "14MiB"

# In these scenarios the engine moves too few bytes, so the test checks their results but not their fetches.
STILL = {"inference alone", "blocks that share a program and are checkpointed"}

# Slow scenarios, each similar to a scenario that is not in this set. Only tests/long/cases.py runs the slow
# ones.
LONG = {
    "random numbers",
    "such a function in eager code",
    "checkpointing reentrant",
    "a short last batch",
    "autocast around the model",
    "evaluation in between",
    "two models and two optimizers",
    "frozen weights",
    "a second backward",
    "the later forward goes back last",
    "hooks on modules",
    "a loader with started workers",
    "a pickled model",
    "weights that the user writes",
    "blocks that share a program",
    "a part of the model",
    "an exception in a kernel",
    "a loss that is not finite",
    "complex numbers",
    "a copy of the model",
    "a functional call inside",
    "an exception between two programs",
    "hooks of a loss that has a class of its own",
}
CASES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in SCENARIOS]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with two threads, two runs of one training may differ
    monkeypatch.setenv("TERAIO_MEMORY", MEMORY)
    monkeypatch.setenv("TERAIO_WARMUP", "1")
    yield
    teraio.reset()
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", CASES)
def test_scenario_with_budget_keeps_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    does = SCENARIOS[name]
    with monkeypatch.context() as disabled:
        disabled.setenv("TERAIO_DISABLE", "1")
        plain = Run({"inner": "eager"})
        does(plain)
    torch._dynamo.reset()
    ours = Run({"inner": "eager"})
    does(ours)
    assert engine.ENGINE is not None
    assert len(ours.seen) == len(plain.seen) > 0
    for number, (one, other) in enumerate(zip(ours.seen, plain.seen)):
        equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert equal, f"result {number} of {len(plain.seen)}: {one} instead of {other}"
    if name not in STILL:
        assert teraio.stats()["fetches"] > 3, "nothing moved: the test shows nothing"
