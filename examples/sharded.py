"""A training on several ranks (processes). Each rank keeps a shard of every weight, within its own budget.

torchrun --nproc-per-node 2 examples/sharded.py --memory 96MiB

With `--checkpoint FOLDER`, the example writes a checkpoint after the last step. If the folder has a
checkpoint, the example continues from it, with any number of ranks. Without torchrun, it runs with one rank.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import teraio
from teraio.cli.demo_model import Llama, Shape

SETTINGS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="96MiB", help="the budget of each rank: 96MiB, 80%%")
    parser.add_argument("--inner", default="eager", choices=("inductor", "eager"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint")
    for name, default in {"vocabulary": 2048, "hidden": 512, "layers": 8, "heads": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a rank's batch")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)  # torchrun sets these variables
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden = args.hidden
    model = Llama(Shape(args.vocabulary, hidden, hidden * 11 // 4, args.layers, args.heads, args.heads))
    model = teraio.shard(model, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.checkpoint is not None and (args.checkpoint / ".metadata").exists():
        load_checkpoint(model, optimizer, args.checkpoint)
    options: Any = {"memory": args.memory, "inner": args.inner, "warmup": 2}
    compiled = torch.compile(model, backend="teraio", options=options)
    for step in range(args.steps):
        began = time.perf_counter()
        draw = torch.Generator().manual_seed(ranks * step + rank)
        tokens = torch.randint(args.vocabulary, (1, args.tokens + 1), generator=draw)
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)  # the mean over the ranks, for the line below
        if rank == 0:
            peak = teraio.stats()["step_peak_bytes"] / 2**20
            took = time.perf_counter() - began
            print(f"step {step}: loss {loss.item():.4f}, peak {peak:.1f} MiB of {args.memory}, {took:.2f} s")
    report(model, optimizer, rank)
    if args.checkpoint is not None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=args.checkpoint)
    dist.destroy_process_group()


def load_checkpoint(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def report(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Print the bytes of this rank's part of the training, and the bytes of the whole training."""
    tensors: list[Any] = [*model.parameters()]
    tensors += [v for each in optimizer.state.values() for v in each.values() if hasattr(v, "to_local")]
    with torch.no_grad():
        own = sum(tensor.to_local().nbytes for tensor in tensors)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    print(
        f"rank {rank}: {own / 2**20:.1f} MiB of {whole / 2**20:.1f} MiB of weights and states; "
        f"{teraio.stats()['fetches']} fetches"
    )


if __name__ == "__main__":
    main()
