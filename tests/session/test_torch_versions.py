"""Tests of the choice of the inner program, Inductor's or the eager one, for a version of torch.

teraio uses tested versions of torch without a self-test. For any other version, teraio first runs a
self-test. If an inner program fails the self-test, teraio uses another inner program or raises an error. A
message names the failure.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import tree
from children import ended

from teraio.errors import UnsupportedError
from teraio.formats.schedule import READ, WRITE, Schedule
from teraio.passes import selftest
from teraio.passes.fx import program
from teraio.passes.slots.layout import SlotPlace
from teraio.runtime.engine import engine
from teraio.session import torch_versions

UNKNOWN = "2.99.0"


class SelfTest:
    """A fake self-test. It fails for the inner programs in `failing`, and records its calls."""

    def __init__(self, **failing: str) -> None:
        self.failing = failing
        self.calls: list[str] = []

    def __call__(self, inner: str, device: str) -> str:
        self.calls.append(inner)
        return self.failing.get(inner, "")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all verdicts and warnings, so that each test begins as a new process would."""
    monkeypatch.setattr(torch_versions, "VERDICTS", {})
    monkeypatch.setattr(torch_versions, "WARNED", set())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---- the choice of the inner program


def test_tested_version_is_used_without_self_test(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("2.13.0+cpu", "2.13.1", "2.15.0", "2.11.0+cu130"):
        self_test = SelfTest(inductor="it ran", eager="it ran")
        assert torch_versions.choose_inner_program("inductor", version, "cpu", self_test) == "inductor"
        assert not self_test.calls
    assert not warnings(caplog)


def test_tested_versions_match_metadata_and_installed_torch() -> None:
    assert torch_versions.is_tested(torch.__version__)
    first, last = torch_versions.TESTED[0], torch_versions.TESTED[-1].split(".")
    project = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={first},<{last[0]}.{int(last[1]) + 1}" in project["dependencies"]


@pytest.mark.parametrize("version", ["2.99.0", "2.1.0", "3.0", "2.13.0a0+git1", "2.13.0rc2", "2.13", "next"])
def test_untested_version_is_warned_of_and_self_tested_once(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    passing = SelfTest()
    for _ in range(3):
        assert torch_versions.choose_inner_program("inductor", version, "cpu", passing) == "inductor"
    assert torch_versions.choose_inner_program("eager", version, "cpu", passing) == "eager"
    assert passing.calls == ["inductor", "eager"]
    (warning,) = warnings(caplog)
    assert f"not tested with torch {version} " in warning
    assert ", ".join(torch_versions.TESTED) in warning


def test_each_device_is_self_tested() -> None:
    passing = SelfTest()
    for device in ("cpu", "cuda", "cpu", "cuda"):
        torch_versions.choose_inner_program("eager", UNKNOWN, device, passing)
    assert passing.calls == ["eager", "eager"]


def test_failing_inductor_falls_back_to_eager_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    failing = SelfTest(inductor="slot 3 was called, but slot 2 was expected")
    for _ in range(2):
        assert torch_versions.choose_inner_program("inductor", UNKNOWN, "cpu", failing) == "eager"
    assert failing.calls == ["inductor", "eager"]
    _, warning = warnings(caplog)
    for part in (
        UNKNOWN,
        "slot 3 was called, but slot 2 was expected",
        "inner='eager'",
        "take longer",
        "Install torch 2.",
    ):
        assert part in warning


def test_failing_inductor_with_on_fallback_error_is_refused() -> None:
    failing = SelfTest(inductor="no such line")
    for _ in range(2):
        with pytest.raises(UnsupportedError) as error:
            torch_versions.choose_inner_program("inductor", UNKNOWN, "cpu", failing, "error")
        for part in (f"torch {UNKNOWN}", "no such line", "Install torch 2.", "or inner='eager'"):
            assert part in str(error.value)
    assert failing.calls == ["inductor"]


def test_version_that_fails_both_self_tests_is_refused() -> None:
    failing = SelfTest(inductor="no such line", eager="no such graph")
    with pytest.raises(UnsupportedError) as error:
        torch_versions.choose_inner_program("inductor", UNKNOWN, "cpu", failing)
    for part in (f"torch {UNKNOWN}", "no such line", "no such graph", "Install torch 2."):
        assert part in str(error.value)
    with pytest.raises(UnsupportedError, match="no such graph"):
        torch_versions.choose_inner_program("eager", UNKNOWN, "cpu", failing)


# ---- the self-test itself


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_self_test_passes_with_installed_torch(inner: str) -> None:
    assert selftest.find_fault_in_slots(inner) == ""


def test_self_test_keeps_engine_and_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouched:
        pid = 0  # not this process's id, so that teraio's wrappers of torch functions ignore this engine

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    torch._dynamo.reset()  # without the reset, callbacks of an earlier test would call the engine
    monkeypatch.setattr(engine, "ENGINE", Untouched())
    before = torch.get_rng_state()
    with engine.collect_loaded_programs(lambda program: None) as loaded:
        for inner in ("eager", "inductor"):
            assert selftest.find_fault_in_slots(inner) == ""
    assert not loaded
    assert torch.equal(before, torch.get_rng_state())
    assert not selftest.WATCH


VIEWS = ("expand", "t", "view", "detach", "permute", "squeeze", "unsqueeze", "alias")

Lay = Callable[..., tuple[Schedule, list[SlotPlace]]]
Laid = tuple[Schedule, list[SlotPlace]]


def planted(
    module: Any, bug: Callable[[Schedule, list[SlotPlace]], Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    lay: Lay = module.lay_slots
    monkeypatch.setattr(module, "lay_slots", lambda *given: bug(*lay(*given)))


def without(items: Sequence[Any], at: int) -> list[Any]:
    return [*items[:at], *items[at + 1 :]]


def drop_the_place(at: int, schedule: Schedule, places: list[SlotPlace]) -> Laid:
    """Plant a bug: remove slot `at` from the program, but not from the schedule, the list of the program's
    slots. All later slots of the program then have wrong numbers."""
    return schedule, without(places, at)


def drop_the_slot(at: int, schedule: Schedule, places: list[SlotPlace]) -> Laid:
    """Plant a bug: remove slot `at` from the program and from the schedule, the list of the program's slots.
    The remaining slots have consecutive numbers."""
    return replace(schedule, slots=tuple(without(schedule.slots, at))), without(places, at)


def drop_a_tensor(at: int, schedule: Schedule, places: list[SlotPlace]) -> Laid:
    slot, place = schedule.slots[at], places[at]
    used = next((n for n, flags in enumerate(slot.flags) if flags & (READ | WRITE)), None)
    if used is None or slot.kernel.rstrip("_0123456789") in VIEWS:  # a view reads no bytes
        return schedule, []
    slot = replace(slot, buffers=tuple(without(slot.buffers, used)), flags=tuple(without(slot.flags, used)))
    slots = (*schedule.slots[:at], slot, *schedule.slots[at + 1 :])
    return replace(schedule, slots=slots), [
        *places[:at],
        replace(place, names=tuple(without(place.names, used))),
        *places[at + 1 :],
    ]


def hand_over_another(at: int, schedule: Schedule, places: list[SlotPlace]) -> Laid:
    places = [*places]
    places[at] = replace(places[at], names=places[at].names[::-1])
    return schedule, places if len(places[at].names) > 1 else []


def a_slot_late(at: int, schedule: Schedule, places: list[SlotPlace]) -> Laid:
    """Plant a bug: move slot `at` and all later slots, each to the position of the next slot.

    Each moved slot then runs after its kernel instead of before it.
    """
    return schedule, [
        replace(place, at=places[min(n + (n >= at), len(places) - 1)].at) for n, place in enumerate(places)
    ]


BUGS = (drop_the_place, drop_the_slot, drop_a_tensor, hand_over_another, a_slot_late)
IN_THE_BACKWARD = (drop_the_slot, drop_a_tensor)  # tests/long/cases.py plants the other bugs in the backward


@pytest.mark.parametrize(
    ("bug", "kind"),
    [
        *((bug, "forward") for bug in BUGS),
        *((bug, "backward") for bug in IN_THE_BACKWARD),
        *(
            pytest.param(bug, "backward", marks=pytest.mark.long)
            for bug in BUGS
            if bug not in IN_THE_BACKWARD
        ),
    ],
)
def test_self_test_finds_planted_bug_at_each_slot(
    bug: Callable[[int, Schedule, list[SlotPlace]], Laid], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test plants the bug at one slot after another: at each slot of the forward, or at every third slot
    of the backward. The self-test must find each planted bug."""
    found: dict[int, str] = {}
    length = [2]
    at = 0
    while at < length[0] - 1:

        def plant(schedule: Schedule, places: list[SlotPlace], at: int = at) -> Laid:
            if schedule.kind != kind:
                return schedule, places
            length[0] = len(schedule.slots)
            wrong = bug(at, schedule, places)
            changed = wrong[1] and wrong != (schedule, places)
            found[at] = "" if changed else "nothing to plant here"
            return wrong if changed else (schedule, places)

        with monkeypatch.context() as patch:
            planted(program, plant, patch)
            found[at] = selftest.find_fault_in_slots("eager") or found[at]
        at += 1 if kind == "forward" else 3
    print(found)
    assert len(found) > 4
    assert all(found.values()), "not found"
    assert set(found.values()) != {"nothing to plant here"}


def test_self_test_finds_dropped_slot_in_inductor_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from teraio.passes.inductor import codegen as inductor

    # With the planted version, Inductor's cache has no program. A cached program would not contain the bug.
    monkeypatch.setattr(inductor, "VERSION", "planted")
    found = []
    for at in range(1, 5):
        with monkeypatch.context() as patch:
            planted(inductor, partial(drop_the_slot, at), patch)
            found.append(selftest.find_fault_in_slots("inductor"))
    assert all(found), found
    assert any("without a tensor that it reads" in each for each in found), found


def test_self_test_names_removed_parts_of_torch() -> None:
    """A child process removes parts of torch before teraio imports these parts."""
    ran = ended([sys.executable, "-c", REMOVED], env=os.environ)
    assert ran.returncode == 0, ran.stderr[-2000:]
    inductor, eager = json.loads(ran.stdout.splitlines()[-1])
    assert "WrapperLine" in inductor and inductor.startswith(("AttributeError", "ImportError"))
    assert "aot_autograd" in eager and eager.startswith("ImportError")
    assert "Traceback" not in ran.stdout + ran.stderr


REMOVED = """
import json
import torch._dynamo.backends.common as common
import torch._inductor.codegen.wrapper as wrapper
from teraio.passes import selftest
whole = common.aot_autograd
del common.aot_autograd
eager = selftest.find_fault_in_slots("eager")
common.aot_autograd = whole
del wrapper.WrapperLine
print(json.dumps([selftest.find_fault_in_slots("inductor"), eager]))
"""


def test_crash_of_self_test_counts_as_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.syspath_prepend(tmp_path)
    assert selftest.run_selftest_in_subprocess("eager", "cpu").startswith("its process ended with -11")


# ---- a whole training


def test_model_trains_with_eager_if_inductor_slots_fail(tmp_path: Path) -> None:
    """A child process removes a method of Inductor that teraio needs to insert slots.

    The model then trains with the inner program `eager`.
    """
    (tmp_path / "sitecustomize.py").write_text(REMOVE_METHOD)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ran = ended([sys.executable, "-c", TRAIN], env={**os.environ, "PYTHONPATH": paths})
    assert ran.returncode == 0, ran.stderr[-2000:]
    plain, ours, error, causes = json.loads(ran.stdout.splitlines()[-1])
    assert ours == plain
    assert ran.stderr.count(f"not tested with torch {UNKNOWN}") == 1
    assert ran.stderr.count("inner='eager' is used") == 1
    assert "run_wrapper_ir_passes" in error and f"torch {UNKNOWN}" in error
    assert causes == ["UnsupportedError"]
    assert "Traceback" not in ran.stderr


# The source of a module `sitecustomize`, which Python runs when a process starts. The import finder in this
# module loads Inductor's wrapper code, and then deletes a method.
REMOVE_METHOD = """
import importlib.abc, importlib.machinery, sys
class Taker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch._inductor.codegen.wrapper":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            del module.PythonWrapperCodegen.run_wrapper_ir_passes
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Taker())
"""

TRAIN = """
import json, torch, teraio
torch.__version__ = "2.99.0"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
batch = torch.randn(16, 64)

def train(run):
    model.zero_grad()
    loss = run(batch).square().sum()
    loss.backward()
    return [loss.item(), *(p.grad.sum().item() for p in model.parameters())]

def options(**more):
    return {"memory": "1GiB", **more}

plain = train(model)
ours = train(torch.compile(model, backend="teraio", options=options()))
again = train(torch.compile(model, backend="teraio", options=options(), dynamic=True))
assert again == ours and teraio.stats()["slots"] > 10
teraio.reset()
try:
    train(torch.compile(model, backend="teraio", options=options(on_fallback="error")))
except Exception as caught:
    error = getattr(caught, "inner_exception", caught)
    causes = []
    each = error
    while each is not None:
        causes.append(type(each).__name__)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    print(json.dumps([plain, ours, str(error), causes]))
"""
