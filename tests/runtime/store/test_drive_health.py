"""The health of drives: finding the drives that store a directory, and reading their SMART log."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from teraio.runtime.store import drive_health


def log_page(**values: int) -> bytes:
    page = bytearray(drive_health.PAGE_BYTES)
    for name, (at, size) in {
        "warnings": (0, 1),
        "spare": (3, 1),
        "least": (4, 1),
        "used": (5, 1),
        "units": (48, 16),
        "errors": (160, 16),
    }.items():
        page[at : at + size] = values[name].to_bytes(size, "little")
    return bytes(page)


def tree_of_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a tree like /sys with two drives, a partition on each, and a volume over both partitions."""
    devices, numbers = root / "devices", root / "block"
    for name in ("nvme0n1/nvme0n1p2", "nvme1n1/nvme1n1p1", "dm-0/slaves"):
        (devices / name).mkdir(parents=True)
    numbers.mkdir()
    for number, name in {
        "259:0": "nvme0n1",
        "259:2": "nvme0n1/nvme0n1p2",
        "259:4": "nvme1n1/nvme1n1p1",
        "253:0": "dm-0",
    }.items():
        (devices / name / "dev").write_text(number + "\n")
        (numbers / number).symlink_to(devices / name)
    for part in ("nvme0n1/nvme0n1p2", "nvme1n1/nvme1n1p1"):
        (devices / part / "partition").write_text("1\n")
        (devices / "dm-0/slaves" / Path(part).name).symlink_to(devices / part)
    monkeypatch.setattr(drive_health, "BLOCKS", numbers)


def test_disks_of_a_partition_and_of_a_volume_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree_of_blocks(tmp_path, monkeypatch)
    assert (
        drive_health.disks_of_block_device("259:0")
        == drive_health.disks_of_block_device("259:2")
        == ["nvme0n1"]
    )
    assert drive_health.disks_of_block_device("253:0") == ["nvme0n1", "nvme1n1"]
    with pytest.raises(drive_health.NoAnswer, match="7:7"):
        drive_health.disks_of_block_device("7:7")


def test_size_of_drives_counts_each_drive_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of_blocks(tmp_path, monkeypatch)
    for name, sectors in {"nvme0n1": 4000, "nvme0n1/nvme0n1p2": 3000, "nvme1n1": 2000, "dm-0": 4500}.items():
        (tmp_path / "devices" / name / "size").write_text(f"{sectors}\n")
    numbers = {"volume": "253:0", "partition": "259:2"}
    monkeypatch.setattr(drive_health, "device_number_of_path", lambda path: numbers[path.name])
    assert drive_health.size_of_drives([Path("partition")]) == 4000 * 512
    assert drive_health.size_of_drives([Path("volume"), Path("partition")]) == 6000 * 512


def test_size_of_unknown_drive_is_that_of_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_health, "BLOCKS", tmp_path)
    monkeypatch.setattr(drive_health, "MOUNTS", Path("/dev/null"))
    found = drive_health.size_of_drives([tmp_path, tmp_path.parent])
    assert found == shutil.disk_usage(tmp_path).total > 0


def test_file_system_without_block_device_is_found_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_health, "BLOCKS", tmp_path)
    number = os.stat(tmp_path).st_dev
    own, mounts = f"{os.major(number)}:{os.minor(number)}", tmp_path / "mountinfo"
    monkeypatch.setattr(drive_health, "MOUNTS", mounts)
    mounts.write_text(f"36 35 {own} / /mnt rw,noatime shared:1 - btrfs /dev/null rw\n")
    assert drive_health.device_number_of_path(tmp_path) == "1:3"
    mounts.write_text(f"36 35 {own} / /mnt rw - btrfs /dev/nowhere rw\n")
    (answer,) = drive_health.health_of_drives(tmp_path)
    assert isinstance(answer, drive_health.NoAnswer) and str(answer).startswith("/dev/nowhere: ")
    mounts.write_text(f"36 35 {own} / /mnt rw - overlay overlay rw\n")
    (answer,) = drive_health.health_of_drives(tmp_path)
    assert isinstance(answer, drive_health.NoAnswer) and "does not name its drive" in str(answer)


def test_only_the_smart_log_of_a_drive_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake drive checks the ioctl command, whose layout is in linux/nvme_ioctl.h.

    The fake drive then writes a SMART log page to the address in the command.
    """
    page = log_page(warnings=1, spare=9, least=10, used=130, units=2**70, errors=7)

    def drive(descriptor: int, request: int, command: Any) -> int:
        raw = bytes(command)
        assert (descriptor, request, len(raw)) == (7, 0xC0484E41, 72)
        opcode, namespace, address, size, word = struct.unpack_from("<B3xI16xQ4xII", raw)
        assert (opcode, namespace, size, word) == (2, 2**32 - 1, 512, 2 | 127 << 16)
        assert not any(raw[44:64])
        ctypes.memmove(address, page, size)
        return 0

    monkeypatch.setattr(drive_health.fcntl, "ioctl", drive)
    assert drive_health.parse_smart_page(
        "nvme0n1", drive_health._read_smart_page(7)
    ) == drive_health.DriveHealth("nvme0n1", 130, 9, 10, 2**70 * 512_000, 7, 1)
    monkeypatch.setattr(drive_health.fcntl, "ioctl", lambda *arguments: 0x4002)
    with pytest.raises(OSError, match="0x4002"):
        drive_health._read_smart_page(7)


def test_unreadable_drive_is_reported_by_name() -> None:
    with pytest.raises(drive_health.NoAnswer, match="vda is no NVMe drive"):
        drive_health.read_drive_health("vda")
    with pytest.raises(drive_health.NoAnswer, match=r"/dev/nvme99n9: .*only root may"):
        drive_health.read_drive_health("nvme99n9")
