"""A run that writes, reads and releases many tensors of mixed sizes. No resource may grow during the run.

    python tests/long/churn.py [--tensors 20000] [--seconds 600] [--stores 20] [--dir /mnt/ssd]

The script runs until it has used at least `--tensors` tensors and `--seconds` seconds. Then it compares two
numbers: the largest memory of the process in the first quarter of the rounds, and in the last quarter.

Finally the script opens and closes `--stores` further stores, and divides the growth of the memory by the
number of these stores. The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says
FAIL.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from says import as_it_is, at_most
from store_rig import MIB, churn, disk_for

from teraio.runtime.store.store import Store

M_MMAP_THRESHOLD = -3
CAPACITY = 256 * MIB
LARGEST = 4 * MIB
LIVE = 7  # number of tensors that store_rig.churn keeps stored at the same time


def resident_kib() -> int:
    """Return the resident memory of this process in KiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)


def counts() -> tuple[int, int]:
    """Return (open descriptors, threads) of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--stores", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    root = disk_for(args.dir, "churn")
    # Make malloc return the test's own buffers to the system when they are freed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    empty = counts()
    store = Store(root, CAPACITY)
    ends: list[tuple[int, int, int]] = []
    figures = []
    tensors, began = 0, time.monotonic()
    while tensors < args.tensors or time.monotonic() - began < args.seconds:
        tensors += churn(store, 500, seed=len(ends) % 5, largest=LARGEST)
        ends.append((resident_kib(), *counts()))
    as_it_is("churn-tensors", tensors)
    as_it_is("churn-seconds", round(time.monotonic() - began))
    warm = len(ends) // 4
    grown = max(end[0] for end in ends[-warm or -1 :]) - max(end[0] for end in ends[: warm or 1])
    figures.append(("rss-growth-kib", grown, 4096))
    figures.append(("descriptors-grown", ends[-1][1] - ends[0][1], 0))
    figures.append(("threads-grown", ends[-1][2] - ends[0][2], 0))
    figures.append(("bytes-not-free", store.capacity_bytes - store.free_bytes, 0))
    figures.append(("file-bytes", store.space.files[0].allocated_bytes, 2 * max(64 * MIB, LIVE * LARGEST)))
    figures.append(("blocks-remembered", int(store.space.transfers.stats()["blocks"]), 0))
    store.close()
    del store
    base = resident_kib()
    for number in range(args.stores):
        with_one = Store(root, CAPACITY)
        churn(with_one, 20, number)
        with_one.close()
    del with_one
    figures.append(("rss-per-store-kib", (resident_kib() - base) / args.stores, 64))
    figures.append(("descriptors-left", counts()[0] - empty[0], 0))
    figures.append(("threads-left", counts()[1] - empty[1], 0))
    figures.append(("files-left", len(list(root.iterdir())), 0))
    good = [at_most(f"churn-{name}", value, target) for name, value, target in figures]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
