"""A training loop within a memory budget. Only the call of `torch.compile` mentions teraio.

python examples/train_llama.py --memory 200MiB
"""

from __future__ import annotations

import argparse
import time

import torch

import teraio
from teraio.cli.demo_model import Llama, Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="80%", help="the budget: 200MiB, 80%%")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    with torch.device(args.device):
        model = Llama(Shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    compiled = torch.compile(model, backend="teraio", options={"memory": args.memory, "inner": args.inner})
    for step in range(args.steps):
        tokens = torch.randint(0, model.shape.vocabulary, (8, 257), device=args.device)
        began = time.perf_counter()
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - began:.2f} s")
    counts = teraio.stats()
    print(f"{counts['fetches']} fetches, {counts['misses']} of them asked for by no plan")


if __name__ == "__main__":
    main()
