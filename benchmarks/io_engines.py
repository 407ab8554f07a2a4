"""Would io_uring pay? The drive through threads that read and write, as the engine does, against io_uring.

    python benchmarks/io_engines.py [--folder DIR] [--rounds 5] [--seconds 3] [-o FILE]

Both by fio (which must be installed), with the block sizes and depths that the store uses, on huge pages,
past the page cache, in turn; medians of ratios of rates, and of CPU time for the same bytes. It pays if it
moves a tenth more, or if what it saves is a hundredth of the two cores at the rate that the drive has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from race.result import RESULTS, Table, write

FILE_BYTES = 2 * 2**30
SIZES = ((4 * 2**20, 8), (16 * 2**20, 4))  # bytes at once, and how many at a time
FASTER, SAVED_CORE_S_PER_S = 1.1, 0.02
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("-o", "--output", default=str(RESULTS / "io-engines.json"))
    args = parser.parse_args()
    if shutil.which("fio") is None:
        print("this needs fio", file=sys.stderr)
        return 2
    table = Table(
        **{"op": 5, "at once": 8, "threads GB/s": 12, "io_uring GB/s": 13, "ratio": 6, "spread": 6},
        **{"CPU s/GB": 8, "io_uring": 8, "saved": 6, "pays": 5},
    )
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="teraio-io-engines-") as folder:
        rows = list(compared(Path(folder) / "file", args, table))
    write(args.output, "io_engines", rounds=args.rounds, seconds=args.seconds, rows=rows)
    return 0


def compared(path: Path, args: argparse.Namespace, table: Table) -> Iterator[dict[str, Any]]:
    for op in ("write", "read"):
        for size, depth in SIZES:
            runs: dict[str, list[tuple[float, float]]] = {"psync": [], "io_uring": []}
            for number in range(args.rounds):
                for engine in sorted(runs, reverse=bool(number % 2)):
                    runs[engine].append(run(path, op, engine, size, depth, args.seconds))
            row = judged(op, size, depth, runs["psync"], runs["io_uring"])
            table.row(
                *(op, f"{size >> 20} MiB x{depth}", row["threads_gb_s"], row["io_uring_gb_s"], row["ratio"]),
                *(row["spread"], row["threads_cpu_s_gb"], row["io_uring_cpu_s_gb"], row["saved"]),
                "yes" if row["pays"] else "no",
            )
            yield row


def run(path: Path, op: str, engine: str, size: int, depth: int, seconds: float) -> tuple[float, float]:
    """GB/s, and seconds of CPU time per GB."""
    many = ["--numjobs=1", f"--iodepth={depth}"]
    if engine == "psync":
        many = [f"--numjobs={depth}", f"--offset_increment={FILE_BYTES // depth}"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [
            *("fio", "--name=x", f"--filename={path}", f"--size={FILE_BYTES}", f"--rw={op}", f"--bs={size}"),
            *("--direct=1", "--thread", "--time_based", f"--runtime={seconds}", "--group_reporting"),
            *(f"--ioengine={engine}", "--output-format=json", *many),
        ],
        env={**os.environ, **HUGE},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(done.stdout)["jobs"][0][op]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert time.monotonic() - began >= seconds
    return told["bw_bytes"] / 1e9, cpu_s / (told["io_bytes"] / 1e9)


def judged(
    op: str, size: int, depth: int, threads: list[tuple[float, float]], uring: list[tuple[float, float]]
) -> dict[str, Any]:
    ratios = [one[0] / other[0] for one, other in zip(uring, threads)]
    low, ratio, high = quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    cpu_threads, cpu_uring = (median(cost for _, cost in runs) for runs in (threads, uring))
    rate = median(rate for rate, _ in threads)
    saved = (cpu_threads - cpu_uring) * rate  # cores, while the drive is busy
    return {
        "op": op,
        "size_bytes": size,
        "depth": depth,
        "threads_gb_s": rate,
        "io_uring_gb_s": median(rate for rate, _ in uring),
        "ratio": ratio,
        "spread": (high - low) / ratio,
        "threads_cpu_s_gb": cpu_threads,
        "io_uring_cpu_s_gb": cpu_uring,
        "saved": saved,
        "pays": ratio >= FASTER or saved >= SAVED_CORE_S_PER_S,
    }


if __name__ == "__main__":
    sys.exit(main())
