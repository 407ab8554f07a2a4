"""A run of one training in many surroundings: on each file system and under each system limit that a store
may meet.

Each training must give the numbers of plain training, or an error of teraio that states the cause. Mounting
file systems needs root. The script reports file systems that are unavailable.

    python tests/long/surroundings.py [names]

The script prints a line per directory, and `surroundings-right N N PASS` at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from says import as_it_is, exactly

TESTS = Path(__file__).resolve().parent.parent
CHILD, FUSE = TESTS / "support/surroundings_child.py", TESTS / "support/fuse_disk.py"
SAME = "same"
MIB = 2**20


class CannotBeHad(Exception):
    """An error for a file system that is unavailable. The error's text is the reason."""


def command(*words: object) -> None:
    if shutil.which(str(words[0])) is None:
        raise CannotBeHad(f"{words[0]} is missing")
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeHad(f"{words[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


@contextlib.contextmanager
def mounted(folder: Path, *how: object) -> Iterator[Path]:
    if os.geteuid() != 0:
        raise CannotBeHad("only root can mount")
    target = folder / "mounted"
    target.mkdir()
    command("mount", *how, target)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False, capture_output=True)


@contextlib.contextmanager
def ordinary(folder: Path) -> Iterator[Path]:
    target = folder / "ordinary"
    target.mkdir()
    yield target


def memory(mib: int) -> Callable[[Path], Any]:
    return lambda folder: mounted(folder, "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs")


def disk(kind: str, mib: int, *options: str) -> Callable[[Path], Any]:
    """Return a function that makes and mounts a file system in an image file."""

    @contextlib.contextmanager
    def made(folder: Path) -> Iterator[Path]:
        image = folder / "image"
        with open(image, "wb") as file:
            file.truncate(mib * MIB)
        command(f"mkfs.{kind}", *(("-q", "-F") if kind == "ext4" else ("-q",)), image)
        with mounted(folder, "-o", ",".join(("loop", *options)), image) as target:
            yield target

    return made


@contextlib.contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    """Provide an overlay on a tmpfs of its own, because an overlay on an overlay is impossible."""
    with memory(512)(folder) as below:
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        inner = folder / "overlay"
        inner.mkdir()
        how = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        with mounted(inner, "-t", "overlay", "-o", how, "overlay") as target:
            yield target


def fuse(*spoiled: str) -> Callable[[Path], Any]:
    """Return a function that mounts the test's own FUSE file system. `spoiled` names operations that fail:
    "write EIO 7" makes every seventh write fail.
    """

    @contextlib.contextmanager
    def made(folder: Path) -> Iterator[Path]:
        if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            raise CannotBeHad("FUSE needs root and /dev/fuse")
        target = folder / "mounted"
        target.mkdir()
        orders = [word for each in spoiled for word in ("--spoil", *each.split())]
        words = [sys.executable, FUSE, target, "--backing", folder, *orders]
        server = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
        (folder / "server").write_text(str(server.pid))
        try:
            assert server.stdout is not None
            if server.stdout.readline() != "ready\n":
                raise CannotBeHad("FUSE cannot be mounted here")
            yield target
        finally:
            subprocess.run(["umount", "-l", str(target)], check=False, capture_output=True)
            server.kill()
            server.wait()

    return made


@dataclass
class Directory:
    name: str
    where: Callable[[Path], Any] = ordinary
    outcomes: tuple[str, ...] = (SAME,)  # accepted outcomes: `SAME`, or names of error types
    limits: dict[str, int] = field(default_factory=dict)
    filled: bool = False  # True if another process fills the file system during the training
    detached: bool = False  # True if the file system is unmounted during the training
    unanswered: bool = False  # True if the file system's server is killed during the training


FULL = (SAME, "StoreFullError", "StoreError", "StoreWriteError", "BudgetError", "TornStepError")
# Accepted outcomes if the drive returns wrong bytes without an error, which only digests detect.
LYING = (SAME, "CorruptTensorError", "StoreReadError")
PLACES = (
    Directory("an ordinary folder"),
    Directory("tmpfs", memory(512), ("StoreError",)),  # a tmpfs is memory, so the store refuses it
    Directory("ext4", disk("ext4", 256)),
    Directory("ext4 of 16 MiB", disk("ext4", 16), FULL),
    Directory("ext4 that others fill", disk("ext4", 64), FULL, filled=True),
    Directory("ext4, taken from its folder meanwhile", disk("ext4", 256), detached=True),
    Directory("ext4, read-only", disk("ext4", 64, "ro"), ("StoreError",)),
    Directory("xfs", disk("xfs", 512)),
    Directory("an overlay", overlay),
    Directory("FUSE", fuse()),
    Directory("FUSE, each operation 20 ms late", fuse("read late 1", "write late 1")),
    Directory("FUSE, every second write short", fuse("write short 2")),
    Directory("FUSE, every second read ends the file", fuse("read short 2"), LYING),
    Directory("FUSE, every 60th write and read fails", fuse("write EIO 60", "read EIO 60")),
    Directory("FUSE, every seventh write fails", fuse("write EIO 7"), FULL),
    Directory("FUSE, every fifth read fails", fuse("read EIO 5"), (SAME, "StoreReadError")),
    Directory("FUSE, every write fails", fuse("write EIO 1"), FULL),
    Directory("FUSE, a bit of every ninth read is wrong", fuse("read flip 9"), LYING[1:]),
    Directory("FUSE, whose server ends in the middle", fuse(), (*FULL, LYING[-1]), unanswered=True),
    Directory("64 open files", limits={"RLIMIT_NOFILE": 64}),
    Directory("hardly an open file", outcomes=("StoreError",), limits={"RLIMIT_NOFILE": 5}),
    Directory("no locked memory", limits={"RLIMIT_MEMLOCK": 0}),
    Directory("files of 8 MiB", outcomes=FULL, limits={"RLIMIT_FSIZE": 8 * MIB}),
    Directory("no file at all", outcomes=FULL, limits={"RLIMIT_FSIZE": 0}),
)


def left_behind(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.name not in {"other", "lost+found"}]


def verdict(place: Directory, folder: Path) -> tuple[bool, str]:
    with place.where(folder) as store:
        case: dict[str, Any] = {"name": place.name, "store": str(store), "limits": place.limits}
        if place.filled:
            case["fill"] = str(store)
        if place.detached:
            case["run"] = ["umount", "-l", str(store)]
        if place.unanswered:
            case["run"] = ["kill", "-KILL", (folder / "server").read_text()]
        done = subprocess.run(
            [sys.executable, str(CHILD), json.dumps([case])],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**os.environ, "TERAIO_CACHE_DIR": "off", "TERAIO_PLANNER": "greedy"},
        )
        left = [] if place.unanswered else left_behind(store)
    if done.returncode:
        return False, f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    result = json.loads(done.stdout.splitlines()[-1])[place.name]
    outcome = SAME if result["same"] else result["error"].partition(":")[0] or "other numbers"
    moved = f"{result['evictions']} evictions, {result['fetches']} fetches"
    if outcome == SAME and not result["fetches"]:
        return False, f"no tensor moved, so the run proves nothing ({moved})"
    if left:
        return False, f"left behind: {left[:3]}"
    return outcome in place.outcomes, f"{outcome}; {moved}" if outcome == SAME else result["error"][:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    names = parser.parse_args().names
    chosen = [place for place in PLACES if not names or any(name in place.name for name in names)]
    right = tried = 0
    for place in chosen:
        with tempfile.TemporaryDirectory(prefix="surroundings-") as folder:
            try:
                good, what = verdict(place, Path(folder))
            except CannotBeHad as why:
                print(f"left out  {place.name}: {why}", flush=True)
                continue
        tried += 1
        right += good
        print(f"{'right' if good else 'WRONG':<9} {place.name}: {what}", flush=True)
    as_it_is("surroundings-left-out", len(chosen) - tried)
    return 0 if exactly("surroundings-right", right, max(tried, 1)) else 1


if __name__ == "__main__":
    sys.exit(main())
