"""A control group (cgroup version 1 or 2) with a memory limit. Only root can make one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
BALLAST = "held = []\nwhile True: held.append(b'.' * 2**22)"
SPARE_BYTES = 32 * 2**20
FIRST_TO_DIE = "1000"
PATIENCE_S = 60.0


class Group:
    """A control group. `first` is the beginning of a command line that runs a command in the group."""

    def __init__(self, name: str) -> None:
        old = GROUPS / "memory"
        self.version = 1 if old.is_dir() else 2
        self.folder = (old if self.version == 1 else GROUPS) / name
        self.file = self.folder / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")
        self.first = ["sh", "-c", f'echo $$ > "{self.folder / "cgroup.procs"}" && exec "$@"', "sh"]

    def limit(self, size: int) -> None:
        self.file.write_text(str(size))

    def lift(self) -> None:
        self.file.write_text("-1" if self.version == 1 else "max")

    @property
    def used_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text())

    @property
    def killed(self) -> int:
        """Return the number of this group's processes that the system's kernel killed for lack of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        counts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(counts["oom_kill"])


@contextmanager
def group(name: str) -> Iterator[Group]:
    made = Group(name)
    made.folder.mkdir(exist_ok=True)
    try:
        yield made
    finally:
        made.folder.rmdir()


def run_out_of_memory(where: Group, victim: subprocess.Popen[str]) -> None:
    """Fill the group's memory with another process, until the system's kernel kills the victim."""
    Path(f"/proc/{victim.pid}/oom_score_adj").write_text(FIRST_TO_DIE)
    where.limit(where.used_bytes + SPARE_BYTES)
    stop = time.monotonic() + PATIENCE_S
    with subprocess.Popen(
        [*where.first, sys.executable, "-c", BALLAST], stderr=subprocess.DEVNULL
    ) as ballast:
        try:
            while victim.poll() is None and time.monotonic() < stop and ballast.poll() is None:
                time.sleep(0.01)
        finally:
            ballast.kill()
    where.lift()
    if victim.poll() is None:
        victim.kill()


def reason_without() -> str:
    """Return the reason why no control group can be made, or an empty string if one can be made."""
    if os.geteuid():
        return "only root can make a control group"
    made = Group("teraio-trial")
    try:
        made.folder.mkdir(exist_ok=True)
        found = made.file.exists()
        made.folder.rmdir()
    except OSError as error:
        return f"no control group can be made: {error}"
    return "" if found else f"{made.file} does not exist"
