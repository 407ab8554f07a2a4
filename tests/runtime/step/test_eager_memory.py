"""Promises about what user code takes between programs: it is learnt, room is made for it, no error.

Blocks of a Llama are compiled, its head and its loss are not; an allocator counts every byte.
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
from teraio.runtime.ledger.record import State
from teraio.runtime.step.eager_memory import NOISE_BYTES, EagerMemory
from teraio.runtime.step.program import Program

LOGITS = 4 * BATCH * LENGTH * SHAPE.vocabulary
LAST_FORWARD = str(SHAPE.layers - 1)  # call: the loss comes after it
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
    """The first run compiles; in its first step nothing can be learnt where the backward is compiled."""
    runs = [
        {"name": "plenty", "planner": "greedy", "steps": 6},
        {"name": "demand", "of": "plenty", "part": 0.65, "planner": "none", "steps": 4},
        {"name": "planned", "of": "plenty", "part": 0.55, "planner": "greedy", "steps": 6},
        {"name": "too little", "of": "plenty", "part": 0.35, "planner": "none", "steps": 3},
    ]
    return results(runs)


def test_what_a_loss_takes_is_learnt_to_the_byte_or_nearly() -> None:
    """Logits, their log-softmax, and the gradient of one of them."""
    for run in trained().values():
        assert not run["error"]
        assert 3 * LOGITS <= run["learnt"][LAST_FORWARD] + MIB <= 3.5 * LOGITS
        others = {call: size for call, size in run["learnt"].items() if call != LAST_FORWARD}
        assert max(others.values()) <= 3 * MIB, "the optimizer, the last gradient: not what is learnt here"
        assert run["said"] == run["learnt"][LAST_FORWARD]


@pytest.mark.parametrize("name", ["demand", "planned"])
def test_the_first_sight_is_an_overrun_and_from_then_on_there_is_room(name: str) -> None:
    run = trained()[name]
    assert run["peaks"][0] > 1.2 * run["budget"]
    assert max(run["peaks"][1:]) <= run["budget"]
    assert run["losses"] == trained()["plenty"]["losses"][: len(run["losses"])]
    assert run["overruns"][0] == run["overruns"][-1] > run["peaks"][0] - run["budget"] > 0


def test_weights_and_gradients_of_eager_code_are_managed_within_the_budget() -> None:
    """An embedding and a head that are most of the model, and in no program: the step holds one of them at a
    time. What is fetched while user code runs leaves room for what that takes besides."""
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


def test_an_overrun_is_said_with_bytes_and_place_once_per_run() -> None:
    lines = [line for line in trained()["plenty"]["log"].splitlines() if "overrun" in line]
    assert len(lines) == 3
    assert all(f"(after call {LAST_FORWARD}, forward) needs" in line for line in lines)


def test_what_cannot_be_made_free_is_no_error() -> None:
    run = trained()["too little"]
    assert min(run["peaks"]) > run["budget"]
    assert max(run["peaks"][1:]) < 0.75 * run["peaks"][0], "what could leave did not"
    assert run["losses"] == trained()["plenty"]["losses"][: len(run["losses"])]


def test_with_plenty_of_memory_nothing_moves_for_it() -> None:
    assert trained()["plenty"]["overruns"][-1] == 0
    assert trained()["plenty"]["evictions"] == 0


# ---- what is not learnt


def stand_in(**facts: Any) -> Any:
    return SimpleNamespace(**facts)


class Bench:
    """One call has returned; user code runs."""

    def __init__(self, kind: str = "forward") -> None:
        self.used, self.peak = 100 * MIB, 0
        mover = stand_in(resident_bytes=50 * MIB, device_counted_bytes=50 * MIB)
        self.residency = stand_in(
            mover=mover,
            records={},
            budget_bytes=90 * MIB,
            reserve_bytes=4 * MIB,
            forget_dead_records=lambda: None,
        )
        self.residency.reserve_for_user_code, self.residency.elastic = lambda kept_bytes: None, False
        program = stand_in(schedule=stand_in(kind=kind))
        expected = stand_in(outside={}, kept={})
        self.tracker = stand_in(running=stand_in(), programs=[program], known={}, expected=expected)
        vars(self.tracker).update(number=3, at=4, base=None, outside={}, kept={})
        self.said: list[tuple[int, str]] = []
        device = stand_in(
            reset_peak=self.reset_peak, used_bytes=lambda: self.used, peak_bytes=lambda: self.peak
        )
        device.sees_pages = False
        self.outside = EagerMemory(
            self.residency, device, self.tracker, lambda *what: self.said.append(what), lambda record: False
        )

    def reset_peak(self) -> None:
        self.peak = self.used

    def takes(self, size_bytes: int) -> dict[int, int]:
        """User code does, and the next program comes: what is learnt."""
        self.outside.begin_user_code_measure()
        self.peak += size_bytes
        self.outside.end_user_code_measure()
        learnt: dict[int, int] = self.tracker.outside
        return learnt


def test_the_call_it_comes_after_is_kept_with_it() -> None:
    assert Bench().takes(30 * MIB) == {3: 30 * MIB}


def test_more_than_the_budget_is_said_with_what_is_missing() -> None:
    """50 MiB are resident, 4 in reserve, memory is 90."""
    fits, more = Bench(), Bench()
    fits.takes(36 * MIB)
    assert fits.said == []
    more.takes(40 * MIB)
    assert more.said == [(4 * MIB, "after call 3, forward")]


def test_noise_is_nothing() -> None:
    assert Bench().takes(NOISE_BYTES - 1) == {3: 0}


@pytest.mark.parametrize("counted", [True, False])
def test_what_the_ledger_knows_of_is_not_outside(counted: bool) -> None:
    """A weight was touched: its bytes are in the peak, if the device counts them."""
    bench = Bench()
    mover = bench.residency.mover
    bench.outside.begin_user_code_measure()
    mover.resident_bytes += 20 * MIB
    mover.device_counted_bytes += 20 * MIB * counted
    bench.peak += 5 * MIB + 20 * MIB * counted
    bench.outside.end_user_code_measure()
    assert bench.tracker.outside == {3: 5 * MIB}


def test_what_compiling_takes_does_not_come_again() -> None:
    bench = Bench()
    bench.outside.begin_user_code_measure()
    Program(Schedule("backward", (), ()))
    bench.peak += 500 * MIB
    bench.outside.end_user_code_measure()
    assert bench.tracker.outside == {}
    assert bench.said == []


def test_the_first_step_of_an_optimizer_makes_its_states() -> None:
    bench = Bench("optimizer")
    assert bench.takes(30 * MIB) == {}
    bench.tracker.known = {("a",): object()}
    assert bench.takes(30 * MIB) == {3: 30 * MIB}


def test_bytes_that_are_still_coming_are_counted_already_and_come_later() -> None:
    bench = Bench()
    bench.outside.device.sees_pages = True
    bench.residency.records = {1: SimpleNamespace(state=State.ARRIVING)}
    assert bench.takes(30 * MIB) == {}


def test_an_optimizers_own_stretch_goes_on_when_it_is_done() -> None:
    """It begins before the optimizer, and user code is handed over once more after it."""
    bench = Bench()
    bench.outside.begin_user_code_measure()
    bench.peak += 30 * MIB
    bench.outside.begin_user_code_measure()
    bench.outside.end_user_code_measure()
    assert bench.tracker.outside == {3: 30 * MIB}


def test_steps_that_are_not_measured_are_not_looked_at_but_for_what_was_never_seen() -> None:
    """As in a step that follows the plan of an earlier run from the beginning, whatever arrives meanwhile."""
    bench = Bench()
    bench.tracker.running, bench.tracker.base = None, 17
    bench.residency.records = {1: SimpleNamespace(state=State.ARRIVING)}
    bench.outside.device.sees_pages = True
    assert bench.takes(30 * MIB) == {}, "there is no telling"
    bench.outside.device.sees_pages = False
    assert bench.takes(30 * MIB) == {3: 30 * MIB}
    bench.tracker.expected.outside[3] = bench.tracker.outside.pop(3)
    assert bench.takes(20 * MIB) == {}


def test_what_user_code_keeps_is_seen_once_in_a_step_that_is_not_measured() -> None:
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


def test_a_system_that_does_not_say_is_asked_once() -> None:
    bench = Bench()
    asked = []

    def refuse() -> None:
        asked.append(1)
        raise PermissionError

    bench.outside.device.reset_peak = refuse  # type: ignore[method-assign]
    assert bench.takes(30 * MIB) == bench.takes(30 * MIB) == {}
    assert asked == [1]


def test_what_eager_autograd_keeps_between_two_programs_is_made_room_for() -> None:
    """Without a look at it, the second program runs beside bytes that no one counted."""
    budget, kept = 38 * MIB, 4 * ROWS * WIDTH * SAVED
    runs = []
    for words in ([], ["unseen"]):
        done = forked(tree.SUPPORT / "kept_train.py", str(budget), *words)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    seen, unseen = runs
    assert seen["losses"] == unseen["losses"]
    assert abs(seen["kept"]["1"] - kept) < 2 * MIB, "the program after the break"
    assert max(seen["peaks"][2:]) <= budget
    assert max(unseen["peaks"][2:]) > 1.1 * budget
