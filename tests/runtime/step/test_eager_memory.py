"""The memory that user code takes between programs. The engine measures this memory, and makes room for it in
later steps.

The blocks of a Llama are compiled, but its head and its loss are eager. A test allocator counts every byte.
"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import tree
from children import forked
from kept_train import ROWS, SAVED, WIDTH
from outside_train import BATCH, LENGTH, SHAPE

from teraio.formats.schedule import Schedule
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import State
from teraio.runtime.step.eager_memory import NOISE_BYTES, EagerMemory
from teraio.runtime.step.program import Program

LOGITS = 4 * BATCH * LENGTH * SHAPE.vocabulary
LAST_FORWARD = str(SHAPE.layers - 1)  # the call after which user code computes the loss
MIB = 2**20


def results(runs: list[dict[str, Any]], *shape: str) -> dict[str, Any]:
    done = forked(tree.SUPPORT / "outside_train.py", json.dumps(runs), *shape)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for name, run in result.items():
        print(name, run["budget"], run["peaks"], run["overruns"], run["learnt"], run["error"])
        run["log"] = done.stderr
    return result


@cache
def trained() -> dict[str, Any]:
    """Train with four budgets.

    Only the first run compiles programs. In its first step, some calls also compile a backward. The engine
    does not measure the memory that user code takes after such a call.
    """
    runs = [
        {"name": "plenty", "planner": "greedy", "steps": 6},
        {"name": "demand", "of": "plenty", "part": 0.65, "planner": "none", "steps": 4},
        {"name": "planned", "of": "plenty", "part": 0.55, "planner": "greedy", "steps": 6},
        {"name": "too little", "of": "plenty", "part": 0.35, "planner": "none", "steps": 3},
    ]
    return results(runs)


def test_memory_of_eager_loss_is_learnt() -> None:
    """The loss takes three tensors of one size: the logits, their log-softmax, and one gradient."""
    for run in trained().values():
        assert not run["error"]
        assert 3 * LOGITS <= run["learnt"][LAST_FORWARD] + MIB <= 3.5 * LOGITS
        others = {call: size for call, size in run["learnt"].items() if call != LAST_FORWARD}
        assert max(others.values()) <= 3 * MIB, "the optimizer and the last gradient take no more"
        assert run["said"] == run["learnt"][LAST_FORWARD]


@pytest.mark.parametrize("name", ["demand", "planned"])
def test_first_step_overruns_and_later_steps_are_within_the_budget(name: str) -> None:
    run = trained()[name]
    assert run["peaks"][0] > 1.2 * run["budget"]
    assert max(run["peaks"][1:]) <= run["budget"]
    assert run["losses"] == trained()["plenty"]["losses"][: len(run["losses"])]
    assert run["overruns"][0] == run["overruns"][-1] > run["peaks"][0] - run["budget"] > 0


def test_weights_of_eager_code_train_within_the_budget() -> None:
    """Train a model whose embedding and head have most of the bytes. No program uses these two.

    Memory has room for only one of the two weights at a time. When the engine fetches one weight for user
    code, it also leaves room for temporaries of user code.
    """
    runs = [{"name": "plenty", "planner": "greedy", "steps": 4}]
    runs += [
        {"name": str(part), "of": "plenty", "part": part, "planner": "none", "steps": 4}
        for part in (0.62, 0.58)
    ]
    plenty, *tight = results(runs, "wide").values()
    for run in tight:
        assert not run["error"]
        assert run["losses"] == plenty["losses"]
        assert max(run["peaks"][1:]) <= run["budget"]
        assert run["touches"] > 2


def test_overrun_is_logged_with_its_call_once_per_run() -> None:
    lines = [line for line in trained()["plenty"]["log"].splitlines() if "overrun" in line]
    assert len(lines) == 3
    assert all(f"(after call {LAST_FORWARD}, forward) needs" in line for line in lines)


def test_eager_memory_beyond_a_small_budget_is_no_error() -> None:
    run = trained()["too little"]
    assert min(run["peaks"]) > run["budget"]
    assert max(run["peaks"][1:]) < 0.75 * run["peaks"][0], "evictable tensors were kept resident"
    assert run["losses"] == trained()["plenty"]["losses"][: len(run["losses"])]


def test_large_budget_evicts_nothing_for_eager_memory() -> None:
    assert trained()["plenty"]["overruns"][-1] == 0
    assert trained()["plenty"]["evictions"] == 0


# ---- rules of the measurement, without a model


def stand_in(**facts: Any) -> Any:
    return SimpleNamespace(**facts)


class Bench:
    """An `EagerMemory` without a model, in a state where one call has returned and user code runs."""

    def __init__(self, kind: str = "forward") -> None:
        self.used, self.peak = 100 * MIB, 0
        mover = Mover.__new__(Mover)
        mover.resident_bytes, mover.foreign_bytes = 50 * MIB, 0
        self.said: list[tuple[int, str]] = []
        self.residency = stand_in(
            mover=mover,
            records={},
            budget_bytes=90 * MIB,
            reserve_bytes=4 * MIB,
            forget_dead_records=lambda: None,
            report_overrun=lambda *what: self.said.append(what),
        )
        self.residency.reserve_for_user_code, self.residency.elastic = lambda kept_bytes: None, False
        program = stand_in(schedule=stand_in(kind=kind))
        expected = stand_in(outside={}, kept={})
        self.tracker = stand_in(running=stand_in(), programs=[program], known={}, expected=expected)
        vars(self.tracker).update(number=3, at=4, base=None, outside={}, kept={})
        self.tracker.note_outside_bytes = self.tracker.outside.__setitem__
        self.tracker.note_kept_bytes = self.tracker.kept.__setitem__
        device = stand_in(
            reset_peak=self.reset_peak, used_bytes=lambda: self.used, peak_bytes=lambda: self.peak
        )
        device.sees_pages = False
        mover.device = device
        self.outside = EagerMemory(self.residency, device, self.tracker, lambda record: False)

    def reset_peak(self) -> None:
        self.peak = self.used

    def takes(self, size_bytes: int) -> dict[int, int]:
        """Let user code take this number of bytes, and then begin the next program. Return the engine's
        counts of such bytes, by call."""
        self.outside.begin_user_code_measure()
        self.peak += size_bytes
        self.outside.end_user_code_measure()
        learnt: dict[int, int] = self.tracker.outside
        return learnt


def test_learnt_bytes_are_kept_by_the_call_before_them() -> None:
    assert Bench().takes(30 * MIB) == {3: 30 * MIB}


def test_bytes_beyond_the_budget_are_reported_as_overrun() -> None:
    """Resident tensors take 50 MiB of the budget of 90 MiB, and the reserve takes 4 MiB. User code may
    therefore take 36 MiB."""
    fits, more = Bench(), Bench()
    fits.takes(36 * MIB)
    assert fits.said == []
    more.takes(40 * MIB)
    assert more.said == [(4 * MIB, "after call 3, forward")]


def test_bytes_below_the_noise_limit_count_as_zero() -> None:
    assert Bench().takes(NOISE_BYTES - 1) == {3: 0}


@pytest.mark.parametrize("counted", [True, False])
def test_bytes_in_the_ledger_do_not_count_as_user_codes(counted: bool) -> None:
    """User code touches a weight, and the engine fetches the 20 MiB of the weight while user code runs.

    The peak includes the weight if the device counts the weight's bytes. In both cases, the engine must not
    count the weight as memory of user code.
    """
    bench = Bench()
    mover = bench.residency.mover
    bench.outside.begin_user_code_measure()
    mover.resident_bytes += 20 * MIB
    mover.foreign_bytes += 20 * MIB * (not counted)
    bench.peak += 5 * MIB + 20 * MIB * counted
    bench.outside.end_user_code_measure()
    assert bench.tracker.outside == {3: 5 * MIB}


def test_memory_of_compilation_is_not_learnt() -> None:
    bench = Bench()
    bench.outside.begin_user_code_measure()
    Program(Schedule("backward", (), ()))
    bench.peak += 500 * MIB
    bench.outside.end_user_code_measure()
    assert bench.tracker.outside == {}
    assert bench.said == []


def test_first_step_of_an_optimizer_is_not_learnt() -> None:
    bench = Bench("optimizer")
    assert bench.takes(30 * MIB) == {}
    bench.tracker.known = {("a",): object()}
    assert bench.takes(30 * MIB) == {3: 30 * MIB}


def test_user_code_is_not_measured_during_a_fetch_if_pages_are_counted() -> None:
    bench = Bench()
    bench.outside.device.sees_pages = True
    bench.residency.records = {1: SimpleNamespace(state=State.FETCHING)}
    assert bench.takes(30 * MIB) == {}


def test_measure_continues_over_an_optimizers_step() -> None:
    """Begin the measurement before the optimizer steps.

    After the optimizer's step, the engine begins the measurement a second time. This must have no effect,
    because the measurement still runs.
    """
    bench = Bench()
    bench.outside.begin_user_code_measure()
    bench.peak += 30 * MIB
    bench.outside.begin_user_code_measure()
    bench.outside.end_user_code_measure()
    assert bench.tracker.outside == {3: 30 * MIB}


def test_unmeasured_step_learns_only_calls_that_were_never_measured() -> None:
    """Run a step that follows the plan of an earlier run. No step of this run has been measured before.

    The engine therefore measures each call one time. If the device counts fetched pages, the engine does not
    measure while fetches are in flight.
    """
    bench = Bench()
    bench.tracker.running, bench.tracker.base = None, 17
    bench.residency.records = {1: SimpleNamespace(state=State.FETCHING)}
    bench.outside.device.sees_pages = True
    assert bench.takes(30 * MIB) == {}, "pages of the fetch would count, too"
    bench.outside.device.sees_pages = False
    assert bench.takes(30 * MIB) == {3: 30 * MIB}
    bench.tracker.expected.outside[3] = bench.tracker.outside.pop(3)
    assert bench.takes(20 * MIB) == {}


def test_kept_bytes_are_learnt_once_in_unmeasured_steps() -> None:
    bench = Bench()
    tracker, held = bench.tracker, list[int]()
    bench.residency.reserve_for_user_code = held.append
    tracker.running, tracker.base = None, 17
    for number, kept in ((0, 0), (3, 20 * MIB), (0, 0), (3, 0)):
        tracker.number, tracker.at = number, number + 1
        bench.used = 100 * MIB + kept
        bench.outside.reserve_kept_bytes()
        tracker.expected.kept.update(tracker.kept)
        tracker.kept.clear()
    assert tracker.expected.kept == {3: 20 * MIB}
    assert held == [0, 20 * MIB, 0, 20 * MIB]


def test_system_without_memory_counts_is_queried_once() -> None:
    bench = Bench()
    queries = []

    def refuse() -> None:
        queries.append(1)
        raise PermissionError

    bench.outside.device.reset_peak = refuse  # type: ignore[method-assign]
    assert bench.takes(30 * MIB) == bench.takes(30 * MIB) == {}
    assert queries == [1]


def test_tensors_saved_by_eager_autograd_get_room_between_two_programs() -> None:
    """Without the measurement, the second program runs beside bytes that the engine does not count."""
    budget, kept = 38 * MIB, 4 * ROWS * WIDTH * SAVED
    runs = []
    for words in ([], ["unseen"]):
        done = forked(tree.SUPPORT / "kept_train.py", str(budget), *words)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    seen, unseen = runs
    assert seen["losses"] == unseen["losses"]
    assert abs(seen["kept"]["1"] - kept) < 2 * MIB, "bytes held when the program after the graph break begins"
    assert max(seen["peaks"][2:]) <= budget
    assert max(unseen["peaks"][2:]) > 1.1 * budget
