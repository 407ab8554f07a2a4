"""A fine-tuning of a model whose weights alone are larger than the budget.

By default the example trains all weights. With `--rank` it trains only small matrices beside frozen weights
(LoRA).

python examples/larger_than_memory.py --memory 300MiB --hidden 1024 --layers 16           # 0.9 GiB of weights
python examples/larger_than_memory.py --memory 300MiB --hidden 1024 --layers 16 --rank 8
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import teraio
from teraio.cli.demo_model import Llama, Shape


class Lora(nn.Module):
    """A frozen layer plus the product of two small trained matrices."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + x @ self.down.t() @ self.up.t()


def make_model(args: argparse.Namespace) -> Llama:
    shape = Shape(args.vocabulary, args.hidden, args.hidden * 11 // 4, args.layers, args.heads, args.heads)
    model = Llama(shape)
    if args.rank:
        model.requires_grad_(False)
        for layer in model.layers:
            layer.attention.q_proj = Lora(layer.attention.q_proj, args.rank)
            layer.attention.v_proj = Lora(layer.attention.v_proj, args.rank)
    return model


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="300MiB", help="the budget: 300MiB, 80%%")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--rank", type=int, default=0, help="rank of LoRA's matrices; 0 trains all weights")
    parser.add_argument("--steps", type=int, default=6)
    for name, default in {"vocabulary": 4096, "hidden": 1024, "layers": 16, "heads": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=256, help="tokens in a batch")
    args = parser.parse_args()

    torch.manual_seed(0)
    with teraio.init(memory=args.memory, inner=args.inner):
        model = make_model(args)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"weights {mib(size_bytes)}, of which {mib(teraio.stats()['resident_bytes'])} are in memory")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    compiled = torch.compile(model, backend="teraio")
    for step in range(args.steps):
        tokens = torch.randint(0, args.vocabulary, (1, args.tokens + 1))
        began = time.perf_counter()
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - began:.2f} s")
    counts = teraio.stats()
    peak = mib(counts["peak_bytes"] - counts["reserve_bytes"])
    print(f"peak {peak} of tensors, memory {mib(counts['budget_bytes'])}")


if __name__ == "__main__":
    main()
