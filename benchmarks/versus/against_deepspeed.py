"""A race of teraio against DeepSpeed's ZeRO-3 with offload to host memory and to the drive. Both train the
same model with the same batch.

    python benchmarks/versus/against_deepspeed.py --python VENV/bin/python [llama-32m ...] [--part 0.4]
                                                  [--pairs 9] [--sweep SECONDS] [--folder DIR] [-o FILE]

VENV has deepspeed (tested with 0.19.8), and libaio's headers are on the machine. Without a GPU, DeepSpeed
frees no memory, because its device is the host. The race therefore shows the cost of DeepSpeed's bookkeeping,
traffic and waiting. `process` is the peak of resident memory. teraio trains with torch's AdamW, DeepSpeed
with its own CPU Adam.

Before the race, a sweep of `--sweep` seconds per row looks for DeepSpeed's best settings. The sweep starts
from the settings in race/deepspeed.json and tries one change after another. The result file holds the best
settings. teraio gets only the option `memory`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import Any

from race.asked import add_part, command_line
from race.pairs import Died, Trainee, middle, most, plain_peak, race
from race.result import Table, bars, write

from teraio.units import fmt_bytes

GOAL = 1.0
NAMES = ("llama-7m", "llama-32m", "llama-175m")
STEPS = 3  # timed steps for each combination of settings
AIO = {"block_size": 2**20, "queue_depth": 16, "intra_op_parallelism": 2}
CHANGES: tuple[dict[str, Any], ...] = (
    {"pipeline": True},
    {"pipeline": True, "buffer_count": 12},
    {"sub_group_size": 10_000_000},
    {"sub_group_size": 1_000_000_000},
    {"pin_memory": True},
    {"buffer_count": 5},
    {"aio": {**AIO, "queue_depth": 64}},
    {"aio": {**AIO, "intra_op_parallelism": 4}},
    {"aio": {**AIO, "block_size": 2**22}},
    {"persistence_threshold": 1_000_000},
    {"prefetch_bucket_size": 10_000_000},
)


def main() -> int:
    parser = command_line(__doc__, "against-deepspeed", NAMES)
    parser.add_argument("--python", required=True, help="an interpreter with deepspeed")
    add_part(parser)
    parser.add_argument("--sweep", type=float, default=120, help="seconds per row")
    parser.add_argument("--folder", help="folder of DeepSpeed's swap files")
    args = parser.parse_args()
    table = Table(
        **{"model": 11, "offload": 7, "its step": 8, "process": 10, "ours": 7},
        **{"process ": 10, "ratio": 6, "spread": 6, "verdict": 17},
    )
    rows: list[dict[str, Any]] = []
    for name in args.subjects:
        peak = plain_peak(name, args.threads)
        for offload in ("cpu", "nvme"):
            rows.append(one_row(name, offload, peak, args))
            show(table, rows[-1])
            write(args.output, "against_deepspeed", part=args.part, pairs=args.pairs, rows=rows)
    shown = [
        (f"{row['subject']}: {who}", row[key], f"{row[key]:.2f} s, {fmt_bytes(row[held])}")
        for row in rows
        if "ratio" in row
        for who, key, held in (
            (f"DeepSpeed, {row['offload']}", "theirs_s", "theirs_resident_bytes"),
            ("teraio", "ours_s", "resident_bytes"),
        )
    ]
    if shown:
        bars(args.output.removesuffix(".json") + ".svg", "A step, and the peak of the process", shown)
    return 0 if all(row["verdict"] not in ("missed", "failed") for row in rows) else 1


def one_row(name: str, offload: str, peak: int, args: argparse.Namespace) -> dict[str, Any]:
    memory = int(peak * args.part)
    row: dict[str, Any] = {"subject": name, "offload": offload, "memory": memory, "plain_peak_bytes": peak}
    with tempfile.TemporaryDirectory(prefix="deepspeed-", dir=args.folder) as folder:
        request: dict[str, Any] = {"subject": name, "way": "deepspeed", "offload": offload, "folder": folder}
        request |= {"threads": args.threads, "deterministic": False}
        try:
            tried = swept(request, args)
            settings = tried[0]["settings"]
            row["tried"] = tried
            with Trainee({**request, "settings": settings}, python=args.python) as theirs:
                theirs.settle()
                mine = {"subject": name, "way": "teraio", "memory": memory, "threads": args.threads}
                with Trainee(mine) as ours:
                    found = race(ours.settle(), theirs, args.pairs)
        except Died as error:
            return row | {"verdict": "failed", "error": str(error)}
    row |= found.figures("theirs") | {"settings": settings}
    row["theirs_resident_bytes"] = most(found.theirs, "resident")
    row["resident_bytes"] = most(found.ours, "resident")
    row["peak_bytes"] = most(found.ours, "tensors")
    less = row["resident_bytes"] < row["theirs_resident_bytes"]
    row["verdict"] = found.verdict(GOAL) if less else "missed"
    return row


def swept(request: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Try settings until the time is up. Return the tried settings, fastest first. Settings that fail come
    last, with their error.
    """
    until = time.monotonic() + args.sweep
    tried: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    for change in ({}, *CHANGES):
        if change and time.monotonic() > until:
            break
        if request["offload"] == "cpu" and set(change) & {"aio", "pipeline", "buffer_count"}:
            continue  # these settings affect only the drive
        settings = {**best, **change}
        try:
            with Trainee({**request, "settings": settings}, python=args.python) as trainee:
                trainee.steps(1)
                seconds = middle(trainee.steps(STEPS), "seconds")
        except Died as error:
            tried.append({"settings": settings, "seconds": None, "error": str(error)[-300:]})
            continue
        if all(each["seconds"] is None or seconds < each["seconds"] for each in tried):
            best = settings
        tried.append({"settings": settings, "seconds": seconds})
    ran = sorted((each for each in tried if each["seconds"] is not None), key=lambda each: each["seconds"])
    if not ran:
        raise Died(f"{request}: no settings run: {tried[0]['error']}")
    return ran + [each for each in tried if each["seconds"] is None]


def show(table: Table, row: dict[str, Any]) -> None:
    if "ratio" not in row:
        print(row["error"], file=sys.stderr)
        return
    table.row(
        *(row["subject"], row["offload"], row["theirs_s"], fmt_bytes(row["theirs_resident_bytes"])),
        *(row["ours_s"], fmt_bytes(row["resident_bytes"]), row["ratio"], row["spread"], row["verdict"]),
    )


if __name__ == "__main__":
    sys.exit(main())
