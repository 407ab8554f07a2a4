"""Findings of `teraio doctor`. Each `judge_*` function takes facts and returns one finding. A finding about a
problem contains a fix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from teraio.units import fmt_bytes, fmt_rate

HUGE_BYTES = 2 * 2**20
ROOM_WARN_BYTES, ROOM_FAIL_BYTES = 20 * 2**30, 2**30
# Every SSD is faster. A slower drive is a hard disk, or a cloud volume with a rate limit.
SLOW_BYTES_PER_S = 300 * 10**6
# CPU time of moving 1 GB. At a rate of 1 GB/s, this limit is one whole core. Measured was 0.2 s, with
# checksums and huge pages.
CPU_WARN_NS_PER_GB = 10**9
KEPT_WARN_PERCENT = 10
WORN_WARN_PERCENT = 80  # percentage of a drive's rated life
DRIVE_WARNINGS = ("few spare blocks", "too hot", "unreliable", "read-only", "memory backup failed")


class Verdict(Enum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked property of the machine. `fix` is the remedy for a problem. A finding with the verdict PASS
    has no fix.
    """

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def pass_finding(name: str, found: str) -> Finding:
    return Finding(name, Verdict.PASS, found)


def warn_finding(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Verdict.WARN, found, fix)


def fail_finding(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, fix)


# ---- software


def judge_torch_version(version: str, requirement: str) -> Finding:
    """Judge the installed torch version by the version requirement of teraio, such as `torch<2.14,>=2.11`."""
    name = "torch"
    bounds = re.findall(r"(<=|>=|<|>)\s*(\d+)\.(\d+)", requirement)
    match = re.match(r"(\d+)\.(\d+)", version)
    if not version or not match:
        return fail_finding(name, "not installed", f"pip install '{requirement or 'torch'}'")
    own = (int(match[1]), int(match[2]))
    for sign, major, minor in bounds:
        bound = (int(major), int(minor))
        if (sign == ">=" and own < bound) or (sign == "<" and own >= bound):
            return warn_finding(
                name,
                f"{version} was not tested with this teraio ({requirement} was)",
                f"pip install '{requirement}', or use inner='eager', which depends less on torch's internals",
            )
    return pass_finding(name, f"{version}, in the tested range {requirement}")


def judge_compiler(path: str | None) -> Finding:
    """Judge the C++ compiler at `path`, or its absence. Inductor's kernels on the CPU need a compiler."""
    if path:
        return pass_finding("compiler", path)
    return warn_finding(
        "compiler", "no C++ compiler", "apt install g++, or use inner='eager' (slower kernels)"
    )


def judge_observer(reason: str, prebuilt: Sequence[str], compiler: str | None) -> Finding:
    """Judge the observer of reads and the allocator, which are compiled C++.

    `reason` says why no prebuilt library is used; it is "" if one is used, or if this teraio has none.
    `prebuilt` lists the torch releases that have one.
    """
    name = "observer"
    if prebuilt and not reason:
        return pass_finding(name, "prebuilt for this torch")
    because = f" ({reason})" if reason else ""
    if compiler:
        return pass_finding(name, f"compiled for this torch at its first use{because}")
    other = f", or install torch {', '.join(prebuilt)}" if prebuilt else ""
    return warn_finding(
        name,
        f"cannot be compiled: weights, gradients and optimizer states are kept resident{because}",
        f"apt install g++{other}",
    )


# ---- memory


def judge_memory(
    available: int, total: int, limit: int | None, used: int, where: str, budget: int
) -> Finding:
    name = "memory"
    found = f"{fmt_bytes(available)} available of {fmt_bytes(total)}; memory={fmt_bytes(budget)} by default"
    if limit is None:
        return pass_finding(name, found + "; no control group limits it")
    found += f"; the control group {where} allows {fmt_bytes(limit)} and uses {fmt_bytes(used)}"
    if budget > limit - used:
        return warn_finding(
            name,
            found,
            f"memory='{(limit - used) * 9 // 10 >> 20}MiB' leaves room for the other processes of the group",
        )
    return pass_finding(name, found)


def judge_huge_pages(setting: str) -> Finding:
    """Judge transparent huge pages. `setting` is the text of /sys/kernel/mm/transparent_hugepage/enabled.

    The active mode is in brackets, as in `always [madvise] never`.
    """
    name = "huge pages"
    chosen = re.search(r"\[(\w+)\]", setting)
    if not chosen:
        return warn_finding(
            name, "this kernel has none", "boot a kernel with transparent huge pages: 2 to 3 times the rate"
        )
    if chosen[1] == "never":
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return warn_finding(name, "switched off (never): slabs run at a half to a third of the rate", fix)
    return pass_finding(name, f"{chosen[1]}: slabs use them")


def judge_slab_pages(page_bytes: int, setting: str) -> Finding:
    name = "slab pages"
    if page_bytes >= HUGE_BYTES:
        return pass_finding(name, f"{fmt_bytes(page_bytes)} in effect")
    fix = "free some memory (echo 1 | sudo tee /proc/sys/vm/compact_memory) and try again"
    if "[never]" in setting:
        fix = "as for huge pages"
    return warn_finding(name, f"{fmt_bytes(page_bytes)} in effect: the kernel gave no huge pages", fix)


def judge_freed_memory(allocated: int, kept: int, preload: str) -> Finding:
    name = "freed memory"
    if kept * 100 <= allocated * KEPT_WARN_PERCENT:
        return pass_finding(name, "is returned to the system at once")
    fix = f"start without LD_PRELOAD={preload}" if preload else "start with MALLOC_MMAP_THRESHOLD_=65536"
    return warn_finding(
        name, f"the C allocator keeps {fmt_bytes(kept)} of {fmt_bytes(allocated)}: budgets are overrun", fix
    )


def judge_locked_memory(limit: int | None, gpu: bool, pinned: str) -> Finding:
    """Judge the limit of locked memory, which also limits pinned memory.

    `pinned` is the reason why measuring the link to pinned memory failed, or "" if it did not fail.
    """
    found = "no limit" if limit is None else f"limit {fmt_bytes(limit)}"
    if not gpu:
        return pass_finding("locked memory", f"{found}; nothing is pinned without a GPU")
    if pinned:
        return warn_finding(
            "locked memory",
            f"{found}; pinning failed: {pinned}",
            "ulimit -l unlimited, or --ulimit memlock=-1",
        )
    return pass_finding("locked memory", f"{found}; slabs can be pinned")


# ---- store


def judge_file_system(kind: str, path: str) -> Finding:
    if kind in ("overlayfs", "FUSE", "9p", "other"):
        found = f"{path} lies on {kind}"
        return warn_finding(
            "file system", found, "name a directory of a mounted disk with --store, if these rates are low"
        )
    return pass_finding("file system", f"{path} lies on {kind}")


def judge_free_space(free: int) -> Finding:
    found = f"{fmt_bytes(free)} free"
    if free < ROOM_FAIL_BYTES:
        return fail_finding(
            "free space", found, "free at least 1 GiB, or name another directory with --store"
        )
    if free < ROOM_WARN_BYTES:
        return warn_finding(
            "free space",
            found,
            "large models need more: weights and optimizer states are 16 bytes a parameter",
        )
    return pass_finding("free space", found)


def judge_direct_io(direct: bool) -> Finding:
    if direct:
        return pass_finding("direct I/O", "O_DIRECT works")
    return warn_finding(
        "direct I/O",
        "refused: bytes pass through the page cache, at 5 times the CPU time or more",
        "name a directory on ext4 or xfs with --store",
    )


def judge_store_rate(evict: int, fetch: int, cpu_ns_per_gb: int) -> Finding:
    found = f"evict {fmt_rate(evict)}, fetch {fmt_rate(fetch)}, {cpu_ns_per_gb / 1e9:.2f} s of CPU per GB"
    if min(evict, fetch) < SLOW_BYTES_PER_S:
        return warn_finding(
            "store speed",
            found,
            "training will wait for this drive: use an NVMe SSD, or several, with --store",
        )
    if cpu_ns_per_gb > CPU_WARN_NS_PER_GB:
        return warn_finding(
            "store speed", found, "see huge pages and direct I/O above; checksum='off' saves about a half"
        )
    return pass_finding("store speed", found)


def judge_drive_wear(
    drive: str,
    used_percent: int,
    spare_percent: int,
    spare_least_percent: int,
    written_bytes: int,
    media_errors: int,
    warnings: int,
) -> Finding:
    """Judge the health data that a drive reports. Evictions wear the drive, because an eviction writes to the
    drive.
    """
    name = "drive wear"
    faults = [text for bit, text in enumerate(DRIVE_WARNINGS) if warnings >> bit & 1]
    if media_errors:
        faults.append(f"{media_errors} media errors")
    worn = f"{drive}: {used_percent} % of its rated life used, {fmt_bytes(written_bytes)} written"
    found = "; ".join((worn, f"{spare_percent} % of its spare blocks left", *faults))
    if faults or spare_percent <= spare_least_percent:
        return warn_finding(
            name, found, "back up this drive, and name a directory on another drive with --store"
        )
    if used_percent >= WORN_WARN_PERCENT:
        fix = "cap the writes with options={'max_write_per_day': ...}, or name another drive with --store"
        return warn_finding(name, found, fix)
    return pass_finding(name, found)


def judge_drive_of_unknown_wear(reason: str) -> Finding:
    return pass_finding("drive wear", f"not known: {reason}")


# ---- device


def judge_gpu(names: Sequence[str], reason: str | None) -> Finding:
    """Judge the GPUs. If torch can use a GPU, `reason` is None. Otherwise, `reason` explains the problem."""
    if reason is None:
        return pass_finding("GPU", ", ".join(names))
    if names:
        return warn_finding(
            "GPU", f"{', '.join(names)}, but {reason}", "install a CUDA build of torch: https://pytorch.org"
        )
    return pass_finding("GPU", f"none ({reason}): the device is RAM, and tensors are evicted to the store")


def judge_gpu_direct_storage(
    folder: str, has_gpu: bool, reason: str | None, obstacles: Sequence[tuple[str, str]] = ()
) -> Finding:
    """Judge direct transfers between a GPU and the drives of a directory.

    If a trial has shown that such transfers work, `reason` is None. Otherwise, `reason` explains the problem.
    Each obstacle is an unmet requirement and its remedy. The finding never warns, because teraio works
    without direct transfers.
    """
    if not has_gpu:
        drives = "".join(f"; {found} (remedy: {remedy})" for found, remedy in obstacles)
        return pass_finding("GPUDirect", f"not used for {folder}: there is no GPU{drives}")
    if reason is None:
        return pass_finding("GPUDirect", f"direct, verified on a file in {folder}")
    causes = [f"{found} (remedy: {remedy})" for found, remedy in obstacles]
    met = "" if causes else ". GPU, drives, kernel and driver meet the requirements"
    return pass_finding(
        "GPUDirect",
        f"not used for {folder}: {'; '.join([*causes, reason])}{met}. With one or two drives it gains "
        "nothing; with more it saves CPU and RAM",
    )
