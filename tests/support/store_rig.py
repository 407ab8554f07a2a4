"""A test bench for stores: memory with known content, a folder on a disk, and processes that are killed."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from for_now import folder_for_now

from teraio import _native
from teraio.errors import StoreError
from teraio.runtime.store import directories, kill_points, stale_directories
from teraio.runtime.store.extents import Extents, Piece, round_up_to_blocks
from teraio.runtime.store.space import Extent
from teraio.runtime.store.store import Store
from teraio.runtime.store.ticket import StoreTicket

MIB = 1 << 20
LOOKS_ALIKE = 5

# The process dies before an operation of the drive (kill), or after the operation and before the caller
# learns of its end (killed).
OPERATIONS = ("kill write", "killed write", "kill read", "killed read")
POINTS = (*kill_points.POINTS, *OPERATIONS)


class Memory:
    """Memory with a known address and random content."""

    def __init__(self, size: int, seed: int | None = None) -> None:
        self.size = size
        self.raw = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.raw)
        if seed is not None:
            self.raw.raw = random.Random(seed).randbytes(size)

    def get(self) -> bytes:
        return self.raw.raw


def disk_near(folder: Path) -> Path | None:
    """Return `folder` if it is on a disk. If `folder` is in memory, return a temporary folder in the tree's
    build folder. Return None if that folder is in memory too.
    """
    if _on_disk(folder):
        return folder
    beside = folder_for_now("store", Path.cwd() / "build")
    return beside if _on_disk(beside) else None


def _on_disk(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return not directories.Directory(folder, fd, 0, directories.file_system_name(fd)).is_in_memory
    finally:
        os.close(fd)


def disk_for(given: Path | None, name: str) -> Path:
    """Return the folder for a script's stores, which is `given` or a new folder. Exit the script if no disk
    is found.
    """
    root = given or disk_near(folder_for_now(name))
    if root is None:
        raise SystemExit("no disk found, only memory; give --dir")
    return root


class Faulty:
    """A store whose I/O can fail. With `where` = "threads" the store uses the real file. With `where` =
    "memory" it uses a deterministic transfer engine on memory.
    """

    def __init__(
        self, root: Path, where: str = "threads", size_bytes: int = 8 * MIB, **settings: Any
    ) -> None:
        self.fault: _native.FaultIo

        def wrap(io: _native.Io) -> _native.Io:
            inner = io if where == "threads" else _native.MemoryIo(size_bytes=64 * MIB, depth=4)
            self.fault = _native.FaultIo(inner)
            return self.fault

        self.store = Store(root, size_bytes, wrap=wrap, **settings)

    def put(self, memory: Memory, name: str) -> Extent:
        extent = self.store.reserve(memory.size, name)
        self.store.write(extent, memory.address, name).wait()
        return extent

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def check_extents(extents: Extents, live: list[tuple[Piece, ...]]) -> None:
    """Check that every block of every file is in exactly one state: live (in use), free, dead (never used
    again) or fresh (never used before).
    """
    owner: list[dict[int, str]] = [{} for _ in extents.files]

    def claim(file: int, offset: int, size: int, what: str, over: str = "") -> None:
        for block in range(offset, offset + round_up_to_blocks(size), 4096):
            assert owner[file].get(block, over) == over, (
                f"block {block} of file {file}: {what}, and {owner[file][block]}"
            )
            owner[file][block] = what

    for pieces in live:
        for piece in pieces:
            claim(*piece, what="live")
    for kept in extents._recent.values():
        for pieces in kept:
            for piece in pieces:
                claim(*piece, what="recent")
    dead = {(f, b) for f, o, s in extents._dead for b in range(o, o + s, 4096)}
    for number, space in enumerate(extents.files):
        runs = space.list_free_runs()
        assert all(a + size < b for (a, size), (b, _) in pairwise(runs)), "adjacent free runs were not merged"
        for offset, size in runs:
            claim(number, offset, size, "run")
            assert offset + size < space.end, "a free run at the end was not merged"
        taken = set(owner[number])
        assert all(block < space.end for block in taken)
        missing = set(range(0, space.end, 4096)) - taken
        assert missing <= {b for f, b in dead if f == number}, f"lost: {sorted(missing)[:5]}"
        assert not any(owner[f].get(b) in {"run", "recent"} for f, b in dead), "a dead block is free"
    assert extents.dead_bytes == 4096 * len(dead)


def at_rest(count: Callable[[], Any]) -> Any:
    """Return a count as soon as it no longer changes. For example, the system still lists a joined thread for
    a moment.
    """
    looks = [count()]
    while len(looks) < LOOKS_ALIKE or any(look != looks[-1] for look in looks[-LOOKS_ALIKE:]):
        time.sleep(0.02)
        looks.append(count())
    return looks[-1]


def pressed_while_waiting(ticket: StoreTicket, seconds: float) -> bool:
    """Wait for the ticket, and raise SIGINT after a delay. Return True if SIGINT interrupted the wait itself.

    If this thread is delayed, SIGINT may come before the wait or after it.
    """
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        ticket.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt as stop:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(stop.__traceback__)]
        return (
            StoreTicket._wait_and_collect_result.__code__ in frames or StoreTicket.cancel.__code__ in frames
        )
    return False


# ---- processes that are killed


def in_child(work: Callable[[], object]) -> int:
    """Fork a child that runs `work` and exits without clean-up. Return the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def churn(store: Store, rounds: int, seed: int = 0, largest: int = 3 * MIB) -> int:
    """Write tensors of mixed sizes, read them back, compare and release them. Return the number of
    tensors.
    """
    random_ = random.Random(seed)
    live: list[tuple[Extent, Memory]] = []
    for number in range(rounds):
        memory = Memory(random_.randrange(1, largest), seed=random_.randrange(4))
        extent = store.reserve(memory.size, f"t{number}")
        store.write(extent, memory.address, f"t{number}").wait()
        live.append((extent, memory))
        if len(live) > 6:
            extent, memory = live.pop(random_.randrange(len(live)))
            back = Memory(memory.size)
            store.read(extent, back.address, extent.name, demand=bool(number % 2)).wait()
            assert back.get() == memory.get()
            store.release(extent)
    for extent, _ in live:
        store.release(extent)
    return rounds


def work_until_killed(root: Path, ready: int) -> NoReturn:
    """Open, use and close stores until the process is killed."""
    os.write(ready, b"x")
    for seed in range(10**9):
        store = Store(root, 32 * MIB, accept=("tmpfs",))
        churn(store, 10, seed)
        store.close()
    raise AssertionError


def die_at(last: str) -> None:
    """Make this process kill itself when the store reaches the kill point `last`."""

    def reach(point: str) -> None:
        if point == last:
            os.kill(os.getpid(), signal.SIGKILL)

    kill_points.reach = reach


def killed_at_moment(root: Path, delay_s: float) -> None:
    """Kill a process that works with stores by SIGKILL after the delay."""
    reader, writer = os.pipe()
    pid = in_child(lambda: work_until_killed(root, writer))
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def killed_at_point(root: Path, point: str) -> None:
    """Run a process that kills itself at a kill point of the store, or at an operation of the drive such as
    `kill write`.
    """

    def work() -> None:
        if point in OPERATIONS:
            rig = Faulty(root, size_bytes=128 * MIB, accept=("tmpfs",))
            kind, op = point.split()
            rig.fault.add(kind, op, nth=5)  # type: ignore[arg-type]
        else:
            die_at(point)
            rig = Faulty(root, size_bytes=128 * MIB, accept=("tmpfs",))
        churn(rig.store, 16)
        rig.store.close()

    status = os.waitpid(in_child(work), 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (
        f"{point} was not reached: {status}"
    )


class Left:
    """The state after a kill: the number of bytes in named files, the number of names, and the processes that
    hold stores open. `names_after_start` is the number of names after the removal of dead directories.
    """

    def __init__(self, root: Path) -> None:
        paths = list(root.rglob("*"))
        self.named_bytes = sum(p.stat().st_blocks * 512 for p in paths if p.is_file())
        self.names = len(paths)
        self.owners = {one.pid for one in stale_directories.list_unlinked_files_in_use(root)}
        stale_directories.remove_dead_directories(root)
        self.names_after_start = len(list(root.rglob("*")))


class Bystander:
    """A store of the test's own process, in the directory in which other processes are killed. Its tensor
    must survive the kills.
    """

    def __init__(self, root: Path) -> None:
        self.store = Store(root, 16 * MIB, accept=("tmpfs",))
        self.memory = Memory(2 * MIB + 17, seed=77)
        self.extent = self.store.reserve(self.memory.size, "bystander")
        self.store.write(self.extent, self.memory.address, "bystander").wait()

    def intact(self) -> bool:
        back = Memory(self.memory.size)
        try:
            self.store.read(self.extent, back.address, "bystander").wait()
        except StoreError:
            return False
        return back.get() == self.memory.get()
