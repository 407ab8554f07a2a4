"""However a process ends, 0 bytes and 0 files are left and other stores are untouched: `kill -9` at random
moments and at every named point, a fork, an exit with exceptions flying."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rig import (
    MIB,
    POINTS,
    Bystander,
    Left,
    churn,
    in_child,
    killed_at_moment,
    killed_at_point,
)

from teraio.errors import StoreError
from teraio.runtime.store import directories, files, kill_points, stale_directories
from teraio.runtime.store.store import Store

MOMENTS = 12


@pytest.fixture
def bystander(root: Path) -> Iterator[Bystander]:
    one = Bystander(root)
    yield one
    one.store.close()


def check(root: Path, bystander: Bystander, names: int) -> None:
    left = Left(root)
    assert left.named_bytes == 0, "a file with bytes in it had a name"
    assert left.names <= names
    assert left.names_after_start == 0
    assert left.owners == {os.getpid()}, "somebody still holds the dead store's file"
    assert bystander.intact()


def test_kill_at_random_moments_leaves_nothing(root: Path, bystander: Bystander) -> None:
    random_ = random.Random(20)
    for _ in range(MOMENTS):
        killed_at_moment(root, random_.uniform(0, 0.06))
        check(root, bystander, names=2)


# Between making and unlinking there are names, of an empty file; the next start clears them.
@pytest.mark.parametrize("point", POINTS)
def test_kill_at_each_named_point_leaves_nothing(root: Path, bystander: Bystander, point: str) -> None:
    killed_at_point(root, point)
    check(root, bystander, names={"made": 1, "locked": 1, "created": 2, "unlinked": 1}.get(point, 0))


def test_the_next_start_clears_what_a_kill_left(root: Path) -> None:
    killed_at_point(root, "created")
    assert len(list(root.rglob("*"))) == 2
    Store(root, MIB).close()
    assert not list(root.iterdir())


def test_leftovers_tell_dead_from_live_and_clear_only_the_dead(root: Path, bystander: Bystander) -> None:
    killed_at_point(root, "created")
    states = {one.state: one for one in stale_directories.list_store_directories(root)}
    assert set(states) == {"dead", "live"}
    assert states["live"].pid == os.getpid() and states["live"].size_bytes > 0
    assert [one.path for one in stale_directories.remove_dead_directories(root)] == [states["dead"].path]
    assert [one.state for one in stale_directories.list_store_directories(root)] == ["live"]
    assert stale_directories.remove_dead_directories(root) == [] and bystander.intact()


def test_a_missing_directory_has_no_leftovers_and_stays_missing(root: Path) -> None:
    assert (
        stale_directories.list_store_directories(root / "none")
        == stale_directories.remove_dead_directories(root / "none")
        == []
    )
    assert not (root / "none").exists()


def test_a_directory_that_is_being_made_is_not_cleared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever clears comes at the worst moments; the maker notices, or has the lock."""
    seen: list[str] = []

    def clear_now(point: str) -> None:
        if point in {"made", "locked", "created", "unlinked"}:
            cleared = os.waitpid(
                in_child(lambda: os._exit(len(stale_directories.remove_dead_directories(root)))), 0
            )[1]
            seen.append(f"{point} {os.WEXITSTATUS(cleared)}")
            if point == "made":
                monkeypatch.setattr(
                    kill_points, "reach", lambda here: clear_now(here) if here != "made" else None
                )

    monkeypatch.setattr(kill_points, "reach", clear_now)
    store = Store(root, 16 * MIB)
    assert seen == ["made 1", "locked 0", "created 0", "unlinked 0"]
    churn(store, 3)
    store.close()
    assert not list(root.iterdir())


def test_what_is_not_ours_is_left_alone(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = f"{files.PREFIX}1-{'a' * 16}"
    (root / name).mkdir()
    (root / name / "photos").write_text("mine")
    (root / f"{files.PREFIX}2-{'b' * 16}").symlink_to(tmp_path)
    (tmp_path / "empty").mkdir()  # what a killed process leaves looks so
    (root / f"{files.PREFIX}5-{'e' * 16}").symlink_to(tmp_path / "empty")
    (root / f"{files.PREFIX}3-{'c' * 16}").write_text("a file")
    linked = root / f"{files.PREFIX}4-{'d' * 16}"
    linked.mkdir()
    (linked / files.NAME).symlink_to(victim)
    (root / "teraio-notes").mkdir()
    before = sorted(root.rglob("*"))
    assert {one.state for one in stale_directories.list_store_directories(root)} == {"foreign"}
    assert stale_directories.remove_dead_directories(root) == []
    Store(root, MIB).close()
    assert sorted(root.rglob("*")) == before and victim.read_text() == "precious"


@pytest.mark.parametrize("then", ["gone", "another"])
def test_a_directory_cleared_before_it_was_locked_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    really = fcntl.flock
    taken: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not taken:
            taken.append(next(root.iterdir()))
            taken[0].rmdir()
            if then == "another":
                taken[0].mkdir()
        really(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    file = files.StoreFile(directories.open_and_check_store_directory(root), MIB)
    assert file.try_direct_io() in {True, False}
    file.close()
    assert not list(root.iterdir())


def test_making_and_clearing_at_once_never_fails(root: Path) -> None:
    def work() -> None:
        for _ in range(100):
            place = directories.open_and_check_store_directory(root)
            stale_directories.remove_dead_directories_in_opened(place.fd, root)
            files.StoreFile(place, MIB).close()

    children = [in_child(work) for _ in range(6)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
    assert not list(root.iterdir())


def test_two_stores_in_one_directory_never_meet(root: Path) -> None:
    """Many open, use and close at once; each finds its own bytes and the directory ends empty."""

    def work() -> None:
        for seed in range(3):
            store = Store(root, 32 * MIB)
            churn(store, 8, seed + os.getpid())
            store.close()

    children = [in_child(work) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert not list(root.iterdir())


# ---- forks and the end


def test_a_fork_can_do_nothing_with_the_store_and_nothing_to_it(root: Path) -> None:
    bystander = Bystander(root)
    ticket = bystander.store.write(bystander.extent, bystander.memory.address, "bystander")

    def child() -> None:
        for use in (
            lambda: bystander.store.reserve(10, "t"),
            lambda: bystander.store.read(bystander.extent, bystander.memory.address, "t"),
            lambda: bystander.store.write(bystander.extent, bystander.memory.address, "t"),
        ):
            with pytest.raises(StoreError, match="belongs to process"):
                use()
        bystander.store.release(bystander.extent)
        bystander.store.close()
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert not [link for link in links if "bytes" in link], "the blocks would outlive the parent"
        churn(Store(root, 16 * MIB), 3)

    assert os.waitpid(in_child(child), 0)[1] == 0
    ticket.wait()
    assert bystander.intact()
    bystander.store.close()


EXIT = """
import ctypes, sys, threading
from teraio.runtime.store.store import Store
store = Store(sys.argv[1], 64 << 20)
memory = ctypes.create_string_buffer(32 << 20)
extent = store.reserve(len(memory), "t")
ticket = store.write(extent, ctypes.addressof(memory), "t")
if sys.argv[2] == "raise":
    raise RuntimeError("flying")
if sys.argv[2] == "thread":
    threading.Thread(target=ticket.wait).start()
if sys.argv[2] == "cycle":
    store.self = [store, ticket]
    del store, ticket, extent
"""


@pytest.mark.parametrize("how", ["plain", "raise", "thread", "cycle"])
def test_the_interpreter_ends_in_time_and_leaves_nothing(root: Path, how: str) -> None:
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", EXIT, str(root), how], capture_output=True, text=True, check=False
    )
    assert ran.returncode == (1 if how == "raise" else 0), ran.stderr
    assert ("RuntimeError: flying" in ran.stderr) == (how == "raise")
    assert how == "raise" or not ran.stderr
    assert time.monotonic() - began < 5 + 25, "imports included; a drive that hangs is given up after 60 s"
    assert not list(root.iterdir())
