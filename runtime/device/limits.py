"""How much memory this process may have: the system's figures and the limits of its control groups."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KIB = 1024


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group's memory limit: this process's own group or one above it."""

    path: Path
    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM as this process meets it. `group` is the control group with the lowest limit, if any has one."""

    total_bytes: int
    available_bytes: int
    group: ControlGroup | None

    @property
    def capacity_bytes(self) -> int:
        """What the machine, or the control group in front of it, has in all."""
        return self.total_bytes if self.group is None else min(self.total_bytes, self.group.limit_bytes)

    @property
    def obtainable_bytes(self) -> int:
        """The smaller of the control group's limit and available memory."""
        return (
            self.available_bytes if self.group is None else min(self.available_bytes, self.group.limit_bytes)
        )


def read_memory_limits(root: Path = Path("/")) -> Memory:
    """The figures of now. `root` is where proc and sys are found."""
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line
    )
    total = int(fields["MemTotal"].split()[0]) * KIB
    available = int(fields["MemAvailable"].split()[0]) * KIB
    limited = [group for group in _groups_with_limits(root) if group.limit_bytes < total]
    return Memory(total, available, min(limited, key=lambda group: group.limit_bytes, default=None))


def _groups_with_limits(root: Path) -> list[ControlGroup]:
    """Every group with a limit from this process's own up to the mount, of both versions. A limit set
    anywhere above counts; outside a container the file at the mount alone would show none of them."""
    found = []
    for own, top, limit, used in _group_folders(root):
        folder = own
        while True:
            group = _read_group(folder, limit, used)
            if group is not None:
                found.append(group)
            if folder == top:
                break
            folder = folder.parent
    return found


def _read_group(folder: Path, limit: str, used: str) -> ControlGroup | None:
    """None without a limit: `max` in version 2, no such file at a root. Version 1 says 2**63 less a page."""
    try:
        text = (folder / limit).read_text().strip()
        return ControlGroup(folder, int(text), int((folder / used).read_text())) if text.isdigit() else None
    except (OSError, ValueError):
        return None


def _group_folders(root: Path) -> list[tuple[Path, Path, str, str]]:
    """(own folder, mount, name of the limit file, name of the usage file) per mounted version."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    own_v2 = next((path for _, kinds, path in groups if not kinds), None)
    own_v1 = next((path for _, kinds, path in groups if "memory" in kinds.split(",")), None)
    found = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        inside, mount = before.split()[3:5]
        top = root / mount.lstrip("/")
        if kind == "cgroup2" and own_v2 is not None:
            found.append((_folder_of_group(top, inside, own_v2), top, "memory.max", "memory.current"))
        elif kind == "cgroup" and own_v1 is not None and "memory" in options.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found.append((_folder_of_group(top, inside, own_v1), top, *names))
    return found


def _folder_of_group(top: Path, inside: str, own: str) -> Path:
    """Where the group `own` lies under a mount that shows the tree from `inside` on. In a container the
    process's own path may lie outside of what is mounted: then the mount is the nearest that can be seen."""
    if inside != "/":
        own = own.removeprefix(inside) if own == inside or own.startswith(inside + "/") else "/"
    folder = top / own.lstrip("/")
    return folder if ".." not in Path(own).parts and folder.is_dir() else top


def make_malloc_return_memory() -> None:
    """Makes freed bytes go back to the system at once.

    glibc raises its threshold for mapping blocks up to 32 MiB as blocks are freed, and keeps what lies below
    it: a freed 16 MiB tensor would stay with the process.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has none, and gives large blocks back anyway
        libc.mallopt(M_MMAP_THRESHOLD, 64 * KIB)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * KIB)
