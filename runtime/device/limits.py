"""The memory that this process may use: the machine's memory, and the limits of control groups."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KIB = 1024


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The memory limit and the used memory of this process's control group, or of a group above it."""

    path: Path
    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The RAM of the machine, and the control group with the lowest limit. `group` is None if no group limits
    this process."""

    total_bytes: int
    available_bytes: int
    group: ControlGroup | None

    @property
    def capacity_bytes(self) -> int:
        """Return the smaller of the machine's memory and the control group's limit."""
        return self.total_bytes if self.group is None else min(self.total_bytes, self.group.limit_bytes)

    @property
    def obtainable_bytes(self) -> int:
        """Return the smaller of the machine's available memory and the control group's limit."""
        return (
            self.available_bytes if self.group is None else min(self.available_bytes, self.group.limit_bytes)
        )


def read_memory_limits(root: Path = Path("/")) -> Memory:
    """Read the current sizes and limits of memory. `root` is the folder that contains `proc` and `sys`."""
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line
    )
    total = int(fields["MemTotal"].split()[0]) * KIB
    available = int(fields["MemAvailable"].split()[0]) * KIB
    limited = [group for group in _groups_with_limits(root) if group.limit_bytes < total]
    return Memory(total, available, min(limited, key=lambda group: group.limit_bytes, default=None))


def _groups_with_limits(root: Path) -> list[ControlGroup]:
    """Return the control groups that have a limit, from this process's own group up to the mount point.

    The limits of all these groups apply to the process. The group at the mount point alone would not be
    enough: outside a container it has no limit file. The function reads versions 1 and 2 of control groups.
    """
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
    """Return the control group in this folder, or None if it has no limit.

    In version 2, the limit file of a group without a limit contains `max`, and the root group has no limit
    file. In version 1, the limit file of such a group contains 2**63 minus one page. This function returns
    that number as a limit. The callers ignore limits above the machine's memory.
    """
    try:
        text = (folder / limit).read_text().strip()
        return ControlGroup(folder, int(text), int((folder / used).read_text())) if text.isdigit() else None
    except (OSError, ValueError):
        return None


def _group_folders(root: Path) -> list[tuple[Path, Path, str, str]]:
    """Return a row for each mounted version of control groups.

    A row is (folder of the process's own group, mount point, name of the limit file, name of the usage file).
    """
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
    """Return the folder of the group `own`, under the mount point `top` that shows only groups below
    `inside`.

    In a container, the process's own group may be outside of the mounted tree. In that case return the mount
    point, which is the nearest visible folder.
    """
    if inside != "/":
        own = own.removeprefix(inside) if own == inside or own.startswith(inside + "/") else "/"
    folder = top / own.lstrip("/")
    return folder if ".." not in Path(own).parts and folder.is_dir() else top


def make_malloc_return_memory() -> None:
    """Make malloc return freed bytes to the system immediately.

    glibc maps each block above a threshold on its own, and returns such a block when it is freed. glibc keeps
    smaller freed blocks. Whenever a mapped block is freed, glibc raises the threshold to the block's size, up
    to 32 MiB. So a freed tensor of 16 MiB could still occupy memory. This function fixes the threshold.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has no `mallopt`, but returns large blocks by default
        libc.mallopt(M_MMAP_THRESHOLD, 64 * KIB)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * KIB)
