"""`teraio doctor`: checks whether teraio can use this machine, and measures the links between its memory
tiers.

Each problem comes with a fix.

    facts (this module, runtime) -> findings (doctor_findings.py) -> Report -> text, JSON, machine file

The exit code is 0 for usable, 1 for usable with warnings, 2 for not usable.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from teraio.cli import doctor_findings as findings
from teraio.cli.doctor_findings import Finding, Verdict
from teraio.errors import StoreError
from teraio.formats.machine import Machine
from teraio.progress import show_stage, tell_progress
from teraio.session.measured_machine import machine_from_links
from teraio.units import fmt_ns, fmt_rate

if TYPE_CHECKING:
    from teraio.runtime.device import device
    from teraio.runtime.device.link_rates import LinkRates

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CHURN_BYTES = 128 * 2**20
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The findings about a machine. `links` has one entry for each measured link between two memory tiers."""

    findings: tuple[Finding, ...]
    links: tuple[LinkRates, ...]
    machine: Machine | None

    @property
    def exit_code(self) -> int:
        verdicts = {finding.verdict for finding in self.findings}
        return 2 if Verdict.FAIL in verdicts else 1 if Verdict.WARN in verdicts else 0

    def text(self) -> str:
        """Return text for people: each finding with its fix, a table for each link, and the verdict."""
        wide = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.verdict.value}  {finding.name:{wide}}  {finding.found}")
            if finding.fix:
                lines.append(f"      {'':{wide}}  fix: {finding.fix}")
        for link in self.links:
            lines += ["", *_link_as_lines(link)]
        count = sum(finding.verdict is Verdict.WARN for finding in self.findings)
        warnings = f"usable, with {count} warning{'s' if count > 1 else ''}"
        return "\n".join([*lines, "", ("usable", warnings, "not usable: see FAIL above")[self.exit_code]])

    def json(self) -> str:
        """Return one JSON object for programs. The verdicts are words, and the measured figures are
        integers.
        """
        found = [{**asdict(finding), "verdict": finding.verdict.value} for finding in self.findings]
        links = [
            {
                **asdict(link),
                "shares": link.is_shared_by_directions,
                "shared_bytes_per_s": link.shared_bytes_per_s,
            }
            for link in self.links
        ]
        return json.dumps({"exit_code": self.exit_code, "findings": found, "links": links}, sort_keys=True)


def _link_as_lines(link: LinkRates) -> list[str]:
    rows = (
        (
            "evict",
            f"device -> {link.tier}",
            link.evict_bytes_per_s,
            link.both_evict_bytes_per_s,
            link.evict_latency_ns,
        ),
        (
            "fetch",
            f"{link.tier} -> device",
            link.fetch_bytes_per_s,
            link.both_fetch_bytes_per_s,
            link.fetch_latency_ns,
        ),
    )
    lines = [f"{'':6}{'link':16}{'alone':>12}{'both at once':>15}{'latency':>12}"]
    for move, name, alone, both, latency in rows:
        lines.append(f"{move:6}{name:16}{fmt_rate(alone):>12}{fmt_rate(both):>15}{fmt_ns(latency):>12}")
    total = link.evict_bytes_per_s + link.fetch_bytes_per_s
    sharing = f"{fmt_rate(link.together_bytes_per_s)} together, {fmt_rate(total)} as a sum of both alone"
    lines.append(
        f"{'':6}the two {'share one bandwidth' if link.is_shared_by_directions else 'do not share'}: "
        f"{sharing}"
    )
    return lines


def examine_machine(
    store: Path | None = None,
    *,
    more_stores: Sequence[Path] = (),
    seconds: float = 2.0,
    name: str = "here",
    progress: Progress = lambda doing: None,
) -> Report:
    """Check the machine, measure its links, and return the report.

    `store` is the directory to measure. Its default is the directory that teraio would use. Measuring this
    directory takes about five times `seconds`. For the directories `more_stores`, only GPUDirect is judged.
    `name` is the machine's name in the machine file.
    """
    found: list[Finding] = []
    links: list[LinkRates] = []
    if not _add_software_findings(found, progress):
        return Report(tuple(found), (), None)
    used = _add_device_findings(found, links, seconds, progress)
    if used is None:
        return Report(tuple(found), (), None)
    _add_memory_findings(found, progress)
    ssd_bytes, directories = _add_store_findings(found, links, used, store, seconds, progress)
    for path in more_stores:
        found.append(_judge_gpu_direct_storage_of(path, used))
    machine = machine_from_links(name, links, used.capacity_bytes(), ssd_bytes, directories=directories)
    return Report(tuple(found), tuple(links), machine)


def _add_software_findings(found: list[Finding], progress: Progress) -> bool:
    """Add findings about the system, the native engine, torch and the C++ compiler.

    Return False if a problem makes all further checks impossible.
    """
    progress("loading torch")
    if sys.platform != "linux":
        found.append(findings.fail_finding("system", platform.platform(), "teraio runs on Linux"))
        return False
    found.append(
        findings.pass_finding("system", f"Linux {platform.release()}, Python {platform.python_version()}")
    )
    try:
        from teraio import _native  # noqa: F401
    except ImportError as error:
        found.append(
            findings.fail_finding("native engine", str(error), "pip install --force-reinstall teraio")
        )
        return False
    found.append(findings.pass_finding("native engine", "loaded"))
    found.append(findings.judge_torch_version(_installed_version("torch"), _declared_requirement("torch")))
    judged_torch = found[-1]
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    found.append(findings.judge_compiler(compiler))
    if judged_torch.verdict is not Verdict.FAIL:
        from teraio.runtime.torch_extension import observer, prebuilt

        _, reason = prebuilt.find(observer.SOURCE)
        found.append(findings.judge_observer(reason, prebuilt.releases(observer.SOURCE), compiler))
    return judged_torch.verdict is not Verdict.FAIL


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _declared_requirement(package: str) -> str:
    """Return teraio's version requirement for a package, as pyproject.toml declares it, or ""."""
    try:
        declared = importlib.metadata.requires("teraio") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    return next((text for text in declared if text.startswith(package)), "")


def _add_device_findings(
    found: list[Finding], links: list[LinkRates], seconds: float, progress: Progress
) -> device.Device | None:
    """Add findings about the GPU and about pinned memory. Append the measured link to host memory to `links`.

    Return the device to use: the GPU, or the CPU if there is no GPU. Return None if the GPU fails.
    """
    from teraio.runtime.device import choose, cuda
    from teraio.runtime.store import link_probe

    progress("looking for a GPU")
    reason = cuda.reason_without_gpu()
    found.append(findings.judge_gpu(cuda.gpu_names_from_driver(), reason))
    pinned = ""
    used = choose.choose_device("cpu")
    if reason is None:
        try:
            used = gpu = cuda.CudaDevice()
            measured = cuda.measure_host_tier_link(
                gpu, gpu.make_host_tier(cuda.LOOK_BYTES), seconds, link_probe.MEMORY_BYTES, progress
            )
        except RuntimeError as error:
            fix = "see nvidia-smi: the GPU may be full or faulty; CUDA_VISIBLE_DEVICES= trains on the CPU"
            found[-1] = findings.fail_finding("GPU", str(error).splitlines()[0], fix)
            return None
        if isinstance(measured, str):
            pinned = measured
        else:
            links.append(measured)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    known = None if limit == resource.RLIM_INFINITY else limit
    found.append(findings.judge_locked_memory(known, reason is None, pinned))
    return used


def _add_memory_findings(found: list[Finding], progress: Progress) -> None:
    from teraio.runtime.device import limits

    ram = limits.read_memory_limits()
    group = ram.group
    limit, used = (group.limit_bytes, group.used_bytes) if group else (None, 0)
    budget = ram.obtainable_bytes * 9 // 10
    where = str(group.path) if group else ""
    found.append(findings.judge_memory(ram.available_bytes, ram.total_bytes, limit, used, where, budget))
    found.append(findings.judge_huge_pages(_huge_pages_setting()))
    progress("freeing memory")
    limits.make_malloc_return_memory()
    found.append(
        findings.judge_freed_memory(
            CHURN_BYTES, measure_unreturned_bytes(CHURN_BYTES), os.environ.get("LD_PRELOAD", "")
        )
    )


def _huge_pages_setting() -> str:
    return THP.read_text() if THP.exists() else ""


def measure_unreturned_bytes(total_bytes: int) -> int:
    """Allocate tensors of several sizes and free them. Return how many bytes the process has not returned to
    the system.
    """
    import torch

    from teraio.runtime.device import rss

    torch.zeros(2**20)
    before = rss.resident_bytes()
    tensors: list[torch.Tensor] = []
    while total_bytes > 0:
        tensors.append(torch.ones(2**20 * (1 + len(tensors) % 16), dtype=torch.uint8))
        total_bytes -= tensors[-1].nbytes
    for tensor in tensors[::2] + tensors[1::2]:
        tensor.untyped_storage().resize_(0)
    return max(0, rss.resident_bytes() - before)


def _add_store_findings(
    found: list[Finding],
    links: list[LinkRates],
    used: device.Device,
    store: Path | None,
    seconds: float,
    progress: Progress,
) -> tuple[int, tuple[Path, ...]]:
    """Add findings about the store's directory and its drive, and append the drive's measured link to
    `links`.

    Return the free bytes of the directory, and the directory. If the store cannot use the directory, return 0
    bytes and no directory.
    """
    from teraio.runtime.store import directories, drive_health, link_probe

    try:
        path = store or directories.choose_default_directories()[0]
        place = directories.open_and_check_store_directory(path, parents=store is None)
    except StoreError as error:
        what, _, fix = str(error).partition(". ")
        found.append(findings.fail_finding("store", what, fix))
        return 0, ()
    try:
        found.append(findings.judge_file_system(place.kind, str(place.path)))
        free = place.free_bytes()
        found.append(findings.judge_free_space(free))
        if found[-1].verdict is Verdict.FAIL:
            return 0, ()
        found += [
            findings.judge_drive_of_unknown_wear(str(health))
            if isinstance(health, drive_health.NoAnswer)
            else findings.judge_drive_wear(**asdict(health))
            for health in drive_health.health_of_drives(place.path)
        ]
        found.append(_judge_gpu_direct_storage_of(place.path, used))
        measured = link_probe.measure_store_link(
            place.path, seconds, min(512 * 2**20, free // 4), progress, device=used
        )
    except (StoreError, OSError) as error:
        found.append(
            findings.fail_finding(
                "store speed", str(error), "see the kernel's log, or name another directory with --store"
            )
        )
        return 0, ()
    finally:
        os.close(place.fd)
    link = measured.link
    found.append(findings.judge_slab_pages(measured.page_bytes, _huge_pages_setting()))
    found.append(findings.judge_direct_io(measured.direct))
    found.append(
        findings.judge_store_rate(link.evict_bytes_per_s, link.fetch_bytes_per_s, measured.cpu_ns_per_gb)
    )
    links.append(link)
    return free, (place.path,)


def _judge_gpu_direct_storage_of(folder: Path, used: device.Device) -> Finding:
    """Judge GPUDirect for a directory: read its requirements from /sys and /proc, and run a trial."""
    from teraio.runtime.device import cuda
    from teraio.runtime.store import gds, gds_support

    obstacles = gds_support.find_gds_obstacles(folder, cuda.gpu_names_from_driver())
    has_gpu = used.kind == "cuda"
    if not has_gpu:
        obstacles = [each for each in obstacles if each.about == "drive"]
    pairs = [(each.found, each.remedy) for each in obstacles]
    return findings.judge_gpu_direct_storage(str(folder), has_gpu, gds.reason_without_gds(folder), pairs)


# ---- the command


DESCRIPTION = """\
Checks this machine for teraio: torch and compiler, memory and its limits, the file system of the store, the
wear of its drives, huge pages, GPUDirect. Then it measures the links in both directions, alone and together.
Each finding is PASS, WARN or FAIL, with the fix. The command writes up to 512 MiB to the store and removes
them."""

EPILOG = """\
examples:
  teraio doctor
  teraio doctor --store /mnt/nvme -o here.machine.json
  teraio doctor --json

exit codes: 0 usable, 1 usable with warnings, 2 not usable"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--store",
        type=Path,
        action="append",
        help="the directory to measure (default: the one teraio would use). The flag may be repeated: for "
        "more directories, only GPUDirect is checked",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("-o", "--output", type=Path, help="write a machine file for `teraio plan --machine`")
    parser.add_argument("--seconds", type=float, default=2.0, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Print the report, and write the machine file if the user requested one. Return the exit code.

    The exit code is 0 for usable, 1 for usable with warnings, 2 for not usable.
    """
    name = args.output.name.split(".")[0] if args.output else ""
    with show_stage("teraio doctor"):
        first, *others = args.store or [None]
        report = examine_machine(
            first, more_stores=others, seconds=args.seconds, name=name or "here", progress=tell_progress
        )
    print(report.json() if args.json else report.text())
    if args.output and report.machine and report.links:
        report.machine.write(args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    return report.exit_code
