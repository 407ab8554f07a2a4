"""Checks of a rank against the other ranks: versions, options, collectives, and durations of collectives."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from teraio.errors import UnsupportedError
from teraio.formats.profile import Kernel, Profile
from teraio.formats.schedule import Schedule
from teraio.options import Settings
from teraio.passes.slots.events import Event, Launch, Make, Signature
from teraio.passes.slots.layout import lay_slots
from teraio.ranks import agreement, collective_times
from teraio.ranks.agreement import Agreement
from teraio.ranks.collective_times import least_durations
from teraio.ranks.rank_store import TEXT_MAX_BYTES, RankStore
from teraio.session.collective_waits import waited_for_ranks_ns, with_least_durations
from teraio.session.rank_checks import RankChecks, compared_options
from teraio.session.recomputation import Recomputation

GATHER, REDUCE = "all_gather_into_tensor(2) 1024", "reduce_scatter_tensor(avg, 2) 512"
FORWARD = Schedule("forward", (), (), graph="g", collectives=(GATHER, REDUCE))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[RankStore]:
    monkeypatch.setattr(agreement, "_SESSIONS", itertools.repeat(0))
    shared = torch.distributed.HashStore()
    return [RankStore(shared, rank, 2) for rank in range(2)]


def agreements(stores: list[RankStore], *options: dict[str, Any]) -> list[Agreement]:
    """Return the agreement of each rank, all in the same session."""
    compared = [compared_options(Settings.parse(given, {})) for given in options]
    return [Agreement(store, each) for store, each in zip(stores, compared)]


def test_ranks_with_other_program_options_are_named(stores: list[RankStore]) -> None:
    first, other = agreements(stores, {"inner": "inductor"}, {"inner": "eager", "updates": "late"})
    first.check_options()
    with pytest.raises(UnsupportedError) as raised:
        other.check_options()
    text = str(raised.value)
    assert text.startswith("rank 1 uses inner='eager', updates='late', rank 0 uses inner='inductor', updates")
    assert "Give all ranks the same versions" in text
    first.check_options()


def test_other_version_is_named(stores: list[RankStore]) -> None:
    first, other = agreements(stores, {}, {})
    first.check_options()
    other.options[1] = "torch=1.0"
    with pytest.raises(UnsupportedError, match=r"rank 1 uses torch=1\.0, rank 0 uses torch="):
        other.check_options()


def test_memory_store_and_plans_may_differ(stores: list[RankStore]) -> None:
    legal = {"memory": "1GiB", "store": "/x", "store_size": "1GiB", "plan": "p", "planner": "greedy"}
    for each in agreements(stores, {}, {**legal, "checksum": "off", "keep": "w"}):
        each.check_options()


def test_foreign_text_and_broken_store_are_no_difference(stores: list[RankStore]) -> None:
    first, other = agreements(stores, {}, {"inner": "eager"})
    stores[0].publish("options 0", "no rank\ninner='x'")
    other.check_options()
    stores[0].publish("options 0", "x" * (TEXT_MAX_BYTES + 1))
    other.check_options()

    class Broken:
        def compare_set(self, *given: object) -> bytes:
            raise torch.distributed.DistStoreError("the server has ended")

    first.store = RankStore(Broken(), 0, 2)
    first.check_options()


def test_other_order_of_collectives_is_named(stores: list[RankStore]) -> None:
    first, other = agreements(stores, {}, {})
    first.check_collectives("forward", "g", (GATHER, REDUCE))
    first.check_collectives("forward", "g", (REDUCE,))  # this rank itself has changed its settings
    with pytest.raises(UnsupportedError, match=r"rank 1 and rank 0 .* is none of these on rank 1"):
        other.check_collectives("forward", "g", (GATHER,))
    other.check_collectives("backward", "g", (GATHER,))
    other.check_collectives("forward", "another graph", (REDUCE, GATHER))
    other.check_collectives("inference", "", (REDUCE,))


def test_long_order_of_collectives_is_compared_by_its_hash(stores: list[RankStore]) -> None:
    first, other, same = agreements([*stores, stores[1]], {}, {}, {})
    many = [f"{GATHER}{number}" for number in range(5000)]
    first.check_collectives("forward", "g", many)
    same.check_collectives("forward", "g", many)
    with pytest.raises(UnsupportedError, match="5000 collectives with hash"):
        other.check_collectives("forward", "g", many[::-1])


def test_later_session_is_not_compared_with_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, stores: list[RankStore]
) -> None:
    (first,) = agreements(stores, {})
    first.check_options()
    monkeypatch.setattr(agreement, "_SESSIONS", itertools.repeat(1))
    Agreement(stores[1], {"inner": "eager"}).check_options()


def checks(monkeypatch: pytest.MonkeyPatch, store: RankStore | None, **options: Any) -> RankChecks:
    monkeypatch.setattr(RankStore, "of_process", staticmethod(lambda: store))
    return RankChecks(Settings.parse(options, {}))


def recomputation() -> Recomputation:
    return Recomputation(None, lambda graph: None, wanted=True)


def test_recompute_is_off_where_ranks_could_choose_differently(
    monkeypatch: pytest.MonkeyPatch, stores: list[RankStore], caplog: pytest.LogCaptureFixture
) -> None:
    ours = checks(monkeypatch, stores[0], recompute="auto")
    wanted = recomputation()
    ours.check_program(replace(FORWARD, collectives=()), wanted)
    early = checks(monkeypatch, None, recompute="auto")
    early.check_program(FORWARD, wanted)
    assert wanted.wanted
    monkeypatch.setattr(RankStore, "of_process", staticmethod(lambda: stores[0]))
    early.check_program(replace(FORWARD, collectives=()), wanted)
    assert early.agreement is None
    early.check_program(FORWARD, recomputation())
    assert early.agreement is not None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "teraio"):
        ours.check_program(FORWARD, wanted)
        ours.check_program(replace(FORWARD, kind="backward"), wanted)
    assert not wanted.wanted
    assert [record.getMessage()[:45] for record in caplog.records] == [
        "teraio: option 'recompute' is 'auto', and a p"
    ]
    strict = checks(monkeypatch, stores[0], recompute="auto", on_fallback="error")
    with pytest.raises(UnsupportedError, match="Nothing is recomputed"):
        strict.check_program(FORWARD, recomputation())


def test_schedule_lists_collectives_with_sizes() -> None:
    text = "all_gather_into_tensor(2)"
    events: list[Event] = [
        Make(0, "b", 16),
        Launch(1, "gather", frozenset("a"), frozenset("b"), begins=frozenset("b"), collective=text),
        Launch(2, "wait", frozenset("b"), frozenset("b"), awaits=frozenset("b")),
    ]
    schedule, _ = lay_slots(Signature("forward", (("a", 8),), ("b",), frozenset()), events, 3)
    assert schedule.collectives == (f"{text} 16",)
    assert Schedule.parse(schedule.as_json_text) == schedule


# ---- durations


def test_least_durations_of_all_ranks(stores: list[RankStore]) -> None:
    assert least_durations(stores[0], "step", [5, 70, 9], 0.0) == [5, 70, 9]
    assert least_durations(stores[1], "step", [50, 7, 9], 0.0) == [5, 7, 9]
    assert least_durations(stores[0], "step", [5, 70, 9], 0.0) == [5, 7, 9]
    assert least_durations(stores[0], "another step", [4], 0.0) == [4]


INVALID = ["1 2", "1 2 3 4", "1 2 x", "1 2 -3", "1  2 3", "1 2 \u0663", f"1 2 {2**53}"]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_durations_do_not_count(stores: list[RankStore], text: str) -> None:
    stores[1].publish("durations step/1/0", text)
    assert least_durations(stores[0], "step", [9, 9, 9], 0.0) == [9, 9, 9]


def test_many_durations_take_several_texts(monkeypatch: pytest.MonkeyPatch, stores: list[RankStore]) -> None:
    monkeypatch.setattr(collective_times, "PIECE", 2)
    assert least_durations(stores[0], "step", [1, 9, 1, 9, 1], 0.0) == [1, 9, 1, 9, 1]
    assert least_durations(stores[1], "step", [9, 1, 9, 1, 9], 0.0) == [1, 1, 1, 1, 1]
    stores[0].remove("durations step/0/1")
    assert least_durations(stores[1], "step", [9, 1, 9, 1, 9], 0.0) == [9, 1, 9, 1, 9]


def test_profile_gets_least_durations_of_its_collectives(
    monkeypatch: pytest.MonkeyPatch, stores: list[RankStore]
) -> None:
    names = ("mm", "all_gather_into_tensor_1", "wait_tensor")
    profile = Profile("run", 60, tuple(Kernel(name, 0, 20) for name in names), ())
    fast = replace(profile, kernels=tuple(replace(kernel, duration_ns=5) for kernel in profile.kernels))
    monkeypatch.setattr(RankStore, "of_process", staticmethod(lambda: None))
    assert with_least_durations(profile) is profile
    monkeypatch.setattr(least_durations, "__defaults__", (0.0,))
    for store, given in ((stores[0], fast), (stores[1], profile)):
        monkeypatch.setattr(RankStore, "of_process", staticmethod(lambda store=store: store))
        found = with_least_durations(given)
    assert [kernel.duration_ns for kernel in found.kernels] == [20, 5, 5] and found.step_ns == 30
    assert waited_for_ranks_ns(profile) == 30
