"""Tests of the step tracker, without a model: the tick of each slot, and the end of each step.

A slot is a point in a program before a kernel. A tick is the number of a slot in the whole step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teraio.formats.schedule import ProgramKind, Schedule, Slot
from teraio.runtime.engine import engine
from teraio.runtime.step.program import Program
from teraio.runtime.step.tracker import EXPECTATIONS_MAX, StepTracker


def program(name: str, slots: int = 3, kind: ProgramKind = "forward") -> Program:
    """Return a program with `slots` slots and without tensors."""
    return Program(Schedule(kind, (), tuple(Slot(f"{name}{i}", (), (), 0) for i in range(slots))))


A, B = program("a"), program("b", slots=2)


def run(tracker: StepTracker, *programs: Any) -> list[list[int | None]]:
    """Let the tracker begin one call of each program. Return one list per call: the ticks of the call's
    slots. None stands for a tick that the tracker does not know."""
    ticks = []
    for each in programs:
        tracker.begin_call(each)
        ticks.append([tracker.tick_of_slot(index) for index in range(len(each.schedule.slots))])
    return ticks


def finish(tracker: StepTracker) -> Any:
    return tracker.finish(lambda name: None, frozenset())


def steps_of(tracker: StepTracker, calls: str) -> str:
    """Begin one call per letter of `calls`. Return the letters, with a space wherever the tracker ends a
    step.

    The letters `i` and `j` stand for inference calls, which run without gradients. The letter `t` stands for
    a training call, after which an optimizer steps.
    """
    programs = {each: program(each, kind="forward" if each == "t" else "inference") for each in "ijt"}
    steps = ""
    for each in calls:
        if tracker.is_step_over_before(programs[each], None):
            finish(tracker)
            steps += " "
        tracker.begin_call(programs[each])
        tracker.without_grad |= each != "t"
        tracker.stepped = 7 if each == "t" else None
        steps += each
    return steps


def test_the_first_step_has_no_ticks_and_the_second_has_them_all() -> None:
    tracker = StepTracker()
    assert run(tracker, A, B, A) == [[None] * 3, [None] * 2, [None] * 3]
    step = finish(tracker)
    assert [call.schedule.identity_hash for call in step.calls] == [A.identity, B.identity, A.identity]
    assert run(tracker, A, B, A) == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert tracker.tick_count == 8


def test_another_order_is_followed_from_the_second_time_on() -> None:
    tracker = StepTracker()
    run(tracker, A, B)
    finish(tracker)
    assert run(tracker, A, A, B) == [[0, 1, 2], [None] * 3, [3, 4]]
    finish(tracker)
    assert run(tracker, A, A, B) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_step_longer_than_the_last_has_no_ticks_beyond_it() -> None:
    tracker = StepTracker()
    run(tracker, A)
    finish(tracker)
    assert run(tracker, A, A) == [[0, 1, 2], [None] * 3]


def test_a_call_that_was_abandoned_is_no_part_of_the_step() -> None:
    tracker = StepTracker()
    run(tracker, A)
    tracker.abandon_call()
    run(tracker, A, B)
    assert len(finish(tracker).calls) == 2
    assert run(tracker, A, B) == [[0, 1, 2], [3, 4]]


def test_step_without_calls_is_none() -> None:
    assert finish(StepTracker()) is None


def test_an_optimizer_ends_the_step_and_a_second_one_belongs_to_it() -> None:
    tracker = StepTracker()
    run(tracker, A)
    for name in ("first", "second"):
        run(tracker, program(name, slots=1))
        tracker.stepped = 7
    assert tracker.is_step_over_before(A, None)
    step = finish(tracker)
    assert len(step.calls) == 3
    assert step.end_ns == 7
    assert not tracker.is_step_over_before(A, None)


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_step_without_any_optimizer_ends_when_its_first_call_repeats(has_optimizer: bool) -> None:
    tracker = StepTracker()
    if has_optimizer:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    else:  # another test may have left an optimizer
        tracker.has_optimizer = False
    forward, backward = program("f", kind="forward"), program("b", kind="backward")
    head, evaluation = program("h", kind="forward"), program("e", kind="inference")
    for each in (forward, head, backward):
        assert not tracker.is_step_over_before(each, None)
        tracker.begin_call(each)
    for each, over in ((forward, True), (evaluation, True), (head, False), (backward, False)):
        assert tracker.is_step_over_before(each, None) is (over and not has_optimizer)
    tracker.note_end_without_optimizer(7)
    assert tracker.is_step_over_before(head, None)
    if has_optimizer:
        del optimizer


def test_inference_step_ends_when_its_first_call_repeats() -> None:
    tracker = StepTracker()
    block = program("block", kind="inference")
    for mark in ("layer 0", "layer 1"):
        assert not tracker.is_step_over_before(block, mark)
        tracker.begin_call(block, mark)
    assert tracker.is_step_over_before(block, "layer 0")
    assert len(finish(tracker).calls) == 2


@pytest.mark.parametrize(
    "steps",
    [
        "i t it it it",  # A teacher model runs inference before each training call.
        "ij t ijt ijt",  # A teacher model of two programs runs before each training call.
        "t t i i i t t t i i i t",  # Each evaluation runs three batches.
        # The first two evaluations have one batch each. The tracker takes the second evaluation for inference
        # by a teacher model.
        "t i t it t t i i i t t",
        "i t it i i it t t i t it",  # A teacher model and evaluations run between the training calls.
    ],
)
def test_inference_once_before_each_training_step_is_part_of_the_step(steps: str) -> None:
    assert steps_of(StepTracker(), steps.replace(" ", "")) == steps


def test_an_evaluation_in_the_middle_does_not_advance_the_step() -> None:
    tracker = StepTracker()
    other = program("evaluation", kind="inference")
    run(tracker, A, B)
    finish(tracker)
    assert run(tracker, A, other, B) == [[0, 1, 2], [None] * 3, [3, 4]]


def test_two_orders_of_programs_are_both_known() -> None:
    tracker = StepTracker()
    for order in ((A, B), (B, A), (A, B)):
        run(tracker, *order)
        finish(tracker)
    assert run(tracker, B, A) == [[0, 1], [2, 3, 4]]
    finish(tracker)
    assert run(tracker, A, B) == [[0, 1, 2], [3, 4]]


def test_settled_step_is_not_measured() -> None:
    tracker = StepTracker()
    run(tracker, A, B)
    assert finish(tracker) is not None
    tracker.expected.settled = True
    run(tracker, A, B)
    assert finish(tracker) is None
    run(tracker, B, A)
    assert finish(tracker) is None, "its first call was not measured"
    run(tracker, B, A)
    assert finish(tracker) is not None


def test_step_that_never_ends_is_forgotten() -> None:
    """No optimizer steps after these forwards, so the step never ends. The tracker still keeps at most
    `CALLS_MAX` calls."""
    loop = SimpleNamespace(
        tracker=StepTracker(),
        unresizable=SimpleNamespace(detect_and_adopt_newly_unresizable=lambda: None),
        registry=SimpleNamespace(forget_names_of_step=lambda: None),
        gradients=SimpleNamespace(begin_call=lambda program: None),
        update_expected_uses=lambda: None,
        user=SimpleNamespace(
            eager_memory=SimpleNamespace(end_user_code_measure=lambda: None, reserve_kept_bytes=lambda: None),
            end_step=frozenset,
        ),
    )
    for _ in range(2 * engine.CALLS_MAX + 10):
        engine.Engine._begin_call(loop, A, ())  # type: ignore[arg-type]
        assert len(loop.tracker.calls) <= engine.CALLS_MAX


def test_tracker_keeps_only_the_most_recent_orders() -> None:
    tracker = StepTracker()
    for calls in range(1, EXPECTATIONS_MAX + 3):
        run(tracker, *[A] * calls)
        finish(tracker)
    assert [len(order) for order in tracker.known] == [*range(3, EXPECTATIONS_MAX + 3)]
