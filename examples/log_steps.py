"""Figures of each step, written to TensorBoard. Without TensorBoard, the example prints them as lines.

    python examples/log_steps.py [--memory 160MiB] [--steps 10] [--inner eager] [--folder runs]

`teraio.integrations.wandb.WandbLogger` does the same for Weights & Biases.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch

from teraio.cli.demo_model import Llama, Shape
from teraio.integrations.step_writer import StepWriter
from teraio.integrations.tensorboard import TensorBoardLogger

SHOWN = ("step_seconds", "step_stall_seconds", "step_misses", "step_peak_bytes", "step_written_bytes")


class Lines(StepWriter):
    """A logger of one's own, which prints a line per step."""

    NAME = "lines"

    def write(self, step: int, figures: Mapping[str, int | float]) -> None:
        print(step, *(f"{name}={figures[f'teraio/{name}']}" for name in SHOWN))


def logger(folder: str) -> StepWriter:
    """Return a logger for TensorBoard, or one that prints lines if TensorBoard is missing."""
    try:
        return TensorBoardLogger(folder)
    except ImportError:
        return Lines()


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
    with logger(args.folder):
        for _ in range(args.steps):
            tokens = torch.randint(0, model.shape.vocabulary, (8, 257))
            compiled(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
