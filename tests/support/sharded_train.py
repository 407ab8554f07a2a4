"""Scenarios on two gloo ranks in one process group. The script prints one JSON line per scenario and rank.

sharded_train.py FOLDER MEMORY INNER [SCENARIO...]
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS = 2


def work(rank: int, folder: str, memory: str, inner: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["TERAIO_LOG"] = os.environ.get("TERAIO_LOG", "error")
    limit = timedelta(seconds=300)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=limit)
    import sharded_scenarios

    for scenario in sharded_scenarios.SCENARIOS:
        name = scenario.__name__
        if names and name not in names:
            continue
        began = time.perf_counter()
        try:
            plain, ours = (
                sharded_scenarios.seen_in(scenario, each, inner, Path(folder)) for each in (None, memory)
            )
            found = sharded_scenarios.difference(ours, plain)
        except Exception:  # noqa: BLE001  the other rank waits for this rank, so nothing can go on
            print(json.dumps({"scenario": name, "rank": rank, "error": traceback.format_exc()}), flush=True)
            os._exit(1)
        seconds = round(time.perf_counter() - began, 1)
        row = {
            "scenario": name,
            "rank": rank,
            "values": len(ours),
            "difference": found[:500],
            "seconds": seconds,
        }
        print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    folder, memory, inner, *names = sys.argv[1:]
    Path(folder).mkdir(exist_ok=True)
    torch.multiprocessing.start_processes(
        work, (folder, memory, inner, names), nprocs=RANKS, start_method="fork"
    )


if __name__ == "__main__":
    main()
