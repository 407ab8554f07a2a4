"""Benchmark of transfers between memory and files, against fio and a plain pread loop on the same slabs.

    python benchmarks/io/transfer.py --dir /mnt/ssd [--size-mib 1024] [--reps 5] [--json out.json] [--no-fio]

teraio, fio and the loop use O_DIRECT, the same file, block size, depth and page size. fio gets huge pages
through glibc's malloc. The three run alternately within each repetition, because the rate of a disk changes
with time. The script compares medians. It prints one line per figure: `name value target PASS|FAIL`. The exit
code is 1 if any figure fails. CPU seconds per GB count this process alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from teraio import _native

Sample = tuple[float, float]  # GB/s, CPU seconds per GB


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(size: int, run: Callable[[], None]) -> Sample:
    cpu, began = cpu_s(), time.perf_counter()
    run()
    spent = time.perf_counter() - began
    return size / spent / 1e9, (cpu_s() - cpu) / (size / 1e9)


class Bench:
    """A preallocated file and memory on huge pages. Each measurement creates and closes its own engine."""

    def __init__(self, folder: Path, size: int, block: int, depth: int, threads: int) -> None:
        self.path = folder / f"transfer-bench-{os.getpid()}"
        self.size, self.block, self.depth, self.threads = size, block, depth, threads
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, size)
        self.tensor = mmap.mmap(-1, size)
        self.tensor.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.tensor))
        chunk = os.urandom(1 << 20)
        for at in range(0, size, len(chunk)):
            self.tensor[at : at + len(chunk)] = chunk

    def close(self) -> None:
        os.close(self.fd)
        self.path.unlink()

    def engine(self, checksums: bool, copies: bool) -> Any:
        io = _native.ThreadIo([(self.fd, str(self.path))], threads=self.threads)
        slabs = _native.Slabs(self.block, self.threads + 2)
        return _native.Transfers(
            io, slabs, checksums=checksums, copier=None if copies else _native.NoCopier()
        )

    def round_trip(self, checksums: bool, copies: bool) -> tuple[Sample, Sample]:
        t = self.engine(checksums, copies)
        pieces = [(0, 0, self.size)]
        write = measured(self.size, lambda: t.wait(t.out(self.address, self.size, pieces, 1, 1)) or None)
        if copies:
            before = _native.digest(self.address, self.size)
            ctypes.memset(self.address, 0, self.size)
        read = measured(self.size, lambda: t.wait(t.into(self.address, self.size, pieces, 1, 1)) or None)
        if copies:
            assert _native.digest(self.address, self.size) == before, "the fetched bytes differ"
        t.close()
        return write, read

    def loop(self, write: bool) -> Sample:
        """Measure `depth` Python threads that call preadv/pwritev, each with one slab. Every program that
        moves the bytes does at least this work.
        """
        slabs = _native.Slabs(self.block, self.depth)
        blocks = self.size // self.block
        call = os.pwritev if write else os.preadv

        def worker(number: int) -> None:
            at = slabs.address + number * self.block
            view = memoryview((ctypes.c_char * self.block).from_address(at)).cast("B")
            for i in range(number, blocks, self.depth):
                assert call(self.fd, [view], i * self.block) == self.block

        def run() -> None:
            threads = [threading.Thread(target=worker, args=(i,)) for i in range(self.depth)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return measured(self.size, run)

    def fio(self, write: bool) -> Sample:
        command = ["fio", "--name=b", f"--filename={self.path}", f"--rw={'write' if write else 'read'}"]
        command += [f"--bs={self.block}", f"--iodepth={self.depth}", "--ioengine=io_uring", "--direct=1"]
        command += [f"--size={self.size}", "--fallocate=none", "--overwrite=1", "--output-format=json"]
        command += ["--refill_buffers=0", "--randrepeat=1", "--thread=1"]
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout)["jobs"][0]
        side = job["write" if write else "read"]
        seconds = side["runtime"] / 1000
        cpu = seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100
        return side["io_bytes"] / seconds / 1e9, cpu / (side["io_bytes"] / 1e9)

    def demand_latency_ms(self, loaded: bool, count: int) -> tuple[float, float]:
        """Return the median and the longest time of fetching one block on demand. If `loaded`, the prefetch
        queue is full meanwhile.
        """
        t = self.engine(checksums=True, copies=True)
        half = self.size // 2
        assert t.wait(t.out(self.address, half, [(0, 0, half)], 1, 1))
        assert t.wait(t.out(self.address, self.block, [(0, half, self.block)], 2, 1))
        target = self.address + half
        spent = []
        prefetch = None
        for _ in range(count):
            if loaded and (prefetch is None or t.done(prefetch)):
                prefetch = t.into(self.address, half, [(0, 0, half)], 1, 1)
                time.sleep(0.02)
            began = time.perf_counter()
            assert t.wait(t.into(target, self.block, [(0, half, self.block)], 2, 1, demand=True))
            spent.append((time.perf_counter() - began) * 1e3)
        t.close()
        return statistics.median(spent), max(spent)

    def service_ms(self) -> float:
        """Return the time of one block from drive to slab while all I/O threads read from the drive."""
        rates = [self.round_trip(checksums=True, copies=True)[1][0] for _ in range(3)]
        return self.threads * self.block / statistics.median(rates) / 1e6

    def submit_us(self, count: int = 2000) -> float:
        """Return the caller's time for submitting a 4 KiB transfer to a busy engine."""
        t = self.engine(checksums=True, copies=True)
        tickets = []
        began = time.perf_counter()
        for i in range(count):
            tickets.append(t.out(self.address, 4096, [(0, i * 4096, 4096)], i, 1))
        spent = time.perf_counter() - began
        for ticket in tickets:
            t.wait(ticket)
        t.close()
        return spent / count * 1e6


def interleaved(bench: Bench, reps: int, with_fio: bool) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}

    def add(name: str, sample: Sample) -> None:
        samples.setdefault(name, []).append(sample)

    modes = {"raw": (False, False), "plain": (False, True), "checked": (True, True)}
    bench.round_trip(*modes["raw"])  # not measured; allocates the file's blocks and wakes the disk
    for _ in range(reps):
        for side in ("write", "read"):
            add(f"loop_{side}", bench.loop(side == "write"))
            if with_fio:
                add(f"fio_{side}", bench.fio(side == "write"))
        for name, mode in modes.items():
            write, read = bench.round_trip(*mode)
            add(f"{name}_write", write)
            add(f"{name}_read", read)
    return samples


def judge(figures: dict[str, float], with_fio: bool) -> bool:
    """Print one line per figure. Return True if all targets are met."""
    targets: list[tuple[str, float, bool]] = []  # (name, target, whether larger is better)
    for side in ("write", "read"):
        if with_fio:
            targets.append((f"{side}_of_fio", 0.95, True))
        targets.append((f"{side}_of_loop", 0.90, True))
        targets.append((f"raw_{side}_cpu_s_per_gb", 0.02, False))
        targets.append((f"checked_{side}_cpu_s_per_gb", 0.35, False))
    targets.append(("demand_loaded_of_bound", 1.0, False))
    good = True
    for name, target, more in targets:
        passed = figures[name] >= target if more else figures[name] <= target
        good = good and passed
        print(f"{name} {figures[name]:.4f} {'>=' if more else '<='}{target} {'PASS' if passed else 'FAIL'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--block-kib", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine; default: the depth")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--no-fio", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with_fio = not args.no_fio and shutil.which("fio") is not None
    if not with_fio:
        print("fio is not used: compared with a plain pread loop only", file=sys.stderr)
    threads = args.threads or args.depth
    bench = Bench(args.dir, args.size_mib << 20, args.block_kib << 10, args.depth, threads)
    try:
        samples = interleaved(bench, args.reps, with_fio)
        figures = {f"{name}_gb_per_s": statistics.median(s[0] for s in v) for name, v in samples.items()}
        figures |= {f"{name}_cpu_s_per_gb": statistics.median(s[1] for s in v) for name, v in samples.items()}
        for side in ("write", "read"):
            for other in ("loop", "fio") if with_fio else ("loop",):
                ours, theirs = figures[f"raw_{side}_gb_per_s"], figures[f"{other}_{side}_gb_per_s"]
                figures[f"{side}_of_{other}"] = ours / theirs
        figures["submit_us"] = bench.submit_us()
        alone, _ = bench.demand_latency_ms(loaded=False, count=20)
        loaded, worst = bench.demand_latency_ms(loaded=True, count=20)
        figures |= {"demand_alone_ms": alone, "demand_loaded_ms": loaded, "demand_loaded_worst_ms": worst}
        figures["block_service_ms"] = bench.service_ms()
        figures["demand_loaded_of_bound"] = loaded / (2 * figures["block_service_ms"] + alone)
        slabs = _native.Slabs(bench.block, threads)
        figures |= {"page_bytes": slabs.page_bytes, "block_bytes": bench.block, "depth": args.depth}
    finally:
        bench.close()
    for name in sorted(figures):
        print(f"# {name} {figures[name]:.4f}")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "samples": samples}, indent=1, sort_keys=True))
    return 0 if judge(figures, with_fio) else 1


if __name__ == "__main__":
    sys.exit(main())
