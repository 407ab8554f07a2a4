"""How worn are the drives below a directory? In: a path. Out: what each says of itself, or why it does not.

    path -> device number -> /sys/dev/block/259:3 -> the disk that it is a part of, or those it is made of
         -> /dev/nvme0n1 -> page 2 of its log (SMART): life used, spare blocks, bytes written, warnings

A file system without a device number of its own (btrfs, say) is found by its line in mountinfo. Only NVMe
drives are asked, and asking takes root; nothing is written to them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

BLOCKS = Path("/sys/dev/block")
MOUNTS = Path("/proc/self/mountinfo")
ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
GET_LOG_PAGE, SMART_PAGE, EVERY_NAMESPACE = 0x02, 0x02, 0xFFFFFFFF
PAGE_BYTES = 512
UNIT_BYTES = 512_000  # what the log counts writes in
TIMEOUT_MS = 2_000


@dataclass(frozen=True, slots=True)
class DriveHealth:
    """`used_percent` is of the life that the maker rates it for, and may exceed 100. `warnings`: the bits of
    the log's first byte (1 few spare blocks, 2 too hot, 4 unreliable, 8 read-only, 16 its backup failed)."""

    drive: str
    used_percent: int
    spare_percent: int
    spare_least_percent: int
    written_bytes: int
    media_errors: int
    warnings: int


class NoAnswer(Exception):
    """The text says which drive, and why."""


def health_of_drives(path: Path) -> tuple[DriveHealth | NoAnswer, ...]:
    """One entry per drive below the path's file system; a single reason if no drive is found."""
    try:
        disks = disks_of_block_device(device_number_of_path(path))
    except NoAnswer as why:
        return (why,)
    except OSError as error:  # in a container, say, where /dev has not what is mounted
        return (NoAnswer(f"{error.filename}: {error.strerror}"),)
    found: list[DriveHealth | NoAnswer] = []
    for disk in disks:
        try:
            found.append(read_drive_health(disk))
        except NoAnswer as why:
            found.append(why)
    return tuple(found)


def device_number_of_path(path: Path) -> str:
    """Its number, `major:minor`: of the directory, else of what is mounted there."""
    number = os.stat(path).st_dev
    own = f"{os.major(number)}:{os.minor(number)}"
    if (BLOCKS / own).exists():
        return own
    for line in MOUNTS.read_text().splitlines():
        words = line.split()
        source = words[words.index("-") + 2]
        if words[2] == own and source.startswith("/dev/"):
            number = os.stat(source).st_rdev
            return f"{os.major(number)}:{os.minor(number)}"
    raise NoAnswer(f"the file system of {path} does not say which drive it is on")


def disks_of_block_device(number: str) -> list[str]:
    """Names in /dev of the disks that a block device is a partition of, or is put together from."""
    place = (BLOCKS / number).resolve()
    if not place.exists():
        raise NoAnswer(f"the kernel does not show block device {number}")
    if (place / "partition").exists():
        place = place.parent
    parts = sorted(place.glob("slaves/*"))
    if not parts:
        return [place.name]
    return sorted(
        {disk for part in parts for disk in disks_of_block_device((part / "dev").read_text().strip())}
    )


def read_drive_health(disk: str) -> DriveHealth:
    """Ask an NVMe drive."""
    if not disk.startswith("nvme"):
        raise NoAnswer(f"{disk} is no NVMe drive")
    try:
        descriptor = os.open(f"/dev/{disk}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NoAnswer(f"/dev/{disk}: {error.strerror}; root may ask it") from error
    try:
        return parse_smart_page(disk, _read_smart_page(descriptor))
    except OSError as error:
        raise NoAnswer(f"/dev/{disk} does not tell: {error.strerror}") from error
    finally:
        os.close(descriptor)


class _NvmeCommand(ctypes.Structure):
    """struct nvme_admin_cmd of linux/nvme_ioctl.h."""

    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
        ("namespace", ctypes.c_uint32),
        ("words2", ctypes.c_uint32 * 2),
        ("metadata", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("metadata_bytes", ctypes.c_uint32),
        ("data_bytes", ctypes.c_uint32),
        ("words10", ctypes.c_uint32 * 6),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    )


def _read_smart_page(descriptor: int) -> bytes:
    page = ctypes.create_string_buffer(PAGE_BYTES)
    command = _NvmeCommand(opcode=GET_LOG_PAGE, namespace=EVERY_NAMESPACE, timeout_ms=TIMEOUT_MS)
    command.address, command.data_bytes = ctypes.addressof(page), PAGE_BYTES
    command.words10[0] = SMART_PAGE | (PAGE_BYTES // 4 - 1) << 16
    status = fcntl.ioctl(descriptor, ADMIN_COMMAND, command)
    if status:
        raise OSError(0, f"status {status:#x} of the drive")
    return page.raw


def parse_smart_page(disk: str, page: bytes) -> DriveHealth:
    """What the page says (NVM Express, SMART / health information)."""

    def number_at(at: int, size: int) -> int:
        return int.from_bytes(page[at : at + size], "little")

    return DriveHealth(
        drive=disk,
        used_percent=page[5],
        spare_percent=page[3],
        spare_least_percent=page[4],
        written_bytes=number_at(48, 16) * UNIT_BYTES,
        media_errors=number_at(160, 16),
        warnings=page[0],
    )
