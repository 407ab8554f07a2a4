"""What a drive says of its own wear: which drives are below a directory, and what is asked of them."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from teraio.runtime.store import drive_health


def log_page(**said: int) -> bytes:
    page = bytearray(drive_health.PAGE_BYTES)
    for name, (at, size) in {
        "warnings": (0, 1),
        "spare": (3, 1),
        "least": (4, 1),
        "used": (5, 1),
        "units": (48, 16),
        "errors": (160, 16),
    }.items():
        page[at : at + size] = said[name].to_bytes(size, "little")
    return bytes(page)


def tree_of_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /sys: two drives, a partition of each, and a volume that is made of both."""
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


def test_the_drives_below_a_partition_and_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of_blocks(tmp_path, monkeypatch)
    assert (
        drive_health.disks_of_block_device("259:0")
        == drive_health.disks_of_block_device("259:2")
        == ["nvme0n1"]
    )
    assert drive_health.disks_of_block_device("253:0") == ["nvme0n1", "nvme1n1"]
    with pytest.raises(drive_health.NoAnswer, match="7:7"):
        drive_health.disks_of_block_device("7:7")


def test_a_file_system_without_a_number_is_found_where_it_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_health, "BLOCKS", tmp_path)
    number = os.stat(tmp_path).st_dev
    own, mounts = f"{os.major(number)}:{os.minor(number)}", tmp_path / "mountinfo"
    monkeypatch.setattr(drive_health, "MOUNTS", mounts)
    mounts.write_text(f"36 35 {own} / /mnt rw,noatime shared:1 - btrfs /dev/null rw\n")
    assert drive_health.device_number_of_path(tmp_path) == "1:3"
    mounts.write_text(f"36 35 {own} / /mnt rw - btrfs /dev/nowhere rw\n")
    (told,) = drive_health.health_of_drives(tmp_path)
    assert isinstance(told, drive_health.NoAnswer) and str(told).startswith("/dev/nowhere: ")
    mounts.write_text(f"36 35 {own} / /mnt rw - overlay overlay rw\n")
    (told,) = drive_health.health_of_drives(tmp_path)
    assert isinstance(told, drive_health.NoAnswer) and "does not say which drive" in str(told)


def test_a_drive_is_asked_for_its_log_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked as linux/nvme_ioctl.h has it: the page arrives where the command points."""
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
    monkeypatch.setattr(drive_health.fcntl, "ioctl", lambda *asked: 0x4002)
    with pytest.raises(OSError, match="0x4002"):
        drive_health._read_smart_page(7)


def test_a_drive_that_cannot_be_asked_is_said_with_its_name() -> None:
    with pytest.raises(drive_health.NoAnswer, match="vda is no NVMe drive"):
        drive_health.read_drive_health("vda")
    with pytest.raises(drive_health.NoAnswer, match=r"/dev/nvme99n9: .*root may"):
        drive_health.read_drive_health("nvme99n9")
