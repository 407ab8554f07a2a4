"""Tests of the requirements of GPUDirect Storage, read from a made tree of /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from teraio.cli import doctor
from teraio.runtime.device import cuda
from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.store import gds, gds_support

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
FOLDER = Path("/nvme/teraio")


class Sys:
    """A made root directory with /sys and /proc. The device numbers are 259:N in the order of creation."""

    def __init__(self, root: Path, kernel: str = "6.8.0-45-generic", driver: str = OPEN) -> None:
        self.root, self.count = root, 0
        (root / "sys/dev/block").mkdir(parents=True)
        self.write("proc/sys/kernel/osrelease", kernel + "\n")
        if driver:
            self.write("proc/driver/nvidia/version", driver)

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def add_device(self, place: str, slaves: tuple[str, ...] = (), **files: str) -> str:
        """Add a block device at `sys/devices/PLACE`. Return its number."""
        folder = self.root / "sys/devices" / place
        self.count += 1
        number = f"259:{self.count}"
        self.write(f"sys/devices/{place}/dev", number + "\n")
        for name, text in files.items():
            self.write(f"sys/devices/{place}/{name.replace('__', '/')}", text)
        (folder / "slaves").mkdir()
        for slave in slaves:
            (folder / "slaves" / Path(slave).name).symlink_to(self.root / "sys/devices" / slave)
        (self.root / "sys/dev/block" / number).symlink_to(folder)
        return number

    def obstacles(self, number: str, *gpus: str) -> list[gds_support.Obstacle]:
        names = gpus or ("NVIDIA H100 80GB HBM3",)
        return gds_support.find_gds_obstacles(FOLDER, names, root=self.root, number=number)


def add_nvme(tree: Sys, name: str = "nvme0n1", transport: str = "pcie") -> str:
    return tree.add_device(name, device__transport=transport + "\n")


def only(found: list[gds_support.Obstacle]) -> gds_support.Obstacle:
    (obstacle,) = found
    assert obstacle.remedy
    return obstacle


def test_supported_machine_has_no_obstacle(tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    add_nvme(tree)
    partition = tree.add_device("nvme0n1/nvme0n1p1", partition="1\n")
    assert tree.obstacles(partition) == []


@pytest.mark.parametrize(
    "gpu",
    [
        *("NVIDIA A100-SXM4-80GB", "NVIDIA A40", "NVIDIA L4", "NVIDIA L40S", "NVIDIA H100 PCIe"),
        *("NVIDIA H200", "NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA GB200"),
    ],
)
def test_data_centre_card_is_no_obstacle(gpu: str, tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    assert tree.obstacles(add_nvme(tree), gpu) == []


@pytest.mark.parametrize(
    "gpu",
    [
        *("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA RTX A4000"),
        *("NVIDIA GH200 480GB", "NVIDIA L40", "Tesla T4", "NVIDIA A10"),
    ],
)
def test_other_card_is_named(gpu: str, tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    obstacle = only(tree.obstacles(add_nvme(tree), "NVIDIA H100 PCIe", gpu))
    assert gpu in obstacle.found and obstacle.about == "gpu"


def test_md_array_is_named_below_a_partition(tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    for name in ("nvme0n1", "nvme1n1"):
        add_nvme(tree, name)
    tree.add_device("md0", ("nvme0n1", "nvme1n1"), md__level="raid0\n")
    partition = tree.add_device("md0/md0p1", partition="1\n")
    obstacle = only(tree.obstacles(partition))
    assert obstacle.found == "md0 is an md array" and "teraio stripes over them" in obstacle.remedy


def test_multipath_is_named_and_a_logical_volume_is_not(tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    add_nvme(tree)
    multipath = tree.add_device("dm-0", ("nvme0n1",), dm__uuid="mpath-36001405\n")
    volume = tree.add_device("dm-1", ("nvme0n1",), dm__uuid="LVM-abc\n")
    assert only(tree.obstacles(multipath)).found == "dm-0 is a multipath device of the device mapper"
    assert tree.obstacles(volume) == []
    above = tree.add_device("dm-2", ("dm-0",), dm__uuid="LVM-def\n")
    assert only(tree.obstacles(above)).found.startswith("dm-0 is a multipath")


def test_transport_of_the_controller_is_named(tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    assert "over tcp (NVMe-oF)" in only(tree.obstacles(add_nvme(tree, "nvme0n1", "tcp"))).found
    # With the kernel's own multipath, `device` is a subsystem, and its controllers are in this folder.
    shared = tree.add_device("nvme1n1", device__nvme1__transport="pcie\n", device__nvme2__transport="rdma\n")
    assert "nvme1n1 is an NVMe drive over rdma" in only(tree.obstacles(shared)).found


def test_drive_that_is_not_nvme_or_not_shown_is_named(tmp_path: Path) -> None:
    tree = Sys(tmp_path)
    assert only(tree.obstacles(tree.add_device("sda"))).found == "sda is no NVMe drive"
    assert "does not show block device 8:99" in only(tree.obstacles("8:99")).found


@pytest.mark.parametrize(
    ("kernel", "driver", "found"),
    [
        ("5.15.0-91-generic", OPEN, "kernel 5.15.0-91-generic has no P2PDMA"),
        ("6.1.0", OPEN, "kernel 6.1.0 has no P2PDMA"),
        ("6.2.0", CLOSED, "driver 550.54.14 is the proprietary one"),
        ("6.10.3", OPEN.replace("570.86.15", "560.35.03"), "driver 560.35.03 has no P2PDMA"),
        ("6.10.3", "", "the NVIDIA driver is not loaded"),
    ],
)
def test_kernel_and_driver_matter_unless_nvidia_fs_is_loaded(
    kernel: str, driver: str, found: str, tmp_path: Path
) -> None:
    tree = Sys(tmp_path, kernel, driver)
    number = add_nvme(tree)
    obstacle = only(tree.obstacles(number))
    assert obstacle.found.startswith(found) and obstacle.about == "software"
    tree.write("sys/module/nvidia_fs/version", "2.30\n")
    assert tree.obstacles(number) == []


def test_doctor_gives_each_directory_its_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {tmp_path / "a": "", tmp_path / "b": "md0 is an md array"}

    def obstacles(folder: Path, gpus: tuple[str, ...]) -> list[gds_support.Obstacle]:
        assert gpus == ("NVIDIA H100",)
        text = folders[folder]
        return [gds_support.Obstacle("drive", text, gds_support.STRIPE)] if text else []

    monkeypatch.setattr(cuda, "gpu_names_from_driver", lambda: ("NVIDIA H100",))
    monkeypatch.setattr(gds_support, "find_gds_obstacles", obstacles)
    monkeypatch.setattr(gds, "reason_without_gds", lambda folder: "refused" if folders[folder] else None)
    used = CpuDevice()
    used.kind = "cuda"
    direct, through_ram = (doctor._judge_gpu_direct_storage_of(folder, used).found for folder in folders)
    assert direct == f"direct, verified on a file in {tmp_path / 'a'}"
    assert f"not used for {tmp_path / 'b'}: md0 is an md array (remedy: give each" in through_ram
