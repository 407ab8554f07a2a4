"""Random trainings of sharded models on several ranks. All numbers must equal the numbers without a budget.

    python tests/long/sharded.py [--ranks 2] [--cases 20] [--first 0] [--inner eager]

One process group runs all cases. In each case, each rank has its own budget, random plan, delays and changes
of the budget (tests/support/sharded_cases.py). The smallest budget of a case has no such disturbances. The
script prints one line per case, and at the end lines
`name value target PASS|FAIL`. It exits with 1 if a line says FAIL. A hang ends with torch's time limit.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import counting_allocator
import torch
import torch.distributed as dist
import torch.multiprocessing
from says import exactly

LIMIT_S = 120
DUMP_S = 100  # if a training takes longer, the stacks of all threads are printed before the limit ends it


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.6, 0.4, 0.25])
    args = parser.parse_args()
    counting_allocator.build()  # one build for all ranks
    with tempfile.TemporaryDirectory(prefix="teraio-sharded-") as folder:
        processes = torch.multiprocessing.start_processes(
            work, (folder, args), nprocs=args.ranks, join=False, start_method="fork"
        )
        while not processes.join():
            pass
        counts: Counter[str] = Counter(torch.load(Path(folder, "counts")))
    print(", ".join(f"{name} {value}" for name, value in sorted(counts.items())), file=sys.stderr)
    good = exactly("sharded-trainings-that-differ", counts["different"])
    good &= exactly("sharded-trainings-that-failed", counts["failed"])
    good &= exactly("sharded-trainings-over-the-budget-after-the-second-step", counts["over"])
    return 0 if good else 1


def work(rank: int, folder: str, args: Any) -> None:
    counting = counting_allocator.install_over_ours()
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(args.ranks), TERAIO_CACHE_DIR="off")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor{rank}"
    os.environ.setdefault("TERAIO_LOG", "error")
    os.environ.setdefault("TERAIO_PLANNING", "inline")
    meeting, limit = f"file://{folder}/meeting", timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.ranks, timeout=limit)
    import sharded_cases

    sharded_cases.COUNTING.append(counting)
    counts: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.cases):
        one_case(sharded_cases, seed, args, counts)
    if rank == 0:
        torch.save(dict(counts), Path(folder, "counts"))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def one_case(cases: Any, seed: int, args: Any, counts: Counter[str]) -> None:
    """Run one seed with all budgets, and add up the verdicts of all ranks."""
    began, rank = time.perf_counter(), dist.get_rank()
    case = cases.Case.draw(seed, args.ranks, args.inner)
    faulthandler.dump_traceback_later(DUMP_S)
    plain = cases.run_case(case, None)
    faulthandler.dump_traceback_later(DUMP_S)
    least = int(cases.run_case(case, 0).stats["budget_bytes"])
    told = [f"seed {seed} {case.mesh}"]
    for number, share in enumerate(args.shares):
        calm = number == len(args.shares) - 1
        trouble = cases.Trouble() if calm else cases.Trouble.draw(1000 * seed + 10 * number + rank)
        budget = max(int(share * plain.peak_bytes), least + (256 << 10))
        faulthandler.dump_traceback_later(DUMP_S)
        try:
            ours = cases.run_case(case, budget, trouble)
        except Exception:  # noqa: BLE001  the other ranks wait for this rank, so nothing can go on
            traceback.print_exc()
            print(f"rank {rank} seed {seed} share {share} {case} {trouble}", flush=True)
            os._exit(1)
        different = ours.difference(plain)
        # The engine reports the bytes that plain code takes beyond the budget. An evaluation takes such
        # bytes, and so does a model whose blocks are compiled one by one: plain code gathers its head.
        strict = calm and not case.evaluates and not case.by_blocks
        over = max(0, ours.late_peak_bytes - budget - (0 if strict else ours.stats["overrun_bytes"]))
        over = max(over, ours.late_overrun_bytes if strict else 0)
        verdicts: list[Any] = [None] * args.ranks
        dist.all_gather_object(verdicts, (different, over, ours.stats))
        counts["trainings"] += 1
        counts["different"] += any(each[0] for each in verdicts)
        counts["over"] += any(each[1] for each in verdicts)
        for name in ("evictions", "fetches", "misses", "planned_moves"):
            counts[name] += sum(each[2][name] for each in verdicts)
        part = budget / plain.peak_bytes
        found = "; ".join(each[0] for each in verdicts if each[0]) or "equal"
        told.append(f"{part:.0%} {found} over {[each[1] for each in verdicts]}")
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        print(", ".join(told), f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
