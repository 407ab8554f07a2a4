"""A logistic regression on a matrix that is larger than the budget.

The matrix is a list of chunks, and each chunk is a buffer of a compiled module. In every epoch teraio fetches
the chunks from the disk, and writes nothing. The disk limits the speed of an epoch. So the example runs the
same epochs over a memory-mapped file, for comparison. Before each of these epochs, the example removes the
file's pages from the system's cache, as if the file were larger than memory.

python examples/linear_model.py --memory 200MiB --chunks 64          # a matrix of 1 GiB
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import arguments, equal, mib, sizes, table, without_teraio
from torch import nn

import teraio

Rows = tuple[torch.Tensor, torch.Tensor]


class Chunk(nn.Module):
    """A chunk of the matrix: some rows with their labels."""

    features: torch.Tensor
    labels: torch.Tensor

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("labels", labels)

    def forward(self, weights: torch.Tensor, rate: float) -> Rows:
        """Take a step of gradient descent on the chunk's rows. Return the new weights, and the sums of the
        loss and of the correct predictions.
        """
        score = self.features @ weights
        error = torch.sigmoid(score) - self.labels
        loss = F.binary_cross_entropy_with_logits(score, self.labels, reduction="sum")
        hits = ((score > 0) == (self.labels > 0.5)).sum()
        weights = weights - rate / len(self.labels) * (self.features.t() @ error)
        return weights, torch.stack((loss, hits.float()))


class Epoch(nn.Module):
    """One pass over all rows, in the order in which the matrix is stored."""

    def __init__(self, chunk: Callable[[int], Rows], chunks: int) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(Chunk(*chunk(number)) for number in range(chunks))

    def forward(self, weights: torch.Tensor, rate: float) -> Rows:
        sums = torch.zeros(2)
        for chunk in self.chunks:
            weights, more = chunk(weights, rate)
            sums = sums + more
        return weights, sums


def generate_rows(args: argparse.Namespace, number: int) -> Rows:
    """Generate the features and labels of chunk `number`. A twentieth of the labels is wrong."""
    truth = torch.randn(args.features, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1 + number)
    features = torch.randn(args.rows, args.features, generator=random)
    flipped = torch.rand(args.rows, generator=random) < 0.05
    return features, ((features @ truth > 0) ^ flipped).float()


def run_epochs(epochs: Callable[[], nn.Module], args: argparse.Namespace, name: str) -> Iterator[list[float]]:
    """Yield the loss and the share of correct predictions for each epoch. Print both, and the rate at which
    the epoch read the matrix.
    """
    matrix_bytes = args.chunks * args.rows * args.features * 4
    weights = torch.zeros(args.features)
    for epoch in range(args.steps):
        run = epochs()
        began = time.perf_counter()
        weights, sums = run(weights, args.rate)
        took_s = time.perf_counter() - began
        del run
        loss, hits = (sums / (args.chunks * args.rows)).tolist()
        rate = f"{took_s:.2f} s, {matrix_bytes / took_s / 1e9:.2f} GB/s"
        print(f"{name} epoch {epoch}: loss {loss:.4f}, {hits:.1%} right, {rate}")
        yield [loss, hits]


def losses_of_mapped_file(args: argparse.Namespace, folder: str) -> list[list[float]]:
    """Run all epochs without teraio, and map the matrix's file again for each epoch. Return the figures of
    each epoch.
    """
    file, rows = Path(folder, "matrix"), args.rows * args.features
    labels = []
    with file.open("wb") as stream:
        for number in range(args.chunks):
            features, label = generate_rows(args, number)
            stream.write(features.numpy().tobytes())
            labels.append(label)
        os.fsync(stream.fileno())

    def chunk(number: int) -> Rows:
        matrix = torch.from_file(str(file), shared=True, size=args.chunks * rows)
        return matrix[number * rows :][:rows].view(args.rows, args.features), labels[number]

    def epochs() -> nn.Module:
        gc.collect()  # frees the previous epoch's mapping, which would keep the file's pages in memory
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        model = Epoch(chunk, args.chunks)
        model.compile(backend="teraio", options={"inner": args.inner})
        return model

    with without_teraio():
        return list(run_epochs(epochs, args, "mapped file,"))


def main() -> None:
    parser = arguments(__doc__ or "", memory="200MiB", steps=8, inner="eager")
    sizes(parser, chunks=64, rows=8192, features=512)
    parser.add_argument("--rate", type=float, default=0.3, help="step size, default 0.3")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with two threads, sums differ in the last bit from run to run

    with torch.no_grad(), tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        plain = losses_of_mapped_file(args, folder)
        with teraio.init(memory=args.memory, inner=args.inner):
            model = Epoch(lambda number: generate_rows(args, number), args.chunks)
        model.compile(backend="teraio")
        ours, written = [], []
        for epoch in run_epochs(lambda: model, args, "teraio,"):
            ours.append(epoch)
            written.append(teraio.stats()["written_bytes"])
    table(
        matrix=mib(args.chunks * args.rows * args.features * 4),
        written_until_the_first_epoch_ended=mib(written[0]),
        written_after_that=mib(written[-1] - written[0]),
        losses_equal_those_of_the_mapped_file=equal(ours, plain),
    )


if __name__ == "__main__":
    main()
