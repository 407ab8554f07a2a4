"""Tests of the layout of slots in a program, for any program.

Every slot is before the allocations of its kernel. The slot gets the tensors that the kernel uses, under
names that are alive at the slot. The slot counts all bytes that are alive until the kernel runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from slots_checker import check, launch, lay, signature

from teraio.formats.schedule import MADE, READ, RETURNED, WRITE, Schedule
from teraio.passes.slots import layout as slots
from teraio.passes.slots.events import Alias, Event, Forget, Make, Signature
from teraio.passes.slots.layout import SlotPlace, live_bytes_per_launch, schedule_as_one_kernel
from teraio.runtime.step.program import Program

# ---- layouts compared with layouts by hand


def test_slot_is_before_allocations_of_its_kernel() -> None:
    events: list[Event] = [Make(3, "a", 8), Make(4, "b", 16), launch(5, "mm", "w", "a b")]
    schedule, places = lay(signature("a"), events)
    assert [(slot.kernel, place.at) for slot, place in zip(schedule.slots, places)] == [
        ("enter", 0),
        ("mm", 3),
        ("exit", 6),
    ]
    assert schedule.slots[1].live_bytes == 24
    check(signature("a"), events, (schedule, places))


def test_output_read_by_next_kernel_is_made_and_read_at_one_slot() -> None:
    events: list[Event] = [
        Make(0, "a", 8),
        launch(1, "first", "w", "a"),
        Make(2, "b", 8),
        launch(3, "second", "a", "b"),
        Forget(4, "b"),
    ]
    about = signature("a", saved=[0])
    schedule, places = lay(about, events)
    second = schedule.slots[2]
    assert [schedule.buffers[buffer].name for buffer in second.buffers] == ["a"]
    assert second.flags == (MADE | READ,)
    check(about, events, (schedule, places))


def test_storage_renamed_after_the_slot_is_passed_under_its_name_at_the_slot() -> None:
    events: list[Event] = [
        Make(0, "a", 8),
        launch(1, "first", "w", "a"),
        Make(2, "other", 8),
        Alias(3, "b", "a"),
        Forget(3, "a"),
        launch(4, "second", "b", "b other"),
    ]
    about = signature("b")
    schedule, places = lay(about, events)
    assert places[2].names == ("a",) and places[3].names == ("b",)
    check(about, events, (schedule, places))


def test_storage_freed_between_slot_and_kernel_counts_as_live() -> None:
    events: list[Event] = [
        Make(0, "a", 8),
        launch(1, "first", "w", "a"),
        Make(2, "b", 16),
        Forget(3, "a"),
        launch(4, "second", "b", "b"),
        launch(5, "third", "b"),
    ]
    schedule, _ = lay(signature(), events)
    assert [slot.live_bytes for slot in schedule.slots] == [0, 8, 24, 16, 16]
    assert [slot.older_bytes for slot in schedule.slots] == [0, 0, 8, 16, 16]


def test_saved_storage_that_the_user_sees_is_a_result() -> None:
    events: list[Event] = [Make(0, "a", 8), launch(0, "k", "", "a"), Alias(1, "view", "a")]
    schedule, _ = lay(signature("a view", saved=[1]), events)
    assert [buffer.role for buffer in schedule.buffers] == ["argument", "result"]


def test_returned_argument_keeps_role_argument() -> None:
    schedule, _ = lay(signature("v", saved=[0]), [Alias(0, "v", "w"), launch(0, "k", "v", "v")])
    assert [buffer.role for buffer in schedule.buffers] == ["argument"]
    assert schedule.slots[1].flags == (READ | WRITE,)


def test_tuple_element_is_passed_once_it_has_a_variable() -> None:
    events: list[Event] = [
        Make(0, "t.0", 8),
        launch(0, "split", "w", "t.0"),
        launch(1, "between", "w"),
        Alias(2, "a", "t.0"),
        Forget(3, "t.0"),
        launch(4, "after", "a"),
    ]
    about = signature("a", saved=[0])
    schedule, places = lay(about, events)
    assert [place.names for place in places] == [("w",), ("w",), ("w",), ("a",), ("a",)]
    check(about, events, (schedule, places))


def test_results_of_forward_count_again_at_exit() -> None:
    schedule, _ = lay(signature("a"), [Make(0, "a", 8), launch(0, "k", "", "a")])
    # Autograd may make a zero gradient of 8 bytes for the result.
    assert schedule.slots[-1].live_bytes == 8


def test_sizes_of_symbols_add_up_to_one_expression() -> None:
    class Term:
        """A number that can be added like a symbolic expression.

        A test compares the text of the sum with the expected text.
        """

        def __init__(self, text: str) -> None:
            self.text = text

        def __add__(self, other: Any) -> Term:
            return Term(f"{self.text}+{getattr(other, 'text', other)}")

        def __radd__(self, other: Any) -> Term:
            return Term(f"{other}+{self.text}")

    events: list[Event] = [Make(0, "a", 8, Term("s*4")), Make(1, "b", 16), launch(2, "k", "w", "a b")]
    schedule, places = lay(signature(), events)
    assert schedule.symbolic
    assert places[1].live.text == "0+s*4+16"
    assert schedule.slots[1].live_bytes == 24
    (own,) = live_bytes_per_launch(events)
    assert (own.size_bytes, own.size.text) == (24, "0+s*4+16")


def test_live_bytes_per_launch_exclude_kept_outputs() -> None:
    events: list[Event] = [
        Make(0, "a", 8),
        launch(1, "first", "w", "a"),
        Make(2, "b", 16),
        launch(3, "second", "a", "b"),
        Forget(4, "a"),
        launch(5, "third", "b"),
    ]
    assert [made.size_bytes for made in live_bytes_per_launch(events)] == [8, 24, 16]
    assert [made.size_bytes for made in live_bytes_per_launch(events, ["b"])] == [8, 8, 0]


def test_argument_reused_for_a_gradient_is_flagged_returned() -> None:
    """Lay out slots for Inductor's lines `buf3 = mm; del mm  # reuse`, where the program returns buf3."""
    events: list[Event] = [Alias(0, "buf3", "mm"), Forget(0, "mm"), launch(1, "mul", "buf3", "buf3")]
    about = replace(signature("buf3", arguments="w mm"), kind="backward")
    schedule, places = lay(about, events)
    returned = schedule.slots[-1]
    assert [schedule.buffers[buffer].name for buffer in returned.buffers] == ["mm"]
    assert returned.flags == (READ | RETURNED,)
    assert places[-1].names == ("buf3",)
    assert Program(schedule).stops[-1].returned == returned.buffers


def test_weight_saved_for_backward_is_not_flagged_returned() -> None:
    schedule, _ = lay(signature("w", saved=(0,)), [launch(0, "mm", "w", "")])
    assert schedule.slots[-1].buffers == ()


def test_unreadable_program_needs_every_argument_and_evicts_no_output() -> None:
    about = signature("a w", saved=[0], arguments="w x")
    schedule, places = schedule_as_one_kernel(about, "program", Make(0, "own", 50), 9, [("a", 8), ("w", 100)])
    assert [place.at for place in places] == [0, 0, 9]
    assert [slot.live_bytes for slot in schedule.slots] == [0, 50, 8]
    assert schedule.slots[1].flags == (READ | WRITE,) * 2
    assert [(buffer.name, buffer.role) for buffer in schedule.buffers] == [
        ("w", "argument"),
        ("x", "argument"),
        ("a", "result"),
    ]


# ---- random programs


class Generator:
    """A generator of random programs. Their events are in any order in which a compiler could print them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.at = 0
        self.count = 0
        self.arguments = tuple(
            (f"w{n}", 10 ** self.choose.randrange(4)) for n in range(self.choose.randrange(4))
        )
        self.names: dict[str, str] = {name: name for name, _ in self.arguments}  # storage by name
        self.named = set(self.names)  # storages that have had a variable name

    def name(self) -> str:
        self.count += 1
        return f"b{self.count}" if self.choose.random() < 0.8 else f"b{self.count}.0"

    def call(self, name: str, storage: str) -> None:
        self.names[name] = storage
        if name.isidentifier():
            self.named.add(storage)

    def events(self) -> Iterator[Event]:
        for _ in range(self.choose.randrange(1, 25)):
            kind = self.choose.random()
            if kind < 0.3 or not self.names:
                yield self.make()
            elif kind < 0.5:
                yield from self.alias()
            elif kind < 0.65:
                name = self.choose.choice(sorted(self.names))
                del self.names[name]
                yield Forget(self.at, name)
            else:
                yield launch(self.at, f"k{self.at}", " ".join(self.some()), " ".join(self.some()))
            self.at += self.choose.random() < 0.7

    def make(self) -> Make:
        name = self.name()
        self.call(name, name)
        return Make(self.at, name, 10 ** self.choose.randrange(5))

    def alias(self) -> Iterator[Event]:
        """Yield an alias of a live name.

        Yield nothing for an element of a tuple whose storage already had a variable.
        """
        old, new = self.choose.choice(sorted(self.names)), self.name()
        root = self.names[old]
        if not old.isidentifier() and root in self.named:
            return
        self.call(new, root)
        yield Alias(self.at, new, old)
        if self.choose.random() < 0.5:
            del self.names[old]
            yield Forget(self.at, old)

    def some(self) -> list[str]:
        names = sorted(name for name in self.names if name.isidentifier())
        return self.choose.sample(names, self.choose.randrange(min(4, len(names) + 1)))

    def program(self) -> tuple[Signature, list[Event]]:
        events = list(self.events())
        kept = [name for name in sorted(self.names) if name.isidentifier()]
        outputs = self.choose.choices(kept, k=self.choose.randrange(4)) if kept else []
        saved = frozenset(n for n in range(len(outputs)) if self.choose.random() < 0.6)
        kind: Any = self.choose.choice(["forward", "backward", "inference"])
        return Signature(kind, self.arguments, tuple(outputs), saved), events


SEEDS = range(3000)


def test_generated_programs_pass_the_checker() -> None:
    for seed in SEEDS:
        about, events = Generator(seed).program()
        try:
            check(about, events)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# ---- planted bugs: the checker finds each of them in the random programs


def late(schedule: Schedule, places: list[SlotPlace]) -> tuple[Schedule, list[SlotPlace]]:
    """Plant a bug: move each slot after the allocations of its kernel."""
    return schedule, [replace(place, at=place.at + 1) for place in places]


def only_made(schedule: Schedule, places: list[SlotPlace]) -> tuple[Schedule, list[SlotPlace]]:
    """Plant a bug: remove all flags except MADE from the outputs that are made at a slot."""
    changed = [replace(s, flags=tuple(f & MADE or f for f in s.flags)) for s in schedule.slots]
    return replace(schedule, slots=tuple(changed)), places


def forget_bytes(schedule: Schedule, places: list[SlotPlace]) -> tuple[Schedule, list[SlotPlace]]:
    changed = [replace(slot, live_bytes=slot.live_bytes - 1) for slot in schedule.slots]
    return replace(schedule, slots=tuple(changed)), places


def call_all_bytes_older(schedule: Schedule, places: list[SlotPlace]) -> tuple[Schedule, list[SlotPlace]]:
    changed = [replace(slot, older_bytes=slot.live_bytes) for slot in schedule.slots]
    return replace(schedule, slots=tuple(changed)), places


@pytest.mark.parametrize("bug", [late, only_made, forget_bytes, call_all_bytes_older])
def test_checker_finds_wrong_schedule(bug: Callable[..., tuple[Schedule, list[SlotPlace]]]) -> None:
    assert found(lambda about, events: bug(*lay(about, events)))


@pytest.mark.parametrize(
    ("where", "bug"),
    [
        # Bug: the slot gets the names that a storage has at the kernel. A reuse between the slot and the
        # kernel may have changed these names.
        ("variables_at_mark", lambda self, root: self._live_variables_of_storage(root)),
        # Bug: the slot gets a name that the program has already deleted.
        (
            "_live_variables_of_storage",
            lambda self, root: tuple(n for n, r in self.root.items() if r == root and n.isidentifier()),
        ),
        # Bug: a storage counts as freed when the first of its names is deleted.
        (
            "remove_name",
            lambda self, name: self.root.get(name) if self.alive.pop(self.root.get(name), None) else None,
        ),
        # Bug: an alias counts as a new storage.
        ("add_alias", lambda self, new, old: self.add_storage(new)),
    ],
)
def test_checker_finds_wrong_names(
    where: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots._Names, where, bug)
    assert found(lay)


def forget_at_once(layout: slots._Layout, event: Event) -> None:
    """Plant a bug: a slot's bytes exclude storages that are freed between the slot and its kernel."""
    if isinstance(event, Forget):
        layout.live.pop(layout.names.remove_name(event.name) or "", None)
    else:
        ADD(layout, event)


def stand_at_the_last_allocation(layout: slots._Layout, at: int) -> None:
    layout.before = at
    layout.names.mark_current_names()


def hand_over_nothing(layout: slots._Layout, at: int) -> None:
    layout._append_slot(at, "exit", {})


ADD = slots._Layout.apply_event


@pytest.mark.parametrize(
    ("where", "bug"),
    [
        ("apply_event", forget_at_once),
        ("_set_next_slot_position", stand_at_the_last_allocation),
        ("lay_exit_slot", hand_over_nothing),
    ],
)
def test_checker_finds_wrong_layout(
    where: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots._Layout, where, bug)
    assert found(lay)


def found(layer: Callable[[Signature, Sequence[Event]], tuple[Schedule, list[SlotPlace]]]) -> bool:
    """Return True if the checker refuses the layout of at least one random program."""
    for seed in SEEDS:
        about, events = Generator(seed).program()
        try:
            check(about, events, layer(about, events))
        except (AssertionError, KeyError, IndexError):
            return True
    return False
