"""Storages that torch cannot resize. The engine adopts each one, or keeps it resident and reports a
reason."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import tree
from adopt_cases import CASES, SIZE, outcomes, values
from adopt_train import HELD
from children import forked
from torch import nn

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.ledger import adoption
from teraio.runtime.ledger.adoption import NUMPY, Adopted, MemorySpan, make_resizable

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


ARRAYS: list[Any] = []  # global, because adoption does not read local variables if a debugger runs


@cache
def outcome() -> dict[str, str]:
    return outcomes()


@pytest.mark.parametrize("case", CASES)
def test_storage_is_adopted_or_refused_with_a_reason(case: str) -> None:
    assert outcome()[case] == ""


def test_tensors_are_rebound_if_torch_cannot_exchange_bytes() -> None:
    """Adopt storages as with torch 2.11, which cannot exchange the bytes of two storages. All outcomes must
    be the same as with a newer torch."""
    with patch.object(adoption, "EXCHANGES", False):
        assert {name: wrong for name, wrong in outcomes().items() if wrong} == {}


def forget_an_alias(candidate: adoption.Candidate) -> None:
    candidate.aliases.pop()
    REAL_OWN_BYTES(candidate)


def forget_the_bytes(candidate: adoption.Candidate) -> None:
    other = torch.UntypedStorage(candidate.storage.nbytes())
    other.fill_(0xA5)  # type: ignore[attr-defined]  # otherwise, fresh memory may contain the correct bytes
    candidate.storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


REAL_OWN_BYTES = adoption.copy_to_torch_allocator
# For each bug: (1) the function to replace, (2) its replacement, (3) True if torch can exchange bytes, and
# (4) the name of a case that must fail.
PLANTS: dict[str, tuple[str, Any, bool, str]] = {
    "an alias is forgotten": ("copy_to_torch_allocator", forget_an_alias, False, "tied by two parameters"),
    "the bytes are not copied": ("copy_to_torch_allocator", forget_the_bytes, True, "safetensors"),
    "an unseen holder is ignored": ("_unseen_holder_reason", lambda *_: None, True, "a slice of the storage"),
    "an unseen numpy array is ignored": (
        "_unseen_holder_reason",
        lambda *_: None,
        True,
        "numpy() of a weight, unseen",
    ),
    "a seen numpy array is ignored": (
        "_overlapping_storages",
        lambda spans: {},
        True,
        "from_numpy, the array lives",
    ),
    "other processes are ignored": ("is_shared", lambda *_: False, True, "torch.from_file, shared"),
}


@pytest.mark.parametrize("bug", PLANTS)
def test_adoption_cases_find_planted_bug(bug: str) -> None:
    name, planted, exchanges, noticed_by = PLANTS[bug]
    if exchanges and not adoption.EXCHANGES:
        pytest.skip("torch 2.11 cannot exchange bytes")
    with patch.object(adoption, name, planted), patch.object(adoption, "EXCHANGES", exchanges):
        assert outcomes()[noticed_by]


def test_array_in_a_local_variable_of_a_running_function_is_found() -> None:
    array = np.arange(SIZE, dtype=np.float32)
    tensor = torch.from_numpy(array)
    assert [r.reason for r in make_resizable([("w", tensor)]).refused] == [NUMPY]
    assert array[1] == 1
    del array
    assert make_resizable([("w", tensor)]) == Adopted(1, SIZE * 4, ()), "the search keeps the array alive"


def test_large_span_overlaps_all_spans_within_it() -> None:
    """Check that the span from 0 to 100 overlaps the span from 30 to 40.

    A shorter span, from 10 to 20, begins between the starts of the two spans.
    """
    spans = [MemorySpan(0, 100, 1), MemorySpan(10, 20, None), MemorySpan(30, 40, 2), MemorySpan(100, 110, 3)]
    assert adoption._overlapping_storages(spans) == {1: NUMPY, 2: NUMPY}


def test_resizable_and_meta_tensors_are_not_adopted() -> None:
    assert make_resizable([("w", values()), ("meta", torch.empty(9, device="meta"))]) == Adopted(0, 0, ())


# ---- training with adopted weights


def trained(*sources: str) -> dict[str, Any]:
    done = forked(tree.SUPPORT / "adopt_train.py", json.dumps(sources))
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout, done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**result, "log": done.stderr}


@cache
def runs() -> dict[str, Any]:
    return trained("plain", *SOURCES, "held", "looked at", "later", "plain blocks", "blocks")


# For the source "torch 2.11", the bytes of storages cannot be exchanged, so adoption rebinds every tensor of
# a storage.
SOURCES = ("torch.load", "mapped", "safetensors", "numpy", "torch 2.11")


@pytest.mark.parametrize("source", SOURCES)
def test_model_from_a_file_trains_bit_equal_and_its_weights_are_evicted(source: str) -> None:
    run, plain = runs()[source], runs()["plain"]
    assert run["losses"] == plain["losses"]
    assert run["digest"] == plain["digest"]
    assert max(run["peaks"]) <= run["budget"]
    assert run["evictions"] > 20
    assert run["stuck"] == []
    assert run["late"] == 0, "adopted after the first step had begun"


def test_adoption_has_at_most_one_tensor_twice_in_memory() -> None:
    for source in SOURCES:
        run = runs()[source]
        assert 0 < run["adopting_peak"] <= run["largest"] + 4096, source
    assert runs()["torch.load"]["kept"] == runs()["numpy"]["kept"] == 0, "adoption did not free the old bytes"


def test_weight_shared_with_numpy_is_kept_resident_counted_and_named() -> None:
    run, plain = runs()["held"], runs()["plain"]
    assert run["losses"] == plain["losses"]
    assert run["digest"] == plain["digest"]
    assert max(run["peaks"]) <= run["budget"]
    assert run["stuck"] == [HELD]
    assert "kept resident: 1 weight (176 KiB), because" in runs()["log"]
    assert f"{HELD} ({NUMPY})" in runs()["log"]


def test_weights_read_through_numpy_are_adopted_each_time() -> None:
    run, plain = runs()["looked at"], runs()["plain"]
    assert run["losses"] == plain["losses"]
    assert run["digest"] == plain["digest"]
    assert max(run["peaks"]) <= run["budget"]
    assert run["late"] > 40
    assert run["evictions"] > 20
    assert run["stuck"] == []
    assert runs()["log"].count("was exported to numpy again; each export costs a copy") == 1


def test_weights_that_no_compilation_saw_are_adopted_after_the_step() -> None:
    run, plain = runs()["later"], runs()["plain"]
    assert run["losses"] == plain["losses"]
    assert run["digest"] == plain["digest"]
    assert run["late"] > 20
    assert run["evictions"] > 20
    assert run["stuck"] == []


def test_blocks_that_share_a_program_are_adopted_together_before_the_first_runs() -> None:
    run = runs()["blocks"]
    assert run["losses"] == runs()["plain blocks"]["losses"]
    assert run["digest"] == runs()["plain blocks"]["digest"]
    assert (run["late"], run["stuck"]) == (0, [])
    assert run["evictions"] > 20


def test_weight_shared_with_numpy_between_two_programs_is_named(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Run no optimizer, so that no step ends. The engine must find the shared weight when the next program
    begins."""
    layers = [nn.Linear(256, 256) for _ in range(2)]
    options: dict[str, Any] = {"inner": "eager", "memory": "64MiB"}
    one, other = (torch.compile(layer, backend="teraio", options=options) for layer in layers)
    x = torch.randn(4, 256)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "teraio"):
        found = [one(x)]
        ARRAYS.append(layers[0].weight.detach().numpy())
        found += [other(found[0]), one(x), other(x)]
        assert torch.equal(found[0], found[2]) and torch.equal(found[0], layers[0](x))
    assert "kept resident: 1 weight (256 KiB), because" in caplog.text
    assert f"bytes: weight ({NUMPY}). Clone" in caplog.text
    ARRAYS.pop()[:] = 0
    assert not layers[0].weight.any()


@pytest.mark.parametrize("what", ["weights", "gradients"])
def test_tensors_logged_through_numpy_are_evicted_later(nothing_left: None, what: str) -> None:
    """Train with a budget of 7 MiB. After the reserve, 3 MiB are left for resident tensors, and the weights
    take 5 MiB."""

    def logged(memory: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)))
        options: dict[str, Any] = {"inner": "eager", "memory": memory}
        compiled: Any = torch.compile(model, backend="teraio", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            compiled(torch.ones(16, 256)).square().mean().backward()
            if what == "gradients":
                found += [float(p.grad.numpy().sum()) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            if what == "weights":
                found += [float(p.detach().numpy().sum()) for p in model.parameters()]
        evictions = teraio.stats()["evictions"]
        teraio.reset()
        torch._dynamo.reset()
        return [*found, evictions > 20]

    assert logged("7MiB") == [*logged("64MiB")[:-1], True]


def test_weights_of_compiled_layers_read_through_numpy_are_evicted_later(nothing_left: None) -> None:
    layers = [nn.Linear(256, 256) for _ in range(6)]
    options: dict[str, Any] = {"inner": "eager", "memory": "5MiB"}
    compiled = [torch.compile(layer, backend="teraio", options=options) for layer in layers]
    with torch.no_grad():
        wanted = nn.Sequential(*layers)(torch.ones(4, 256))
        for _ in range(2):
            x = torch.ones(4, 256)
            for layer, program in zip(layers, compiled):
                x = program(x)
                layer.weight.detach().numpy().sum()
            assert torch.equal(x, wanted)
    assert teraio.stats()["evictions"] > 4


def test_weight_shared_with_numpy_in_init_is_counted_once(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    with teraio.init(memory="64MiB", inner="eager", keep=["0.weight"]):
        model: Any = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        ARRAYS.append(model[2].weight.detach().numpy())
    compiled: Any = torch.compile(model, backend="teraio")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "teraio"):
        for _ in range(3):
            compiled(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "kept resident: 1 weight (256 KiB), because" in caplog.text
    assert f"bytes: 2.weight ({NUMPY}). Clone" in caplog.text
    records = [engine.ENGINE.residency.by_name[f"{number}.weight"] for number in range(3)]  # type: ignore[union-attr]
    assert [record.evictable for record in records] == [False, True, False]
    assert ARRAYS.pop().any()
