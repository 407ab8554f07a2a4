"""Benchmark of the Store: throughput of tensors to the disk and back, and its CPU cost.

    python benchmarks/io/store.py [--dir /mnt/ssd] [--gib 1] [--rounds 5] [--tensor-mib 64] [--memory-gib 2]

The script measures end to end: tensor -> slab -> disk -> slab -> tensor. The script submits all tensors
together. Two variants, with and without checksums, alternate in every round. The figures are medians over the
rounds. The script prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from teraio.runtime.store.space import Extent
from teraio.runtime.store.store import Store
from teraio.runtime.store.ticket import StoreTicket

CPU_TARGET_S_PER_GB = 0.35


def measure(move: Callable[[], list[StoreTicket]], size_bytes: int) -> tuple[float, float]:
    """Return (GB/s, CPU seconds per GB) of a batch of transfers. All threads of this process count."""
    cpu, wall = time.process_time(), time.perf_counter()
    for ticket in move():
        ticket.wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return size_bytes / wall / 1e9, cpu / (size_bytes / 1e9)


class Variant:
    """A store with or without checksums, and the extent (the place in the store) of each tensor."""

    def __init__(
        self, directory: Path, tensors: list[torch.Tensor], memory_bytes: int, checksums: bool
    ) -> None:
        self.name = "checksums" if checksums else "plain"
        self.tensors = tensors
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)
        self.store = Store(directory, memory_bytes=memory_bytes, checksums=checksums)
        self.extents = [self.store.reserve(tensor.nbytes, "t") for tensor in tensors]
        self.results: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}

    def _pairs(self) -> list[tuple[Extent, int]]:
        return [(extent, tensor.data_ptr()) for extent, tensor in zip(self.extents, self.tensors)]

    def round(self) -> None:
        store = self.store
        out = measure(lambda: [store.write(e, address, "t") for e, address in self._pairs()], self.size_bytes)
        first = [float(tensor[0]) for tensor in self.tensors]
        for tensor in self.tensors:
            tensor[0] = -1.0
        back = measure(lambda: [store.read(e, address, "t") for e, address in self._pairs()], self.size_bytes)
        assert [float(tensor[0]) for tensor in self.tensors] == first
        self.results["write"].append(out)
        self.results["read"].append(back)

    def summary(self) -> dict[str, float]:
        """Return medians. Leave out the first round, because it writes to blocks of the disk that are still
        unwritten.
        """
        numbers: dict[str, float] = {}
        for op, rounds in self.results.items():
            kept = rounds[1:] or rounds
            numbers[f"{op}_gb_per_s"] = round(statistics.median(rate for rate, _ in kept), 3)
            numbers[f"{op}_cpu_s_per_gb"] = round(statistics.median(cpu for _, cpu in kept), 4)
        return numbers


def submit_us(variant: Variant) -> float:
    """Return the time until a call that submits a read returns, as the median over the tensors."""
    times = []
    for extent, address in variant._pairs():
        began = time.perf_counter_ns()
        ticket = variant.store.read(extent, address, "t")
        times.append((time.perf_counter_ns() - began) / 1e3)
        ticket.wait()
    return round(statistics.median(times), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "teraio-benchmark")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor-mib", type=int, default=64)
    parser.add_argument("--memory-gib", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    count = max(1, int(args.gib * 1024) // args.tensor_mib)
    tensors = [torch.rand(args.tensor_mib << 18) for _ in range(count)]
    memory_bytes = int(args.memory_gib * 2**30)
    variants = [Variant(args.dir, tensors, memory_bytes, checksums) for checksums in (True, False)]
    for number in range(args.rounds + 1):
        for variant in variants if number % 2 else variants[::-1]:
            variant.round()
    store = variants[0].store
    result = {
        "benchmark": "store",
        "direct": store.is_direct,
        "slab_bytes_total": store.slab_bytes_total,
        "tensors": count,
        "tensor_bytes": tensors[0].nbytes,
        "rounds": args.rounds,
        "submit_us": submit_us(variants[0]),
        **{variant.name: variant.summary() for variant in variants},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    worst = max(variants[0].summary()[f"{op}_cpu_s_per_gb"] for op in ("write", "read"))
    verdict = "PASS" if worst <= CPU_TARGET_S_PER_GB else "FAIL"
    print(f"store-cpu-s-per-gb {worst} {CPU_TARGET_S_PER_GB} {verdict}", file=sys.stderr)
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
