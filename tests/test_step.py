"""Which call of the step is this: promises of the tracker, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from teraio.runtime import engine
from teraio.runtime.step import StepTracker
from teraio.schedule import Schedule, Slot


def program(name: str, slots: int = 3) -> Any:
    """What the tracker looks at, of a program of so many slots."""
    schedule = Schedule("forward", (), tuple(Slot(f"{name}{i}", (), (), 0) for i in range(slots)))
    return SimpleNamespace(schedule=schedule, identity=schedule.identity, bound=[])


A, B = program("a"), program("b", slots=2)


def run(tracker: StepTracker, *programs: Any) -> list[list[int | None]]:
    """The ticks at the slots of these calls."""
    ticks = []
    for each in programs:
        tracker.enter(each)
        ticks.append([tracker.tick(index) for index in range(len(each.schedule.slots))])
    return ticks


def finish(tracker: StepTracker) -> Any:
    return tracker.finish(lambda name: None, frozenset())


def test_the_first_step_has_no_ticks_and_the_second_has_them_all() -> None:
    tracker = StepTracker()
    assert run(tracker, A, B, A) == [[None] * 3, [None] * 2, [None] * 3]
    step = finish(tracker)
    assert [call.schedule.identity for call in step.calls] == [A.identity, B.identity, A.identity]
    assert run(tracker, A, B, A) == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert tracker.length == 8


def test_another_program_ends_the_ticks_until_the_step_ends() -> None:
    tracker = StepTracker()
    run(tracker, A, B)
    finish(tracker)
    assert run(tracker, A, A, B) == [[0, 1, 2], [None] * 3, [None] * 2]
    finish(tracker)
    assert run(tracker, A, A, B)[2] == [6, 7]


def test_a_step_longer_than_the_last_has_no_ticks_beyond_it() -> None:
    tracker = StepTracker()
    run(tracker, A)
    finish(tracker)
    assert run(tracker, A, A) == [[0, 1, 2], [None] * 3]


def test_a_call_that_was_abandoned_is_no_part_of_the_step() -> None:
    tracker = StepTracker()
    run(tracker, A)
    tracker.abandon()
    run(tracker, A, B)
    assert len(finish(tracker).calls) == 2
    assert run(tracker, A, B) == [[0, 1, 2], [3, 4]]


def test_nothing_that_ran_is_no_step() -> None:
    assert finish(StepTracker()) is None


def test_what_is_kept_per_call_is_bounded() -> None:
    """Inference never comes to an optimizer."""
    loop = SimpleNamespace(
        tracker=StepTracker(),
        stuck=SimpleNamespace(look=lambda: None),
        _forget_names=lambda: None,
    )
    for _ in range(2 * engine.CALLS_MAX + 10):
        engine.Engine._enter(loop, A)  # type: ignore[arg-type]
        assert len(loop.tracker.calls) <= engine.CALLS_MAX
