"""Promises about what people do with a model: with a budget it does what it does without."""

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

assert scenarios_loops and scenarios_people  # they fill the table

MEMORY = "14MiB"  # weights and gradients take 2, the engine keeps 4; the plain runs need 18 or more

# Nothing is asked of these but to be right: there is too little to move in them.
STILL = {"inference alone", "blocks that share a program and are checkpointed"}

# Each has one that is much like it among the others. tests/long/cases.py runs them.
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
    torch.set_num_threads(1)  # on two, plain training is not equal to itself
    monkeypatch.setenv("TERAIO_MEMORY", MEMORY)
    monkeypatch.setenv("TERAIO_WARMUP", "1")
    yield
    teraio.reset()
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_with_a_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert equal, f"thing {number} of {len(plain.seen)} that was seen: {one} instead of {other}"
    if name not in STILL:
        assert teraio.stats()["fetches"] > 3, "nothing moved: the test shows nothing"
