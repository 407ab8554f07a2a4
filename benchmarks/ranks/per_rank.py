"""Benchmark of sharded training on several gloo ranks of this machine: memory, step time, and moved bytes.

    python benchmarks/ranks/per_rank.py --ways [--rounds 2] [--floor] [--deepspeed PYTHON] [--write FILE]
    python benchmarks/ranks/per_rank.py --bytes [--shares 40 25] [--write FILE]

A Llama trains with AdamW in each way of `trained_ranks.py` beside this file. A rank computes with one thread.
A memory in percent is a share of the peak of plain training with as many ranks, and per rank.

`--ways` compares the ways by the peak of their tensors, the peak of their resident memory above an empty
process, and the step time. Its ratio is to plain training in the same round. The ways take turns. DeepSpeed
may be installed for another Python, which `--deepspeed` names.

`--bytes` compares the bytes that one rank moves, and that each of two ranks moves. All have room for the same
share of their shards (weights, gradients and states), beside the bytes that are not sharded: activations,
gathered weights, and the reserve. The batch is so small that few activations move. The rows also count the
bytes of gathered weights that were saved by a forward, or written by an eviction. Both must be 0.

The script prints rows to stderr, and lines `name value target PASS|FAIL` to stdout. `--write` adds the rows
to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "long"))

import torch
from says import at_most, exactly

from teraio.runtime.store.slabs import slab_bytes_total
from teraio.session.session import RESERVE_BYTES

HERE = Path(__file__).resolve().parent
Runs = list[dict[str, Any]]
SHAPES = {  # of `--ways` and of `--bytes`: a model with large weights, and one with small weights
    "ways": (2048, 640, 1760, 4, 5, 5),
    "bytes": (1024, 512, 1408, 8, 4, 4),
}
NAMES = ("vocabulary", "hidden", "intermediate", "layers", "heads", "key_heads")
MOVED = ("read_bytes", "written_bytes")
OFF_PERCENT = 2  # most by which the bytes of one of two ranks may differ from half the bytes of one rank


def run(args: argparse.Namespace, way: str, ranks: int, memory: str = "", least_steps: int = 0) -> Runs:
    """Train in this way in new processes, for at least so many steps. Return one object per rank."""
    request = {
        "way": way,
        "ranks": ranks,
        "memory": memory,
        "steps": args.steps,
        "least_steps": least_steps,
        "batch": args.batch,
        "length": args.length,
        "updates": args.updates,
        "warmup": 1,
        "plan_time": args.plan_time,
        "port": 20_000 + os.getpid() % 20_000,
        "shape": dict(zip(NAMES, args.shape)),
    }
    python = args.deepspeed if way == "deepspeed" else sys.executable
    command = [python, str(HERE / "trained_ranks.py"), json.dumps(request)]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    with tempfile.TemporaryDirectory(prefix="teraio-ranks-store-") as folder:
        environ.setdefault("TERAIO_STORE", folder)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildError(done.stderr[-20_000:])
    found: Runs = json.loads(done.stdout.splitlines()[-1])
    return found


class ChildError(Exception):
    """The failure of a training, with the end of its stderr."""


def peak(runs: Runs, name: str = "peak_bytes") -> int:
    return max(int(rank[name]) for rank in runs)


def step_s(runs: Runs) -> float:
    return statistics.median(took for rank in runs for took in rank["took_s"])


def equal_steps(runs: Runs, plain: Runs) -> int:
    """Return the number of first steps whose losses are equal on all ranks, or -1 if a loss differs."""
    count = min(len(runs[0]["losses"]), len(plain[0]["losses"]))
    same = all(mine["losses"][:count] == its["losses"][:count] for mine, its in zip(runs, plain))
    return count if same else -1


def loss_distance(runs: Runs, plain: Runs) -> float:
    """Return the largest relative difference of two losses of the same step."""
    pairs = [
        (float.fromhex(a), float.fromhex(b))
        for x, y in zip(runs, plain)
        for a, b in zip(x["losses"], y["losses"])
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def tell(row: dict[str, Any], rows: Runs) -> None:
    rows.append(row)
    print(json.dumps(row), file=sys.stderr, flush=True)


# ---- the ways


def ways(args: argparse.Namespace) -> tuple[Runs, bool]:
    rows: Runs = []
    good = True
    for ranks in args.ranks:
        plain = run(args, "plain", ranks, least_steps=args.equal_steps)
        memories = {f"{share} %": peak(plain) * share // 100 for share in args.shares}
        tell({"ranks": ranks, "plain_peak_bytes": peak(plain)}, rows)
        if args.floor:
            floor = run(args, "teraio", ranks, "min")
            tell({"ranks": ranks, "smallest_budget_bytes": peak(floor, "budget_bytes")}, rows)
        wanted = [("plain", "", 0), *(("teraio", share, size) for share, size in memories.items())]
        wanted += [("fsdp2", "", 0)] + [("deepspeed", "", 0)] * bool(args.deepspeed)
        found: dict[tuple[str, str, int], list[Runs]] = {each: [] for each in wanted}
        failed: dict[tuple[str, str, int], str] = {}
        found[wanted[0]].append(plain)
        for number in range(args.rounds):
            for way, share, size in wanted[0 if number else 1 :]:
                try:
                    found[way, share, size].append(run(args, way, ranks, f"{size}B"))
                except ChildError as error:
                    failed[way, share, size] = str(error)
        plains = found[wanted[0]]
        for each in wanted:
            way, share, size = each
            row: dict[str, Any] = {"ranks": ranks, "way": way, "memory": share, "budget_bytes": size or None}
            row |= (
                {"error": failed[each][-500:]} if each in failed else row_of_way(found[each], plains, plain)
            )
            tell(row, rows)
            if way == "teraio":
                good &= exactly(
                    f"steps-that-differ-{ranks}-ranks-{share}".replace(" %", ""), not row.get("equal")
                )
    return rows, good


def row_of_way(runs: list[Runs], plains: list[Runs], plain: Runs) -> dict[str, Any]:
    """Return the figures of a way. `plains` has the plain training of each round, `plain` a longer one."""
    times = [step_s(each) / step_s(its) for each, its in zip(runs, plains)]
    row: dict[str, Any] = {
        "peak_tensor_bytes": max(map(peak, runs)),
        "peak_rss_above_bytes": max(peak(each, "peak_rss_bytes") for each in runs),
        "step_s": round(statistics.median(map(step_s, runs)), 4),
        "x_plain": round(statistics.median(times), 3),
        "x_plain_by_round": [round(each, 3) for each in times],
        "equal": all(equal_steps(each, plain) > 0 for each in runs),
        "equal_steps": min(equal_steps(each, plain) for each in runs),
        "loss_distance": max(loss_distance(each, plain) for each in runs),
    }
    if "read_bytes" in runs[0][0]:
        row |= {
            name: peak(runs[-1], name) for name in (*MOVED, "misses", "overrun_bytes") if name in runs[-1][0]
        }
    return row


# ---- the bytes


def memory_with_room(room_bytes: int) -> int:
    """Return a memory for teraio that leaves this room beside teraio's reserve."""
    memory = room_bytes
    while (needed := room_bytes + RESERVE_BYTES + slab_bytes_total(memory, 1)) > memory:
        memory = needed
    return memory


def moved_bytes(args: argparse.Namespace) -> tuple[Runs, bool]:
    rows: Runs = []
    peaks = {ranks: peak(run(args, "plain", ranks)) for ranks in (1, 2)}
    sharded = 2 * (peaks[1] - peaks[2])  # because two ranks each have half of the sharded bytes
    unsharded = peaks[1] - sharded
    good = True
    for share in args.shares:
        rooms = {ranks: unsharded + sharded * share // 100 // ranks for ranks in (1, 2)}
        runs = {
            ranks: run(args, "teraio", ranks, f"{memory_with_room(room)}B") for ranks, room in rooms.items()
        }
        for ranks, each in runs.items():
            for rank in each:
                kept = {name: value for name, value in rank.items() if name not in ("losses", "took_s")}
                tell({"share": share, "ranks": ranks, "plain_peak_bytes": peaks[ranks], **kept}, rows)
        for name in (*MOVED, "shards_bytes"):
            of_half = statistics.mean(rank[name] for rank in runs[2]) / (runs[1][0][name] / 2)
            about = f"{name.replace('_', '-')}-off-half-percent-at-{share}"
            good &= at_most(about, 100 * abs(of_half - 1), OFF_PERCENT)
        every = [rank for each in runs.values() for rank in each]
        off = [rank["budget_bytes"] - rank["reserve_bytes"] - rooms[n] for n in rooms for rank in runs[n]]
        good &= exactly(f"ranks-with-another-room-than-planned-at-{share}", sum(map(bool, off)))
        good &= exactly(f"gathered-bytes-saved-at-{share}", sum(r["saved_bytes_of_gathered"] for r in every))
        good &= exactly(f"gathered-bytes-written-at-{share}", sum(r["gathered_written_bytes"] for r in every))
    return rows, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--shares", type=int, nargs="+", default=None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--floor", action="store_true", help="also train with the smallest budget")
    parser.add_argument("--equal-steps", type=int, default=20, help="most steps whose losses are compared")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--updates", default="step")
    parser.add_argument("--plan-time", default="3s")
    parser.add_argument("--shape", type=int, nargs=len(NAMES), default=None, metavar=NAMES)
    parser.add_argument("--deepspeed", default="", metavar="PYTHON")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    kind = "ways" if args.ways else "bytes"
    args.shares = args.shares or ([100, 40, 25] if args.ways else [40, 25])
    args.length = args.length or (128 if args.ways else 16)
    args.shape = args.shape or SHAPES[kind]
    rows, good = (ways if args.ways else moved_bytes)(args)
    if args.write is not None:
        write(args, rows)
    return 0 if good else 1


def write(args: argparse.Namespace, rows: Runs) -> None:
    """Add the rows to a JSON file of results."""
    kept = json.loads(args.write.read_text()) if args.write.exists() else {"runs": []}
    cores = os.cpu_count()
    kept["machine"] = f"{cores} cores; torch {torch.__version__} on the CPU, gloo"
    command = "python benchmarks/ranks/per_rank.py " + " ".join(sys.argv[1:])
    names = ("steps", "batch", "length", "updates")
    about = {
        "command": command,
        "shape": dict(zip(NAMES, args.shape)),
        **{n: getattr(args, n) for n in names},
    }
    kept["runs"].append({**about, "rows": rows})
    args.write.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
