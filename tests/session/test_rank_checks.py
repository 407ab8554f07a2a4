"""Checks of a rank against the other ranks: versions, options, collectives, and durations of collectives."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from teraio.errors import UnsupportedError
from teraio.formats.profile import Kernel, Profile
from teraio.formats.profile import Tensor as ProfiledTensor
from teraio.formats.schedule import Schedule
from teraio.options import Settings
from teraio.passes.slots.events import Event, Launch, Make, Signature
from teraio.passes.slots.layout import lay_slots
from teraio.ranks import agreement, collective_times
from teraio.ranks.agreement import Agreement
from teraio.ranks.collective_times import least_durations, remove_durations
from teraio.ranks.rank_store import TEXT_MAX_BYTES, RankStore
from teraio.session import collective_waits
from teraio.session.collective_waits import CollectiveWaits
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
    assert least_durations(stores[0], "step", [5, 70, 9], 0.0) == ([5, 70, 9], False)
    assert least_durations(stores[1], "step", [50, 7, 9], 0.0) == ([5, 7, 9], True)
    assert least_durations(stores[0], "step", [5, 70, 9], 0.0) == ([5, 7, 9], True)
    assert least_durations(stores[0], "another step", [4], 0.0) == ([4], False)


INVALID = ["1 2", "1 2 3 4", "1 2 x", "1 2 -3", "1  2 3", "1 2 \u0663", f"1 2 {2**53}"]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_durations_do_not_count(stores: list[RankStore], text: str) -> None:
    stores[1].publish("durations step/1/0", text)
    assert least_durations(stores[0], "step", [9, 9, 9], 0.0)[0] == [9, 9, 9]


def test_many_durations_take_several_texts(monkeypatch: pytest.MonkeyPatch, stores: list[RankStore]) -> None:
    monkeypatch.setattr(collective_times, "PIECE", 2)
    assert least_durations(stores[0], "step", [1, 9, 1, 9, 1], 0.0)[0] == [1, 9, 1, 9, 1]
    assert least_durations(stores[1], "step", [9, 1, 9, 1, 9], 0.0)[0] == [1, 1, 1, 1, 1]
    stores[0].remove("durations step/0/1")
    assert least_durations(stores[1], "step", [9, 1, 9, 1, 9], 0.0)[0] == [9, 1, 9, 1, 9]
    remove_durations(stores[1], "step", 5)
    assert not any(stores[0].read(f"durations step/1/{piece}") for piece in range(3))


FIRST_S, LATER_S = 0.02, 0.01


class Rank:
    """A rank that measures a step of three kernels, with its durations and with the sizes of its shards."""

    kernels = ("mm", "all_gather_into_tensor_1", "wait_tensor")

    def __init__(self, store: RankStore, duration_ns: int, shard_bytes: int) -> None:
        engine: Any = SimpleNamespace(meter=SimpleNamespace(begun=3))
        self.store, self.engine, self.waits = store, engine, CollectiveWaits(engine)
        shard = ProfiledTensor("w", "weight", shard_bytes, True, (1,), ())
        kernels = tuple(Kernel(name, 0, duration_ns) for name in self.kernels)
        self.profile = Profile("run", 3 * duration_ns, kernels, (shard,))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Use the store of this rank, and short limits, in the `with` block."""
        with (
            patch.object(RankStore, "of_process", staticmethod(lambda: self.store)),
            patch.object(collective_waits, "LIMIT_S", FIRST_S),
            patch.object(collective_waits, "LATER_LIMIT_S", LATER_S),
        ):
            yield

    def profile_with_least_durations(self) -> Profile:
        with self.running():
            return self.waits.with_least_durations(self.profile)


@pytest.fixture
def two_ranks(stores: list[RankStore]) -> tuple[Rank, Rank]:
    """Return a fast and a slow rank. Their shards are uneven."""
    return Rank(stores[0], 5, 100), Rank(stores[1], 20, 96)


def durations(profile: Profile) -> list[int]:
    return [kernel.duration_ns for kernel in profile.kernels]


def test_profile_gets_least_durations_of_its_collectives(two_ranks: tuple[Rank, Rank]) -> None:
    fast, slow = two_ranks
    assert durations(fast.profile_with_least_durations()) == [5, 5, 5]
    found = slow.profile_with_least_durations()
    assert durations(found) == [20, 5, 5] and found.step_ns == 30
    with slow.running():
        assert slow.waits.waited_for_ranks_ns(slow.profile) == 30


def test_profile_of_a_single_rank_does_not_change(two_ranks: tuple[Rank, Rank]) -> None:
    fast, _ = two_ranks
    fast.store = None  # type: ignore[assignment]
    assert fast.profile_with_least_durations() is fast.profile


def test_durations_of_another_step_do_not_count(two_ranks: tuple[Rank, Rank]) -> None:
    fast, slow = two_ranks
    fast.profile_with_least_durations()
    slow.engine.meter.begun += 1
    assert durations(slow.profile_with_least_durations()) == [20, 20, 20]


def test_rank_waits_only_once_for_ranks_that_measure_other_steps(two_ranks: tuple[Rank, Rank]) -> None:
    fast, slow = two_ranks
    limits_s: list[float] = []
    wait_for = RankStore.wait_for

    def note_limit(self: RankStore, keys: Sequence[str], limit_s: float) -> bool:
        limits_s.append(limit_s)
        return wait_for(self, keys, 0.0)

    with patch.object(RankStore, "wait_for", note_limit):
        for step in (3, 4, 5):
            fast.engine.meter.begun = step
            fast.profile_with_least_durations()
    assert limits_s == [FIRST_S, LATER_S, LATER_S]
    slow.engine.meter.begun = 5
    assert durations(slow.profile_with_least_durations()) == [20, 5, 5]


def test_rank_keeps_only_the_durations_of_its_last_step(two_ranks: tuple[Rank, Rank]) -> None:
    fast, slow = two_ranks
    fast.profile_with_least_durations()
    fast.engine.meter.begun += 1
    fast.profile_with_least_durations()
    assert durations(slow.profile_with_least_durations()) == [20, 20, 20]
