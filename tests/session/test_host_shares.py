"""Ranks of one host: what belongs to each of them, and how they measure their drives together."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teraio.options import Settings
from teraio.ranks import host_share, rank_store
from teraio.ranks.host_share import Meeting, directories_of_rank, drives_from_text, text_of_drives
from teraio.ranks.rank_store import RankStore
from teraio.runtime.device.link_rates import LinkRates
from teraio.session import host_shares, tiers

DRIVE = 7
NUMBERS = (400, 800, 200, 400, 50_000, 80_000)  # of one drive that a rank measures: rates, latencies
SLOWER = (200, 400, 100, 200, 60_000, 70_000)
DEVICE: Any = SimpleNamespace(kind="cpu", device=torch.device("cpu"), default_budget_bytes=lambda: 1000)
GPU: Any = SimpleNamespace(kind="cuda", default_budget_bytes=lambda: 1000)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(tiers, "_KNOWN", {})
    monkeypatch.setattr(tiers, "_SHARES", {})
    monkeypatch.setattr(host_share, "_NUMBERS", itertools.count())
    tiers._warn_of_measuring_alone.cache_clear()
    yield
    tiers._warn_of_measuring_alone.cache_clear()


def settings(**options: object) -> Settings:
    return Settings.parse(options, {})


@pytest.mark.parametrize(
    ("drives", "ranks", "own", "sharers"),
    [
        ([1], 1, [[0]], 1),
        ([1, 2], 1, [[0, 1]], 1),
        ([1, 2, 3, 4], 2, [[0, 2], [1, 3]], 1),
        ([1, 1, 2, 2], 2, [[0, 1], [2, 3]], 1),
        ([1, 2], 4, [[0], [1], [0], [1]], 2),
        ([1], 3, [[0], [0], [0]], 3),
        ([1, 2, 3], 2, [[0, 1, 2], [0, 1, 2]], 2),
    ],
)
def test_drives_are_dealt_out_equally(
    drives: list[int], ranks: int, own: list[list[int]], sharers: int
) -> None:
    assert [directories_of_rank(drives, rank, ranks) for rank in range(ranks)] == [
        (each, sharers) for each in own
    ]


def test_percentages_are_divided_and_bytes_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert host_shares.available_bytes(DEVICE) == 500
    assert host_shares.available_bytes(GPU) == 1000
    whole, obtainable = 2**40, host_shares.limits.read_memory_limits().obtainable_bytes
    assert abs(tiers.host_limit_bytes(settings(host_memory="50%")) / obtainable - 0.25) < 0.05
    assert tiers.host_limit_bytes(settings(host_memory="3GiB")) == 3 * 2**30
    store = str(tmp_path / "not yet")
    sizes = {"50%": whole // 4, "5GiB": 5 * 2**30, None: whole * 95 // 100 // 2}
    for size, expected in sizes.items():
        share = host_shares.StoreShare(settings(store=store, store_size=size))
        assert (share.size_bytes(whole), share.directories, share.sharers) == (expected, (store,), 2)
    with caplog.at_level(logging.INFO, "teraio"):
        host_shares.log_shares(settings(), "cpu")
        host_shares.log_shares(settings(memory="1GiB", store_size="1GiB"), "cpu")
        host_shares.log_shares(settings(store_size="1GiB"), "cuda")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "memory and store_size: parts of this host's memory" in lines[0]
    assert "divided among 2 ranks" in lines[0] and "teraio: host_memory:" in lines[1]


def test_rank_alone_on_its_host_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert host_shares.available_bytes(DEVICE) == 1000
    assert host_shares.StoreShare(settings()).size_bytes(1000) is None
    assert Meeting.of_host() is None


def test_published_text_is_checked_like_a_file() -> None:
    assert drives_from_text(text_of_drives({1: NUMBERS, 2: SLOWER})) == {1: NUMBERS, 2: SLOWER}
    good = text_of_drives({1: NUMBERS})
    bad = [None, "", "x", good + " 1", good.replace("400", "0", 1), good.replace("400", "-4", 1)]
    bad += [good.replace("400", str(2**53), 1), good.replace("400", "4e2", 1), good.replace("400", "\u0664")]
    bad += [good.replace("400", "9" * 30, 1), "\n".join([good] * 300)]
    assert [text for text in bad if drives_from_text(text) is not None] == []


class Host:
    """The other rank of the host, on a thread: it comes to `meetings` meetings and publishes `text`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, meetings: int = 1) -> None:
        shared = torch.distributed.HashStore()
        mine = RankStore(shared, 0, 2)
        monkeypatch.setattr(RankStore, "of_process", staticmethod(lambda: mine))
        monkeypatch.setattr(host_share, "LIMIT_S", 0.3)
        monkeypatch.setattr(Meeting.__init__, "__defaults__", (0.3,))
        other = RankStore(shared, 1, 2)
        self.order: list[str] = []
        self.thread = threading.Thread(target=self._meet, args=(other, text, meetings))
        self.thread.start()

    def _meet(self, store: RankStore, text: str, meetings: int) -> None:
        for number in range(meetings):
            key = f"drives {number}"
            store.publish(rank_store.host_key(f"{key}/ready/1"), "ready")
            store.wait_for([rank_store.host_key(f"{key}/ready/0")], 5)
            self.order.append("met")
            store.publish(rank_store.host_key(f"{key}/rates/1"), text)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Measure nothing, but return NUMBERS. The list has the directories that were measured."""
    found: list[Path] = []

    def link(directory: Path, device: object, memory_bytes: int) -> LinkRates:
        found.append(directory)
        return LinkRates("ssd", *NUMBERS)

    monkeypatch.setattr(tiers, "_measure_link_once", link)
    return found


def share(folder: Path) -> tuple[LinkRates, list[int]]:
    return tiers.measure_share_of_drives([folder], DEVICE, 2**20, 2)


def test_ranks_measure_together_and_share_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Path]
) -> None:
    host = Host(monkeypatch, text_of_drives({os.stat(tmp_path).st_dev: SLOWER}))
    link, weights = share(tmp_path)
    host.thread.join()
    assert link == LinkRates("ssd", 300, 600, 150, 300, 50_000, 70_000)
    assert weights == [900] and measured == [tmp_path] and host.order == ["met"]
    assert share(tmp_path)[0] == link and measured == [tmp_path], "a second session measures again"


def test_drive_of_this_rank_only_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Path]
) -> None:
    host = Host(monkeypatch, text_of_drives({os.stat(tmp_path).st_dev + 1: SLOWER}))
    assert share(tmp_path)[0] == LinkRates("ssd", *NUMBERS)
    host.thread.join()


@pytest.mark.parametrize("other", ["absent", "no group", "invalid"])
def test_rank_that_measures_alone_takes_a_part(
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if other != "no group":
        host = Host(monkeypatch, "1 2 3", 1 if other == "invalid" else 0)
    with caplog.at_level(logging.WARNING, "teraio"):
        link, _ = share(tmp_path)
        tiers._SHARES.clear()
        share(tmp_path)
    if other != "no group":
        host.thread.join()
    assert link == LinkRates("ssd", 200, 400, 100, 200, 50_000, 80_000)
    assert [record.getMessage().count("takes 1/2") for record in caplog.records] == [1], "said not once"


def test_late_rank_finds_no_stale_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.distributed.HashStore()
    first = Meeting(RankStore(shared, 0, 2), 0.02)
    assert not first.begin()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(host_share, "_NUMBERS", itertools.count())
    late = Meeting(RankStore(shared, 1, 2), 0.02)
    assert late.name == first.name and not late.begin()
