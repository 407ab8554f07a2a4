"""Tests of profiles that are made from measured steps."""

from __future__ import annotations

from dataclasses import replace

from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.schedule import MADE, READ, Buffer, Call, Schedule, Slot, Step
from teraio.passes.planner.problem.problem import smallest_budget
from teraio.passes.slots.events import Event, Launch, Make, Signature
from teraio.passes.slots.layout import lay_slots
from teraio.passes.slots.lifetimes import profile_of_steps
from teraio.session.planning import cut_workspaces_to_budget


def test_saved_output_counts_once_at_its_kernel() -> None:
    """Use a weight of 10 bytes, a saved output of 100 bytes and a result of 1 byte.

    Kernel k1 needs the weight and the saved output, 110 bytes. Kernel k2 also needs the result, 111 bytes.
    """
    signature = Signature("forward", (("w", 10),), ("r", "s"), frozenset({1}))
    events: list[Event] = [
        Make(0, "s", 100),
        Launch(1, "k1", frozenset({"w"}), frozenset({"s"})),
        Make(2, "r", 1),
        Launch(3, "k2", frozenset({"s"}), frozenset({"r"})),
    ]
    schedule, _ = lay_slots(signature, events, 4)
    names = tuple(buffer.name if buffer.name != "r" else "" for buffer in schedule.buffers)
    times = tuple(range(len(schedule.slots)))
    live = tuple(slot.live_bytes for slot in schedule.slots)
    call = Call(schedule, names, times, live, (0,) * len(times))
    kinds = (("s", "activation", 100, False), ("w", "weight", 10, True))
    profile = profile_of_steps([Step((call,), len(times), kinds, frozenset())], "toy")
    assert [(k.name, k.workspace_bytes) for k in profile.kernels] == [
        ("enter", 0),
        ("k1", 0),
        ("k2", 1),
        ("exit", 1),
    ]
    assert check_plan_against_profile(Plan("", "none", 2**40), profile).peak_bytes == 111


def test_eager_memory_after_a_program_counts_at_its_last_tick() -> None:
    """Count 30 bytes of eager code beside a weight of 10 bytes, at the last tick of the program.

    If the budget is smaller than 30 bytes, only as many bytes as the budget count.
    """
    schedule, _ = lay_slots(Signature("forward", (("w", 10),), (), frozenset()), [], 0)
    slots = len(schedule.slots)
    call = Call(schedule, ("w",), tuple(range(slots)), (0,) * slots, (0,) * slots)
    kinds = (("w", "weight", 10, True),)
    measured = Step((call,), slots, kinds, frozenset(), (30,))
    profile = profile_of_steps([measured], "toy")
    assert [kernel.workspace_bytes for kernel in profile.kernels] == [0] * (slots - 1) + [30]
    floors = {budget: smallest_budget(cut_workspaces_to_budget(profile, budget)) for budget in (50, 30, 25)}
    assert floors == {50: 30, 30: 30, 25: 25}


def test_gradient_made_by_eager_code_is_written_at_first_use() -> None:
    """Make two profiles of a gradient that only the optimizer reads. The profile format must accept both.

    In the second profile, a program writes the gradient after the optimizer has read it.
    """
    step = Schedule("optimizer", (Buffer("w.grad", "argument", 10),), (Slot("step", (0,), (READ,), 0),))
    backward = Schedule("backward", (Buffer("w.grad", "result", 10),), (Slot("exit", (0,), (MADE,), 0),))
    for schedules, writes in (((step,), (0,)), ((step, step, backward), (0, 1))):
        calls = tuple(Call(s, ("w.grad",), (0,), (0,), (0,)) for s in schedules)
        kinds = (("w.grad", "grad", 10, False),)
        profile = profile_of_steps([Step(calls, 1, kinds, frozenset())], "toy")
        profile.validate()
        assert profile.tensors[0].reads == tuple(range(len([s for s in schedules if s is step])))
        assert profile.tensors[0].writes == writes


def late_step(around: frozenset[str]) -> Step:
    """Return a step in which a late update reads the gradient of the step before, and a backward makes a new
    one.
    """
    gradient = Buffer("w.grad", "argument", 64)
    forward = Schedule(
        "forward",
        (gradient,),
        (Slot("enter", (), (), 0), Slot("update", (0,), (READ,), 0), Slot("exit", (), (), 0)),
    )
    backward = Schedule(
        "backward",
        (Buffer("w.grad", "result", 64),),
        (Slot("enter", (), (), 0), Slot("product", (), (), 0), Slot("exit", (0,), (MADE,), 0)),
    )
    calls = tuple(Call(s, ("w.grad",), (0,) * 3, (0,) * 3, (0,) * 3) for s in (forward, backward))
    return Step(calls, 0, (("w.grad", "grad", 64, False),), frozenset(), (), around)


def test_gradient_of_a_late_update_is_born_in_the_backward() -> None:
    profile = profile_of_steps([late_step(frozenset(["w.grad"]))], "late")
    profile.validate()
    (gradient,) = profile.tensors
    assert (gradient.reads, gradient.writes, gradient.born) == ((1,), (4,), 4)
    assert not gradient.persistent


def test_gradient_that_no_slot_reads_outlives_the_step() -> None:
    step = late_step(frozenset(["w.grad"]))
    calls = (replace(step.calls[0], tensors=("",)), step.calls[1])
    profile = profile_of_steps([replace(step, calls=calls)], "late")
    profile.validate()
    (gradient,) = profile.tensors
    assert (gradient.writes, gradient.born, gradient.persistent) == ((4,), None, True)
