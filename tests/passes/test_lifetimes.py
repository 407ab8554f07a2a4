"""Tests of profiles that are made from measured steps."""

from __future__ import annotations

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
