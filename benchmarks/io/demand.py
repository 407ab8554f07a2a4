"""Benchmark of a fetch on demand while the queue of a drive is full, with different lanes and slabs.

    python benchmarks/io/demand.py [--dir /mnt/ssd] [--settings 8x2 4x16] [--gib 1] [--fetches 40]
                                   [--rounds 5]

A setting is the number of lanes of a drive, and the MiB of a slab. In each round, each setting submits reads
and writes of many large tensors, and so fills the queue. Then it fetches tensors of 2 MiB on demand, one
after the other. The settings alternate. The script prints one JSON object: for each setting, the quartiles of
the time of a fetch on demand, and the throughput of the other transfers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from teraio.runtime.store import slabs
from teraio.runtime.store import store as store_module
from teraio.runtime.store.store import Store

DEMAND_BYTES = 2 << 20
TENSOR_BYTES = 32 << 20
MEMORY_BYTES = 2 << 30  # so that slabs take 64 MiB


class Setting:
    """A store with a number of lanes and a size of slabs, its tensors, and its results."""

    def __init__(self, directory: Path, text: str, size_bytes: int) -> None:
        self.name = text
        lanes, slab_mib = (int(number) for number in text.split("x"))
        slabs.LANES = store_module.LANES = lanes
        slabs.SLAB_BYTES = slab_mib << 20
        self.store = Store(directory, memory_bytes=MEMORY_BYTES)
        count = max(2, size_bytes // TENSOR_BYTES)
        self.tensors = [torch.rand(TENSOR_BYTES // 4) for _ in range(count)]
        self.extents = [self.store.reserve(TENSOR_BYTES, "t") for _ in self.tensors]
        self.wanted = torch.rand(DEMAND_BYTES // 4)
        self.extent = self.store.reserve(DEMAND_BYTES, "wanted")
        self.times_ms: list[float] = []
        self.rates: list[float] = []
        pairs = zip([*self.extents, self.extent], [*self.tensors, self.wanted])
        for ticket in [self.store.write(extent, tensor.data_ptr(), "t") for extent, tensor in pairs]:
            ticket.wait()

    def round(self, fetches: int) -> None:
        """Fill the queue, half with reads and half with writes, and fetch on demand until the queue is empty
        or `fetches` fetches have ended.
        """
        began = time.perf_counter()
        tickets = [
            (self.store.write if number % 2 else self.store.read)(extent, tensor.data_ptr(), "t")
            for number, (extent, tensor) in enumerate(zip(self.extents, self.tensors))
        ]
        for _ in range(fetches):
            asked = time.perf_counter()
            self.store.read(self.extent, self.wanted.data_ptr(), "wanted", demand=True).wait()
            if tickets[-1].done():
                break
            self.times_ms.append((time.perf_counter() - asked) * 1e3)
        for ticket in tickets:
            ticket.wait()
        self.rates.append(len(tickets) * TENSOR_BYTES / (time.perf_counter() - began) / 1e9)

    def summary(self) -> dict[str, object]:
        quarters = statistics.quantiles(self.times_ms, n=4)
        return {
            "fetches": len(self.times_ms),
            "ms": [round(each, 1) for each in quarters],
            "most_ms": round(max(self.times_ms), 1),
            "others_gb_per_s": round(statistics.median(self.rates), 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "teraio-benchmark")
    parser.add_argument("--settings", nargs="+", default=["8x2", "4x16"], metavar="LANESxMIB")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of the tensors that fill the queue")
    parser.add_argument("--fetches", type=int, default=40, help="most fetches on demand in a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    settings = [Setting(args.dir, text, int(args.gib * 2**30)) for text in args.settings]
    for number in range(args.rounds):
        for setting in settings if number % 2 else settings[::-1]:
            setting.round(args.fetches)
    print(json.dumps({setting.name: setting.summary() for setting in settings}, indent=1))


if __name__ == "__main__":
    main()
