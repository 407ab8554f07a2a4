"""One training on several gloo ranks in a given way, for `sharded.py` beside this file.

    python benchmarks/ranks/trained_ranks.py '{"way": "teraio", "ranks": 2, "memory": "96MiB", ...}'

plain      teraio.shard, and teraio's programs without the engine
teraio     teraio.shard within a budget per rank
fsdp2      torch's `fully_shard` on each block and on the model, not compiled
deepspeed  DeepSpeed's ZeRO-3, not compiled

The ranks are processes that this script forks. It prints a JSON list with one object per rank. Peaks count
from the first step that is compared: the third step, or with teraio the first one with its final plan.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import counting_allocator
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

WARM_STEPS = 40  # teraio ends its measurements and has its plan within so many steps
LIMIT = timedelta(seconds=300)
DUMP_S = 280  # if a step takes longer, the stacks of all threads are printed before the limit ends the rank
LARGE_BYTES = 64 << 10  # smaller weights could have the size of an activation by chance
OPTIONS = ("memory", "updates", "warmup", "plan_time")  # of teraio
SETTLED = 2  # steps before the compared ones, after the first step with the final plan


def main() -> None:
    request: dict[str, Any] = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="teraio-ranks-") as folder:
        ranks = request["ranks"]
        torch.multiprocessing.start_processes(work, (folder, request), nprocs=ranks, start_method="fork")
        print(json.dumps([json.loads(Path(folder, f"{rank}").read_text()) for rank in range(ranks)]))


def work(rank: int, folder: str, request: dict[str, Any]) -> None:
    """Train as this rank, and write its figures to a file in `folder`."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{request['ranks']}", TERAIO_CACHE_DIR="off"
    )
    os.environ.update(LOCAL_WORLD_SIZE=f"{request['ranks']}", LOCAL_SIZE=f"{request['ranks']}")
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{request['port']}")
    os.environ.setdefault("TERAIO_LOG", "error")
    is_ours = request["way"] == "teraio"
    counting = counting_allocator.install_over_ours() if is_ours else counting_allocator.install()
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=request["ranks"], timeout=LIMIT
    )
    if request["way"] == "plain":
        os.environ["TERAIO_DISABLE"] = "1"
    if request["way"] != "deepspeed":
        train_small(request)
    found = train(request, rank, counting)
    Path(folder, f"{rank}").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def make_llama(shape: dict[str, int]) -> torch.nn.Module:
    from teraio.cli.demo_model import Llama, Shape

    torch.manual_seed(0)
    return Llama(Shape(**shape))


class Training:
    """A model and its optimizer in one of the ways, and the step of its loop."""

    def __init__(self, way: str, shape: dict[str, int], options: dict[str, Any]) -> None:
        model = make_llama(shape)
        self.whole_bytes = {p.nbytes for p in model.parameters()}
        self.engine: Any = None
        if way == "deepspeed":
            self._begin_deepspeed(model)
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if way == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in model.get_submodule("layers").children():
                fully_shard(block, mesh=mesh)
            self.call: Any = fully_shard(model, mesh=mesh)
        else:
            import teraio

            model = teraio.shard(model, mesh)
            options = {"inner": "eager", **options}
            self.call = torch.compile(model, backend="teraio", options=options, fullgraph=True)
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def _begin_deepspeed(self, model: torch.nn.Module) -> None:
        import deepspeed

        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
        zero |= {"reduce_bucket_size": 5_000_000, "stage3_max_live_parameters": 0}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        deepspeed.init_distributed("gloo")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model = model
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, tokens: torch.Tensor) -> float:
        """Train on one batch, and return its loss."""
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.engine is not None:
            loss = self.engine(*batch)
            self.engine.backward(loss)
            self.engine.step()
        else:
            loss = self.call(*batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.item())

    def persistent_bytes(self) -> int:
        """Return the bytes of this rank's shards of weights and states."""
        tensors: list[Any] = list(self.model.parameters())
        for states in self.optimizer.state.values():
            tensors += [state for state in states.values() if isinstance(state, torch.Tensor)]
        with torch.no_grad():
            return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)


def train_small(request: dict[str, Any]) -> None:
    """Train a very small model without a budget, so that the code of all libraries is loaded."""
    was = os.environ.get("TERAIO_DISABLE")
    os.environ["TERAIO_DISABLE"] = "1"
    shape = {"vocabulary": 64, "hidden": 32, "intermediate": 64, "layers": 1, "heads": 2, "key_heads": 1}
    small = Training(request["way"], shape, {})
    for _ in range(2):
        small.step(torch.zeros(1, 9, dtype=torch.int64))
    torch._dynamo.reset()
    if was is None:
        del os.environ["TERAIO_DISABLE"]


def train(request: dict[str, Any], rank: int, counting: counting_allocator.Counting) -> dict[str, Any]:
    """Train until teraio has its final plan, and then the compared steps."""
    from teraio.runtime.device import rss

    way, steps, shape = request["way"], request["steps"], request["shape"]
    evicted = count_evictions() if way == "teraio" else Counter()
    gc.collect()
    before_alive, before_rss = counting.alive_bytes(), rss.resident_bytes()
    options = {name: request[name] for name in OPTIONS if name in request} if way == "teraio" else {}
    training = Training(way, shape, options)
    gc.collect()
    losses, took, rows, settled = [], [], [], 0
    for step in range(WARM_STEPS + steps):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        size = request["batch"], request["length"] + 1
        tokens = torch.randint(shape["vocabulary"], size, generator=draw)
        began = time.perf_counter()
        faulthandler.dump_traceback_later(DUMP_S)
        losses.append(training.step(tokens).hex())
        faulthandler.cancel_dump_traceback_later()
        took.append(time.perf_counter() - began)
        rows.append(stats_of(way))
        if rank == 0:
            print(f"step {step}: {took[-1]:.2f} s, {settled} settled", file=sys.stderr, flush=True)
        if settled == SETTLED:
            counting.reset_peak()
            rss.reset_peak()
            evicted.clear()
        if settled == steps + SETTLED:
            break
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, bool(rows[-1].get("steady", step)))
        late = step >= request.get("least_steps", 0) - steps - SETTLED - 1
        settled = settled + 1 if all(states) and late else 0
    found = {
        "rank": rank,
        "losses": losses,
        "took_s": took[-steps:],
        "peak_bytes": counting.peak_bytes() - before_alive,
        "peak_rss_bytes": rss.peak_bytes() - before_rss,
        "compared_steps": settled - SETTLED,
    }
    if way == "teraio":
        found |= figures_of_engine(training, rows, steps, evicted)
    return found


def stats_of(way: str) -> dict[str, Any]:
    if way != "teraio":
        return {}
    import teraio

    return {**teraio.stats()}


def count_evictions() -> Counter[tuple[str, int]]:
    """Count the writes of evictions by the kind and the size of their tensors, from now on."""
    from teraio.runtime.ledger.record import Record

    counts: Counter[tuple[str, int]] = Counter()
    evicting = Record.evicting

    def count(record: Record, pending: Any) -> None:
        if pending is not None:
            counts[record.kind, record.size_bytes] += 1
        evicting(record, pending)

    setattr(Record, "evicting", count)  # noqa: B010  mypy takes no other assignment
    return counts


def figures_of_engine(
    training: Training, rows: list[dict[str, Any]], steps: int, evicted: Counter[tuple[str, int]]
) -> dict[str, Any]:
    """Return the bytes that the compared steps moved, and the bytes of gathered weights among them."""
    from teraio.runtime.engine import engine

    first, end = rows[-steps - 1], rows[-1]
    found = {n: (end[n] - first[n]) / steps for n in ("written_bytes", "read_bytes", "misses", "stall_ns")}
    names = ("budget_bytes", "step_peak_bytes", "reserve_bytes", "overrun_bytes", "bound_ns", "plans")
    found |= {name: end[name] for name in names if name in end}
    assert engine.ENGINE is not None
    records = list(engine.ENGINE.residency.records.values())
    large = {size for size in training.whole_bytes if size >= LARGE_BYTES}
    saved = [
        buffer.size_bytes
        for schedule in known_schedules()
        if schedule.kind == "forward"
        for buffer in schedule.buffers
        if buffer.role == "saved"
    ]
    kinds: Counter[str] = Counter()
    for (kind, size), count in evicted.items():
        kinds[kind] += size * count
    own = ("weight", "state", "grad")
    gathered = sum(size * n for (kind, size), n in evicted.items() if kind not in own and size in large)
    return found | {
        "shards_bytes": training.persistent_bytes(),
        "records_bytes": sum(each.size_bytes for each in records if each.kind in ("weight", "state")),
        "evicted_bytes_by_kind": {kind: size / steps for kind, size in kinds.items()},
        "saved_buffers": len(saved),
        "saved_bytes_of_gathered": sum(size for size in saved if size in large),
        "gathered_written_bytes": gathered,
    }


def known_schedules() -> list[Any]:
    """Return the schedules of all programs of this process."""
    from teraio.runtime.step.program import Program

    return [each.schedule for each in gc.get_objects() if type(each) is Program]


if __name__ == "__main__":
    main()
