"""Figures of each step, written to TensorBoard. Without TensorBoard, the example prints them as lines.

    python examples/log_steps.py [--memory 160MiB] [--steps 10] [--inner eager] [--folder runs]

`teraio.stats()` returns a plain dict. Keys that begin with `step` describe the last step. Weights & Biases
takes the same dict: `wandb.log({f"teraio/{name}": value for name, value in stats.items()})`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import teraio
from teraio.cli.demo_model import Llama, Shape

SHOWN = (
    "step_ns",
    "step_stall_ns",
    "step_misses",
    "step_peak_bytes",
    "step_written_bytes",
    "step_read_bytes",
)


def logger(folder: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that logs the figures of a step to TensorBoard. If TensorBoard is missing, the
    function prints them.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]
    except ImportError:
        return lambda stats: print(stats["step"], stats["phase"], *(f"{n}={stats[n]}" for n in SHOWN))
    writer = SummaryWriter(folder)

    def write(stats: dict[str, Any]) -> None:
        for name, value in stats.items():
            if isinstance(value, int | float):
                writer.add_scalar(f"teraio/{name}", value, stats["step"])

    return write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--memory", default="160MiB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--inner", default="eager", choices=("inductor", "eager"))
    parser.add_argument("--folder", default="runs", help="folder for TensorBoard")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Llama(Shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    compiled = torch.compile(model, backend="teraio", options={"memory": args.memory, "inner": args.inner})
    log = logger(args.folder)
    for _ in range(args.steps):
        tokens = torch.randint(0, model.shape.vocabulary, (8, 257))
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log({**teraio.stats(), "loss": loss.item()})


if __name__ == "__main__":
    main()
