"""Trainings on two ranks, in which rank 1 fails. They run at the same time.

failing_ranks.py FOLDER CASE ...

    budget    rank 1 cannot fit the first program; it sleeps, while rank 0 waits in a collective
    torn      rank 1 catches the error of `budget`, and goes on with more memory; later, reads of its store
              fail in the middle of an optimizer's step, and it sleeps
    killed    rank 1 kills its own process

The script prints a JSON object per case: the exit code of rank 0, the output of both ranks, and the error of
rank 1. `seconds` is the time from the failure of rank 1 to the end of rank 0. `left` is the number of bytes
in named files of the ranks' stores.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from store_rig import Left
from torch.distributed.device_mesh import init_device_mesh

import teraio
from teraio import _native, backend
from teraio.errors import BudgetError
from teraio.ranks.failures import LOOK_EVERY_S
from teraio.runtime.optimizer import step_call
from teraio.runtime.store.store import Store
from teraio.runtime.torch_extension.observer import observer_of_process

WIDTH, LAYERS, ROWS, STEPS = 192, 5, 32, 9
MEMORY, TOO_SMALL = 4 * 2**20 + 3 * 2**18, 2**22 + 2**17  # teraio reserves 4 MiB
LIMIT_S = 60.0
FAILS_AT = 2  # the step in which rank 1 fails in the cases `torn` and `killed`
TORN_AT = 3  # number of the bucket at which an optimizer's step is torn
OPEN_BUCKET, OPEN_STORE = step_call.OptimizerCall.open_bucket, Store.open


class Run:
    """The training of one rank in one case."""

    def __init__(self, case: str, rank: int, folder: Path) -> None:
        self.case, self.rank, self.folder = case, rank, folder
        self.failing = False  # True: rank 1, in the step in which it fails
        self.shims: list[_native.FaultIo] = []
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers)
        teraio.shard(model, init_device_mesh("cpu", (2,)))
        fails = rank == 1 and case in {"budget", "torn"}
        options: Any = {
            "inner": "eager",
            "warmup": 99,
            "store": str(folder / f"store{rank}"),
            "memory": TOO_SMALL if fails else MEMORY,
        }
        self.compiled: Any = torch.compile(model, backend="teraio", options=options, dynamic=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, step: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(2 * step + self.rank)
        loss: torch.Tensor = self.compiled(torch.randn(ROWS, WIDTH, generator=numbers)).square().mean()
        return loss

    def train(self) -> None:
        for step in range(STEPS):
            try:
                loss = self.loss(step)
            except BudgetError as error:
                self.note_failure(error)
                if self.case != "torn" or self.rank == 0:
                    raise
                time.sleep(LOOK_EVERY_S + 0.5)  # rank 0 sees the failure meanwhile
                teraio.set_memory(MEMORY)
                loss = self.loss(step)
            loss.backward()
            self.failing = step == FAILS_AT and self.rank == 1
            if self.failing and self.case == "killed":
                self.note_failure("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.step()
            self.optimizer.zero_grad()
            print(f"trained step {step}", flush=True)

    def open_store(self, *places: Any, **settings: Any) -> Store:
        return OPEN_STORE(*places, wrap=self.wrap_io, **settings)

    def wrap_io(self, inner: _native.Io) -> _native.Io:
        self.shims.append(_native.FaultIo(inner))
        return self.shims[-1]

    def open_bucket(self, call: step_call.OptimizerCall, at: int) -> None:
        """Open a bucket of the optimizer's step. In the middle of the step that fails, let all reads fail."""
        if self.failing and self.case == "torn" and at == TORN_AT:
            for shim in self.shims:
                shim.add("EIO", "read", sticky=True)
        OPEN_BUCKET(call, at)

    def note_failure(self, error: object) -> None:
        """Write the error into the folder. The file's time is the time of the failure."""
        (self.folder / "failed").write_text(f"{type(error).__name__}: {error}")


def become_rank(case: str, rank: int, port: int, folder: Path) -> NoReturn:
    out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(case, store), rank=rank, world_size=2, timeout=timedelta(seconds=50)
    )
    run = Run(case, rank, folder)
    code = 0

    def open_bucket(call: step_call.OptimizerCall, at: int) -> None:
        run.open_bucket(call, at)

    try:
        with (
            patch.object(Store, "open", run.open_store),
            patch.object(step_call.OptimizerCall, "open_bucket", open_bucket),
        ):
            run.train()
    except RuntimeError as error:
        print("".join(traceback.format_exception_only(error)), flush=True)
        code = 3
        if rank == 1:
            run.note_failure(error)
            time.sleep(LIMIT_S)
    sys.stdout.flush()
    os._exit(code)


def start_rank(case: str, rank: int, port: int, folder: Path) -> int:
    """Start the process of a rank, and return its number."""
    pid = os.fork()
    if pid == 0:
        become_rank(case, rank, port, folder)
    return pid


def watch_case(case: str, ranks: list[int], folder: Path) -> dict[str, Any]:
    """Wait for the end of rank 0, then end rank 1. Return the facts about the case."""
    _, status = os.waitpid(ranks[0], 0)
    at = time.time()
    failed = folder / "failed"
    seconds = at - failed.stat().st_mtime
    os.kill(ranks[1], signal.SIGKILL)
    os.waitpid(ranks[1], 0)
    return {
        "case": case,
        "code": os.waitstatus_to_exitcode(status),
        "output": (folder / "out0").read_text(),
        "other": (folder / "out1").read_text(),
        "error": failed.read_text(),
        "seconds": seconds,
        "left": Left(folder / "store0").named_bytes + Left(folder / "store1").named_bytes,
    }


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    backend.register_for_dynamo_resets()  # the ranks need not import the backend
    observer_of_process()  # the ranks need not compile the observer
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = {}
    for case in cases:
        (folder / case).mkdir(parents=True)
        started[case] = [start_rank(case, rank, server.port, folder / case) for rank in (0, 1)]
    with ThreadPoolExecutor(len(cases)) as pool:
        watched = [pool.submit(watch_case, case, ranks, folder / case) for case, ranks in started.items()]
        for each in watched:
            print(json.dumps(each.result()), flush=True)


if __name__ == "__main__":
    main()
