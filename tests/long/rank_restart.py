"""A sharded training on two ranks, one of which is killed. torchrun starts the ranks again, and they resume
from the last distributed checkpoint.

    python tests/long/rank_restart.py [--steps 8] [--kill-at 4] [--inner inductor] [--dir /mnt/ssd]

Each step is saved by torch.distributed.checkpoint. The losses, weights and states are equal, bit for bit, to
the ones of a run that was not stopped. After the kill, no named file of a store has bytes. The script prints
lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from says import as_it_is, at_least, at_most, exactly
from store_rig import Left, disk_for
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import teraio
from teraio.units import parse_bytes

WIDTH, LAYERS, ROWS = 256, 8, 64
MEMORY = "7MiB"  # teraio reserves 4 MiB; weights, gradients and Adam's states of a rank take 4 MiB
RANKS = 2
RESUMES_WITHIN_S = 120.0
LIMIT_S = 600  # for the ranks of one run
ENVIRONMENT = {
    "TERAIO_CACHE_DIR": "off",
    "TERAIO_PLANNER": "greedy",
    # Otherwise, torch 2.13 gives the restarted ranks the key-value store of the ended ranks. The restarted
    # ranks read old addresses in it, and cannot connect.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def build_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [[torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()] for _ in range(LAYERS)]
    return torch.nn.Sequential(*[module for pair in layers for module in pair])


class Rank:
    """The training of one rank, from the last checkpoint to the last step."""

    def __init__(self, folder: Path, inner: str) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self.model = teraio.shard(build_model(), init_device_mesh("cpu", (RANKS,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        options: Any = {
            "memory": MEMORY,
            "inner": inner,
            "warmup": 2,
            "planning": "inline",
            "store": str(folder / f"store{self.rank}"),
        }
        self.compiled: Any = torch.compile(self.model, backend="teraio", options=options, dynamic=False)
        self.losses: list[float] = []

    def resume(self) -> None:
        """Load the last checkpoint, if there is one."""
        last = self.folder / "last.json"
        if last.exists():
            about = json.loads(last.read_text())
            self.losses = about[f"losses{self.rank}"]
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state: dict[str, Any] = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=about["checkpoint"])
            set_state_dict(
                self.model, self.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"]
            )

    def save(self, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint = str(self.folder / f"step{step}")
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)
        losses: list[Any] = [None] * RANKS
        dist.all_gather_object(losses, self.losses)
        if self.rank == 0:
            about = {"checkpoint": checkpoint, **{f"losses{rank}": each for rank, each in enumerate(losses)}}
            (self.folder / "next.json").write_text(json.dumps(about))
            os.replace(self.folder / "next.json", self.folder / "last.json")

    def train(self, steps: int, kill_at: int) -> None:
        first = len(self.losses)
        for step in range(first, steps):
            numbers = torch.Generator().manual_seed(RANKS * step + self.rank)
            batch = torch.randn(ROWS, WIDTH, generator=numbers)
            loss = self.compiled(batch).square().mean()
            loss.backward()
            if step == kill_at and self.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.save(step)
            if step == first and first:
                (self.folder / "resumed").touch()

    def write_result(self) -> None:
        moved = teraio.stats().get("evictions", 0)
        peak = teraio.stats().get("peak_bytes", 0)
        teraio.reset()
        weights = [parameter.detach().to_local() for parameter in self.model.parameters()]  # type: ignore[attr-defined]
        states = [
            value.to_local()
            for state in self.optimizer.state.values()
            for value in state.values()
            if hasattr(value, "to_local")
        ]
        result = {"losses": self.losses, "weights": weights, "states": states, "moved": moved, "peak": peak}
        torch.save(result, self.folder / f"result.{self.rank}")


def train_rank(folder: Path, steps: int, kill_at: int, inner: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(folder, inner)
    rank.resume()
    rank.train(steps, kill_at)
    rank.write_result()
    dist.destroy_process_group()


def run_ranks(folder: Path, args: argparse.Namespace, kill_at: int) -> list[dict[str, Any]]:
    """Train on all ranks with torchrun, and return the result of each rank."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
        *("--nproc-per-node", str(RANKS), __file__, "--train", str(folder)),
        *("--steps", str(args.steps), "--kill-at", str(kill_at), "--inner", args.inner),
    ]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | ENVIRONMENT, timeout=LIMIT_S
    )
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
        raise SystemExit(1)
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(RANKS)]


def count_differences(one: dict[str, Any], other: dict[str, Any], part: str) -> int:
    pairs = list(zip(one[part], other[part], strict=True))
    return sum(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def compare_runs(folder: Path, args: argparse.Namespace) -> bool:
    began = time.monotonic()
    whole = run_ranks(folder / "whole", args, -1)
    whole_s, began = time.monotonic() - began, time.monotonic()
    stopped = run_ranks(folder / "stopped", args, args.kill_at)
    stopped_s = time.monotonic() - began
    killed, resumed = ((folder / "stopped" / name).stat().st_mtime for name in ("killed", "resumed"))
    left = [Left(folder / "stopped" / f"store{rank}").named_bytes for rank in range(RANKS)]
    passed = [
        as_it_is("seconds-not-stopped", whole_s),
        as_it_is("seconds-stopped", stopped_s),
        at_most("seconds-from-kill-to-next-step", resumed - killed, RESUMES_WITHIN_S),
        *(
            exactly(f"different-{part}", sum(count_differences(*pair, part) for pair in zip(whole, stopped)))
            for part in ("losses", "weights", "states")
        ),
        exactly("steps", len(stopped[0]["losses"]), args.steps),
        at_least("evictions", min(each["moved"] for each in stopped), 1),
        as_it_is("largest-peak-over-memory", max(each["peak"] for each in stopped) / parse_bytes(MEMORY)),
        exactly("named-bytes-in-stores", sum(left)),
    ]
    return all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=4)
    parser.add_argument("--inner", choices=("inductor", "eager"), default="eager")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--train", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train_rank(args.train, args.steps, args.kill_at, args.inner)
        return 0
    with tempfile.TemporaryDirectory(dir=disk_for(args.dir, "rank_restart")) as name:
        return 0 if compare_runs(Path(name), args) else 1


if __name__ == "__main__":
    raise SystemExit(main())
