"""The parts of this host that belong to one rank, when a training has several ranks on the host.

memory on a CPU, host_memory, store_size    a percentage is divided by the number of ranks; a number of
                                            bytes is for each rank
memory on a GPU                             is not divided, because each rank has its own GPU
store                                       drives are dealt out to the ranks
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from teraio.options import Memory, Settings
from teraio.ranks.host_share import directories_of_rank
from teraio.ranks.rank_store import local_rank, local_ranks
from teraio.runtime.device import limits
from teraio.runtime.device.device import Device
from teraio.units import fmt_count

log = logging.getLogger("teraio")

DEFAULT_STORE_PERCENT = 95  # of the free bytes, as in a store without a size


def available_bytes(device: Device) -> int:
    """Return the memory of which the option `memory` may be a percentage."""
    return device.default_budget_bytes() // (local_ranks() if device.kind == "cpu" else 1)


def obtainable_host_bytes() -> int:
    """Return the host memory of which the option `host_memory` may be a percentage."""
    return limits.read_memory_limits().obtainable_bytes // local_ranks()


class StoreShare:
    """The directories of this rank's store, and the size of the store."""

    def __init__(self, options: Settings) -> None:
        paths = options.store_directories
        self.size, self.directories, self.sharers = options.store_size, paths, local_ranks()
        if paths:
            drives = [_drive_of(Path(path)) for path in paths]
            own, self.sharers = directories_of_rank(drives, local_rank(), local_ranks())
            self.directories = tuple(paths[index] for index in own)

    def size_bytes(self, free_bytes: int) -> int | None:
        """Return the most bytes that the store may hold, if so many bytes are free on its drives. Return None
        if the store may use nearly all of them."""
        if self.size is not None:
            return self.size.resolve(free_bytes // self.sharers, 0)
        if self.sharers == 1 or not free_bytes:
            return None
        return max(1, free_bytes * DEFAULT_STORE_PERCENT // 100 // self.sharers)


def log_shares(options: Settings, kind: str) -> None:
    """Log which options are divided among the ranks of this host."""
    given = {"memory": options.memory} if kind == "cpu" else {"host_memory": options.host_memory}
    given["store_size"] = options.store_size
    divided = [name for name, amount in given.items() if _is_percentage(amount)]
    if local_ranks() > 1 and divided:
        log.info(
            "teraio: %s: parts of this host's memory and drives, divided among %s",
            " and ".join(divided),
            fmt_count(local_ranks(), "rank"),
        )


def _is_percentage(amount: Memory | None) -> bool:
    """Return True if an amount is a percentage. The default of each of these options is one."""
    return amount is None or amount.percent is not None


def _drive_of(path: Path) -> int:
    """Return the number of the drive of a directory. If the directory does not exist yet, use its nearest
    parent that exists."""
    for folder in (path.absolute(), *path.absolute().parents):
        try:
            return os.stat(folder).st_dev
        except OSError:
            continue
    return 0
