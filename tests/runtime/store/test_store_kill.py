"""Tests of the end of a process that has a store: (1) `kill -9` at random moments, (2) `kill -9` at named
points, (3) forks, and (4) exits.

No end leaves bytes on the drive or changes other stores. A kill may leave an empty file and a directory,
which the next store removes when it starts.
"""

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
    assert left.named_bytes == 0, "a file with bytes had a name"
    assert left.names <= names
    assert left.names_after_start == 0
    assert left.owners == {os.getpid()}, "another process still has the dead store's file open"
    assert bystander.intact()


def test_kill_at_random_moments_leaves_nothing(root: Path, bystander: Bystander) -> None:
    random_ = random.Random(20)
    for _ in range(MOMENTS):
        killed_at_moment(root, random_.uniform(0, 0.06))
        check(root, bystander, names=2)


# A store creates an empty file in its own directory and then unlinks the file. A kill between these two
# moments leaves the file and the directory. The next start of a store removes both.
@pytest.mark.parametrize("point", POINTS)
def test_kill_at_each_named_point_leaves_nothing(root: Path, bystander: Bystander, point: str) -> None:
    killed_at_point(root, point)
    check(root, bystander, names={"made": 1, "locked": 1, "created": 2, "unlinked": 1}.get(point, 0))


def test_next_start_removes_directory_of_killed_process(root: Path) -> None:
    killed_at_point(root, "created")
    assert len(list(root.rglob("*"))) == 2
    Store(root, MIB).close()
    assert not list(root.iterdir())


def test_only_dead_directories_are_removed(root: Path, bystander: Bystander) -> None:
    killed_at_point(root, "created")
    states = {one.state: one for one in stale_directories.list_store_directories(root)}
    assert set(states) == {"dead", "live"}
    assert states["live"].pid == os.getpid() and states["live"].size_bytes > 0
    assert [one.path for one in stale_directories.remove_dead_directories(root)] == [states["dead"].path]
    assert [one.state for one in stale_directories.list_store_directories(root)] == ["live"]
    assert stale_directories.remove_dead_directories(root) == [] and bystander.intact()


def test_missing_directory_has_no_stale_directories_and_is_not_created(root: Path) -> None:
    assert (
        stale_directories.list_store_directories(root / "none")
        == stale_directories.remove_dead_directories(root / "none")
        == []
    )
    assert not (root / "none").exists()


def test_directory_during_its_creation_is_not_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each named point of a store's creation, another process tries to remove stale directories.

    At the first point, the removal succeeds, and the store makes another directory. At later points, the
    store's lock prevents the removal.
    """
    seen: list[str] = []

    def clear_now(point: str) -> None:
        if point in {"made", "locked", "created", "unlinked"}:
            cleared = os.waitpid(
                in_child(lambda: os._exit(len(stale_directories.remove_dead_directories(root)))), 0
            )[1]
            seen.append(f"{point} {os.WEXITSTATUS(cleared)}")
            if point == "made":
                monkeypatch.setattr(
                    kill_points, "reach", lambda reached: clear_now(reached) if reached != "made" else None
                )

    monkeypatch.setattr(kill_points, "reach", clear_now)
    store = Store(root, 16 * MIB)
    assert seen == ["made 1", "locked 0", "created 0", "unlinked 0"]
    churn(store, 3)
    store.close()
    assert not list(root.iterdir())


def test_foreign_files_are_never_removed(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = f"{files.PREFIX}1-{'a' * 16}"
    (root / name).mkdir()
    (root / name / "photos").write_text("mine")
    (root / f"{files.PREFIX}2-{'b' * 16}").symlink_to(tmp_path)
    (tmp_path / "empty").mkdir()  # an empty directory, as a killed process leaves it
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


@pytest.mark.parametrize("then", ["removed", "another"])
def test_directory_removed_before_its_lock_is_created_again(
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


def test_concurrent_creation_and_removal_never_fails(root: Path) -> None:
    def work() -> None:
        for _ in range(100):
            place = directories.open_and_check_store_directory(root)
            stale_directories.remove_dead_directories_in_opened(place.fd, root)
            files.StoreFile(place, MIB).close()

    children = [in_child(work) for _ in range(6)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
    assert not list(root.iterdir())


def test_stores_in_one_directory_are_independent(root: Path) -> None:
    """Several processes open, use and close stores at the same time.

    Each reads its own bytes, and no file is left.
    """

    def work() -> None:
        for seed in range(3):
            store = Store(root, 32 * MIB)
            churn(store, 8, seed + os.getpid())
            store.close()

    children = [in_child(work) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert not list(root.iterdir())


# ---- forks and exits


def test_fork_can_neither_use_nor_damage_the_store(root: Path) -> None:
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
def test_interpreter_exits_in_time_and_leaves_no_file(root: Path, how: str) -> None:
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", EXIT, str(root), how], capture_output=True, text=True, check=False
    )
    assert ran.returncode == (1 if how == "raise" else 0), ran.stderr
    assert ("RuntimeError: flying" in ran.stderr) == (how == "raise")
    assert how == "raise" or not ran.stderr
    assert time.monotonic() - began < 5 + 25, "imports included; a hung transfer would end after 60 s"
    assert not list(root.iterdir())
