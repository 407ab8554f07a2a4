"""Tests of `teraio doctor`: findings and their fixes, exit codes, measured links, and the machine file."""

from __future__ import annotations

import argparse
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from teraio import _native
from teraio.cli import doctor, doctor_findings
from teraio.cli.doctor_findings import Finding, Verdict
from teraio.errors import StoreError
from teraio.formats.machine import Machine
from teraio.runtime.device import cuda, limits
from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.device.device import Scratch
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.store import link_probe, slabs
from teraio.runtime.store.drive_health import size_of_drives
from teraio.session.measured_machine import machine_from_links

pytestmark = pytest.mark.alone

MIB = 2**20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def report(disk: Path) -> doctor.Report:
    return doctor.examine_machine(disk, seconds=0.2, name="toy")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(words)


# ---- a whole run of the command


def test_the_doctor_finds_this_machine_usable(report: doctor.Report) -> None:
    assert report.exit_code in (0, 1), report.text()
    assert [link.tier for link in report.links] == ["ssd"]
    link = report.links[0]
    assert min(link.evict_bytes_per_s, link.fetch_bytes_per_s, link.together_bytes_per_s) > 10**6
    assert 0 < link.fetch_latency_ns < 10**9


def test_every_warning_and_failure_has_a_fix(report: doctor.Report) -> None:
    for finding in report.findings:
        assert finding.found
        assert bool(finding.fix) == (finding.verdict is not Verdict.PASS), finding
        assert f"{finding.verdict.value}  {finding.name}" in report.text()
        assert not finding.fix or f"fix: {finding.fix}" in report.text()


def test_the_report_is_one_json_object_of_words_and_integers(report: doctor.Report) -> None:
    read = json.loads(report.json(), parse_float=lambda text: pytest.fail(f"{text} is no integer"))
    assert read["exit_code"] == report.exit_code
    assert {finding["verdict"] for finding in read["findings"]} <= {"PASS", "WARN", "FAIL"}
    assert read["links"][0]["evict_bytes_per_s"] == report.links[0].evict_bytes_per_s


def test_the_machine_file_is_read_back(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here.machine.json"
    args = options("--store", str(disk), "-o", str(path), "--json", "--seconds", "0.1")
    assert doctor.main(args) in (0, 1)
    machine = Machine.read(path)
    assert machine.name == "here"
    assert {tier.name for tier in machine.tiers} == {"device", "ssd"}
    assert {(link.source, link.target) for link in machine.links} == {("device", "ssd"), ("ssd", "device")}


def test_measured_file_is_private_and_removed(
    disk: Path, report: doctor.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(disk.iterdir()) == []
    modes: list[int] = []
    real = os.open

    def watched(path: str, flags: int, mode: int = 0o777) -> int:
        modes.append(mode)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", watched)
    with link_probe.open_private_file(disk) as (fd, _):
        about = os.fstat(fd)
        assert about.st_nlink == 0
        assert stat.S_IMODE(about.st_mode) == 0o600
    assert modes == [0o600]


# ---- drives and devices that do not work


def test_unusable_store_gives_exit_code_2_and_its_path(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    report = doctor.examine_machine(blocked, seconds=0.1)
    assert report.exit_code == 2
    assert any(
        finding.verdict is Verdict.FAIL and str(blocked) in finding.found for finding in report.findings
    )
    assert report.links == ()
    assert "not usable" in report.text()


def test_no_machine_file_is_written_without_a_measured_link(tmp_path: Path) -> None:
    blocked, out = tmp_path / "file", tmp_path / "x.machine.json"
    blocked.write_text("")
    assert doctor.main(options("--store", str(blocked), "-o", str(out))) == 2
    assert not out.exists()


def faulty(**fault: Any) -> Any:
    def around(io: _native.Io) -> _native.Io:
        shim = _native.FaultIo(io)
        shim.add(sticky=True, **fault)
        return shim

    return around


def test_a_crawling_drive_is_refused_in_bounded_time(disk: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"writes .*/s; a store needs at least 4 MB/s"):
        link_probe.measure_store_link(disk, 0.2, around=faulty(kind="delay", delay_s=1.5))
    assert time.monotonic() - begun < 40


class Full(CpuDevice):
    """A device without free memory. It records how much memory a measurement requests."""

    requested_bytes = 0

    def allocate_scratch(self, most_bytes: int, least_bytes: int) -> Scratch | None:
        self.requested_bytes = most_bytes
        return None


def test_a_drive_is_measured_from_ram_where_the_device_has_no_memory_free(disk: Path) -> None:
    full = Full()
    measured = link_probe.measure_store_link(disk, 0.05, 64 * 2**20, device=full, memory_bytes=2**22)
    assert measured.link.evict_bytes_per_s > 0 and full.requested_bytes == 2**22


def test_a_drive_is_measured_with_as_little_memory_as_is_given(disk: Path) -> None:
    measured = link_probe.measure_store_link(
        disk, 0.05, 64 * 2**20, memory_bytes=link_probe.MEMORY_LEAST_BYTES
    )
    assert measured.link.evict_bytes_per_s > 0 and measured.link.fetch_bytes_per_s > 0


def test_failing_drive_raises_a_store_error(disk: Path) -> None:
    with pytest.raises(StoreError, match="a measured block"):
        link_probe.measure_store_link(disk, 0.1, around=faulty(kind="EIO", op="read"))


def test_slow_drive_is_measured_in_bounded_time(disk: Path) -> None:
    begun = time.monotonic()
    measured = link_probe.measure_store_link(disk, 0.4, around=faulty(kind="delay", delay_s=0.05))
    assert time.monotonic() - begun < 40
    assert measured.link.evict_latency_ns > 50 * 10**6
    # At most 8 transfers of one slab each run at a time. Each of them takes at least 50 ms.
    assert measured.link.evict_bytes_per_s < 8 * slabs.SLAB_BYTES * 20 * 1.2


def test_a_gpus_link_to_host_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the doctor measures the link between GPU and host memory.

    It must also return the GPU as the device from whose memory it then measures the drives.
    """

    class Gpu(Full):
        def make_host_tier(self, limit_bytes: int) -> Any:
            return limit_bytes

    def measured(gpu: Gpu, host: int, seconds: float, memory_bytes: int, progress: Any) -> LinkRates:
        assert (host, seconds, memory_bytes) == (cuda.LOOK_BYTES, 0.05, link_probe.MEMORY_BYTES)
        return link(7, 8, 5, 6)

    monkeypatch.setattr(cuda, "reason_without_gpu", lambda: None)
    monkeypatch.setattr(cuda, "CudaDevice", Gpu)
    monkeypatch.setattr(cuda, "measure_host_tier_link", measured)
    found, links = list[Finding](), list[LinkRates]()
    used = doctor._add_device_findings(found, links, 0.05, lambda doing: None)
    assert isinstance(used, Gpu) and links == [link(7, 8, 5, 6)]


def test_failing_gpu_is_a_failed_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> CpuDevice:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(cuda, "reason_without_gpu", lambda: None)
    monkeypatch.setattr(cuda, "CudaDevice", broken)
    found, links = list[Finding](), list[LinkRates]()
    assert doctor._add_device_findings(found, links, 0.05, lambda doing: None) is None
    (finding,) = found
    assert finding.verdict is Verdict.FAIL and "illegal memory access" in finding.found and not links


# ---- bandwidth that both directions share


def link(evict: int, fetch: int, both_evict: int, both_fetch: int) -> LinkRates:
    return LinkRates("ssd", evict, fetch, both_evict, both_fetch, 1000, 1000)


@pytest.mark.parametrize(
    ("rates", "shares", "shared"),
    [
        ((100, 100, 100, 100), False, 200),
        ((100, 100, 90, 88), False, 178),
        ((100, 100, 50, 50), True, 100),
        # Both directions at once carry 30 + 30. One direction alone carries 100, so the shared bandwidth is
        # at least 100.
        ((100, 40, 30, 30), True, 100),
        ((100, 60, 70, 50), True, 120),
    ],
)
def test_links_share_when_both_at_once_carry_clearly_less(
    rates: tuple[int, int, int, int], shares: bool, shared: int
) -> None:
    assert link(*rates).is_shared_by_directions is shares
    assert link(*rates).shared_bytes_per_s == shared


def test_a_shared_bandwidth_is_in_the_machine_file() -> None:
    machine = machine_from_links("toy", [link(100, 100, 50, 50)], 10**9, 10**9)
    assert machine.shared == (("device_ssd", 100),)
    assert {one.shares for one in machine.links} == {"device_ssd"}
    assert Machine.loads(machine.dumps()) == machine
    assert machine_from_links("toy", [link(100, 100, 100, 100)], 10**9, 10**9).shared == ()


def test_size_of_the_drive_is_in_the_machine_file(tmp_path: Path) -> None:
    machine = machine_from_links("toy", [link(100, 100, 50, 50)], 10**9, 5, directories=[tmp_path])
    (ssd,) = (tier for tier in machine.tiers if tier.name == "ssd")
    assert ssd.capacity_bytes == 5 and ssd.rated_bytes == ssd.drive_bytes == size_of_drives([tmp_path])
    assert Machine.loads(machine.dumps()) == machine
    without = machine_from_links("toy", [link(100, 100, 50, 50)], 10**9, 5)
    assert without.tiers[1].rated_bytes == 5 and "drive_bytes" not in without.dumps()


# ---- single findings


@pytest.mark.parametrize(
    ("finding", "verdict", "word"),
    [
        (doctor_findings.judge_torch_version("2.13.0+cpu", "torch<2.14,>=2.11"), Verdict.PASS, "tested"),
        (doctor_findings.judge_torch_version("2.14.1", "torch<2.14,>=2.11"), Verdict.WARN, "not tested"),
        (doctor_findings.judge_torch_version("2.10.0", "torch<2.14,>=2.11"), Verdict.WARN, "not tested"),
        (doctor_findings.judge_torch_version("", "torch>=2.11"), Verdict.FAIL, "not installed"),
        (doctor_findings.judge_compiler(None), Verdict.WARN, "no C++ compiler"),
        (doctor_findings.judge_observer("", ["2.13.0"], None), Verdict.PASS, "prebuilt"),
        (doctor_findings.judge_observer("", [], "g++"), Verdict.PASS, "first use"),
        (doctor_findings.judge_observer("other torch", ["2.13.0"], "g++"), Verdict.PASS, "other torch"),
        (doctor_findings.judge_observer("other torch", ["2.13.0"], None), Verdict.WARN, "kept resident"),
        (doctor_findings.judge_observer("", [], None), Verdict.WARN, "cannot be compiled"),
        (doctor_findings.judge_huge_pages("always madvise [never]"), Verdict.WARN, "never"),
        (doctor_findings.judge_huge_pages("always [madvise] never"), Verdict.PASS, "madvise"),
        (doctor_findings.judge_huge_pages(""), Verdict.WARN, "none"),
        (doctor_findings.judge_slab_pages(4096, "[madvise]"), Verdict.WARN, "4 KiB"),
        (doctor_findings.judge_slab_pages(2 * MIB, "[madvise]"), Verdict.PASS, "2 MiB"),
        (
            doctor_findings.judge_freed_memory(100 * MIB, 50 * MIB, "/usr/lib/libjemalloc.so"),
            Verdict.WARN,
            "50 MiB",
        ),
        (doctor_findings.judge_freed_memory(100 * MIB, 0, ""), Verdict.PASS, "at once"),
        (doctor_findings.judge_locked_memory(65536, False, ""), Verdict.PASS, "nothing is pinned"),
        (doctor_findings.judge_locked_memory(65536, True, "error 2"), Verdict.WARN, "error 2"),
        (doctor_findings.judge_file_system("overlayfs", "/tmp"), Verdict.WARN, "overlayfs"),
        (doctor_findings.judge_free_space(100 * MIB), Verdict.FAIL, "100 MiB"),
        (doctor_findings.judge_free_space(2**33), Verdict.WARN, "8 GiB"),
        (doctor_findings.judge_direct_io(False), Verdict.WARN, "page cache"),
        (doctor_findings.judge_store_rate(10**8, 10**8, 10**8), Verdict.WARN, "100 MB/s"),
        (doctor_findings.judge_store_rate(10**10, 10**10, 2 * 10**9), Verdict.WARN, "2.00 s of CPU"),
        (
            doctor_findings.judge_memory(2**34, 2**35, 2**33, 2**32, "/sys/fs/cgroup/a", 2**33 - 1),
            Verdict.WARN,
            "/sys/fs/cgroup/a",
        ),
        (doctor_findings.judge_memory(2**34, 2**35, None, 0, "", 2**33), Verdict.PASS, "no control group"),
        (
            doctor_findings.judge_drive_wear("nvme0n1", 3, 100, 10, 45 * 10**12, 0, 0),
            Verdict.PASS,
            "3 % of its rated",
        ),
        (
            doctor_findings.judge_drive_wear("nvme0n1", 80, 100, 10, 10**15, 0, 0),
            Verdict.WARN,
            "80 % of its rated",
        ),
        (
            doctor_findings.judge_drive_wear("nvme0n1", 3, 10, 10, 10**12, 0, 0),
            Verdict.WARN,
            "10 % of its spare",
        ),
        (
            doctor_findings.judge_drive_wear("nvme0n1", 3, 100, 10, 10**12, 2, 0),
            Verdict.WARN,
            "2 media errors",
        ),
        (
            doctor_findings.judge_drive_wear("nvme0n1", 3, 100, 10, 10**12, 0, 0b1010),
            Verdict.WARN,
            "too hot; read-only",
        ),
        (doctor_findings.judge_drive_of_unknown_wear("vda is no NVMe drive"), Verdict.PASS, "not known: vda"),
        (doctor_findings.judge_gpu(("H100",), "torch is built without CUDA"), Verdict.WARN, "H100, but"),
        (doctor_findings.judge_gpu((), "torch is built without CUDA"), Verdict.PASS, "none"),
        (doctor_findings.judge_gpu(("H100",), None), Verdict.PASS, "H100"),
        (
            doctor_findings.judge_gpu_direct_storage("/nvme", True, "the file is in compat mode"),
            Verdict.PASS,
            "not used for /nvme: the file is in compat mode. GPU, drives, kernel and driver meet",
        ),
        (doctor_findings.judge_gpu_direct_storage("/nvme", True, None), Verdict.PASS, "a file in /nvme"),
        (
            doctor_findings.judge_gpu_direct_storage(
                "/scratch", True, "refused", [("md0 is", "take one drive")]
            ),
            Verdict.PASS,
            "not used for /scratch: md0 is (remedy: take one drive); refused. With",
        ),
        (
            doctor_findings.judge_gpu_direct_storage("/scratch", False, "x", [("md0 is", "take one drive")]),
            Verdict.PASS,
            "not used for /scratch: there is no GPU; md0 is (remedy: take one drive)",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Finding) else None,
)
def test_a_finding_judges_one_fact(finding: Finding, verdict: Verdict, word: str) -> None:
    assert finding.verdict is verdict
    assert word.replace(" MiB", ".0 MiB") in finding.found or word in finding.found, finding.found
    assert bool(finding.fix) == (verdict is not Verdict.PASS)


def test_exit_codes_follow_the_worst_finding() -> None:
    one = {verdict: Finding("x", verdict, "y", "z") for verdict in Verdict}
    assert doctor.Report((one[Verdict.PASS],), (), None).exit_code == 0
    assert doctor.Report((one[Verdict.PASS], one[Verdict.WARN]), (), None).exit_code == 1
    assert doctor.Report((one[Verdict.FAIL], one[Verdict.WARN]), (), None).exit_code == 2


def test_freed_tensors_are_returned_to_the_system() -> None:
    """Check that malloc returns the memory of freed tensors to the system.

    By default, malloc takes blocks below 64 KiB from the heap. One live block at the heap's end keeps all
    memory before it allocated.
    """
    limits.make_malloc_return_memory()
    doctor.measure_unreturned_bytes(32 * MIB)
    assert doctor.measure_unreturned_bytes(64 * MIB) < 6 * MIB


# ---- memory and control groups


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    everything = {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        **files,
    }
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_memory_without_a_control_group_is_the_available_memory(tmp_path: Path) -> None:
    found = limits.read_memory_limits(tree(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/cgroup.procs": ""}))
    assert (found.obtainable_bytes, found.capacity_bytes, found.group) == (2**33, 2**34, None)


def test_the_lowest_limit_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": f"{2**32}\n",
        "sys/fs/cgroup/a/memory.current": "1000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "500\n",
        "sys/fs/cgroup/a/b/c/memory.max": f"{2**33}\n",
        "sys/fs/cgroup/a/b/c/memory.current": "5\n",
    }
    found = limits.read_memory_limits(tree(tmp_path, "0::/a/b/c\n", V2, files))
    assert found.obtainable_bytes == found.capacity_bytes == 2**32
    assert found.group is not None
    assert found.group.path.name == "a"
    assert found.group.used_bytes == 1000


def test_control_group_version_1_beside_version_2_is_read(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "7\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2**31}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "7\n",
    }
    groups = "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"
    assert limits.read_memory_limits(tree(tmp_path, groups, V1 + V2, files)).obtainable_bytes == 2**31


def test_limit_is_found_in_a_container_that_mounts_only_its_subtree(tmp_path: Path) -> None:
    mounts = V1.replace(" / /sys", " /docker/abc /sys")
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**30}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "7\n",
    }
    assert (
        limits.read_memory_limits(tree(tmp_path, "4:memory:/docker/abc\n", mounts, files)).obtainable_bytes
        == 2**30
    )


def test_unreadable_control_groups_set_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/../../x\n",
        V2,
        {"sys/fs/cgroup/memory.max": "garbage", "sys/fs/cgroup/memory.current": ""},
    )
    assert limits.read_memory_limits(root).obtainable_bytes == 2**33
    (root / "proc/self/mountinfo").unlink()
    assert limits.read_memory_limits(root).group is None
