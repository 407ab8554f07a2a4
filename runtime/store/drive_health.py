"""The wear and the size of the drives on which a directory is stored. In: a path. Out: the health of each
drive, or the reason why the health is unknown; the size of the drives.

    path -> device number -> /sys/dev/block/259:3 -> the disk of this partition, or the disks of this array
         -> /dev/nvme0n1 -> page 2 of the drive's log (SMART): used life, spare blocks, written bytes, ...

Some file systems, such as btrfs, have no device number of their own. For such a file system,
/proc/self/mountinfo names the device. This module can read only NVMe drives. It needs root rights, and writes
nothing to the drive.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCKS = Path("/sys/dev/block")
MOUNTS = Path("/proc/self/mountinfo")
ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
GET_LOG_PAGE, SMART_PAGE, EVERY_NAMESPACE = 0x02, 0x02, 0xFFFFFFFF
PAGE_BYTES = 512
SECTOR_BYTES = 512  # the kernel counts the size of each device in sectors of 512 bytes
UNIT_BYTES = 512_000  # the drive's log counts written bytes in units of this size
TIMEOUT_MS = 2_000


@dataclass(frozen=True, slots=True)
class DriveHealth:
    """The health of one drive.

    `used_percent` is the used share of the drive's rated life, and may exceed 100. `warnings` is the first
    byte of the drive's SMART log. Its bits are:

         1   few spare blocks
         2   too hot
         4   unreliable
         8   read-only
        16   memory backup failed
    """

    drive: str
    used_percent: int
    spare_percent: int
    spare_least_percent: int
    written_bytes: int
    media_errors: int
    warnings: int


class NoAnswer(Exception):
    """The error for a drive whose health is unknown. The text names the drive and the reason."""


def health_of_drives(path: Path) -> tuple[DriveHealth | NoAnswer, ...]:
    """Return one entry per drive on which the path is stored: its health, or the reason why the health is
    unknown. If no drive is found, return one such reason."""
    try:
        disks = disks_of_block_device(device_number_of_path(path))
    except NoAnswer as why:
        return (why,)
    except OSError as error:  # for example in a container, whose /dev may lack the mounted device
        return (NoAnswer(f"{error.filename}: {error.strerror}"),)
    found: list[DriveHealth | NoAnswer] = []
    for disk in disks:
        try:
            found.append(read_drive_health(disk))
        except NoAnswer as why:
            found.append(why)
    return tuple(found)


def device_number_of_path(path: Path) -> str:
    """Return the number of the block device on which the path is stored, as `major:minor`.

    If a block device has the number of the path's file system, return this number. Otherwise return the
    number of the device that /proc/self/mountinfo names for this file system.
    """
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
    raise NoAnswer(f"the file system of {path} does not name its drive")


def disks_of_block_device(number: str) -> list[str]:
    """Return the names in /dev of the disks that hold this block device. The block device may be a partition
    or an array."""
    return sorted({each.name for each in devices_of_block_device(BLOCKS / number) if is_disk(each)})


def devices_of_block_device(place: Path) -> Iterator[Path]:
    """Yield the folder in /sys of a block device, and the folders of the devices that it consists of.

    For a partition, yield its disk instead.
    """
    folder = place.resolve()
    if not folder.exists():
        raise NoAnswer(f"the kernel does not show block device {place.name}")
    if (folder / "partition").exists():
        folder = folder.parent
    yield folder
    for part in sorted(folder.glob("slaves/*")):
        yield from devices_of_block_device(part)


def is_disk(device: Path) -> bool:
    """Return True if this folder in /sys is of a device that consists of no other devices."""
    return not any(device.glob("slaves/*"))


def size_of_drives(paths: Iterable[Path]) -> int:
    """Return the sum of the sizes of the drives on which the paths are stored. Each drive counts once.

    If the drives of a path are unknown, its file system counts instead.
    """
    sizes: dict[Path | int, int] = {}
    for path in paths:
        try:
            place = BLOCKS / device_number_of_path(path)
            for device in filter(is_disk, devices_of_block_device(place)):
                sizes[device] = SECTOR_BYTES * int((device / "size").read_text())
        except (NoAnswer, OSError, ValueError):
            about = os.statvfs(path)
            sizes[os.stat(path).st_dev] = about.f_frsize * about.f_blocks
    return sum(sizes.values())


def read_drive_health(disk: str) -> DriveHealth:
    """Read the health of an NVMe drive. Raise NoAnswer if this is impossible."""
    if not disk.startswith("nvme"):
        raise NoAnswer(f"{disk} is no NVMe drive")
    try:
        descriptor = os.open(f"/dev/{disk}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NoAnswer(f"/dev/{disk}: {error.strerror}; only root may read its health") from error
    try:
        return parse_smart_page(disk, _read_smart_page(descriptor))
    except OSError as error:
        raise NoAnswer(f"/dev/{disk} did not return its health: {error.strerror}") from error
    finally:
        os.close(descriptor)


class _NvmeCommand(ctypes.Structure):
    """The C struct nvme_admin_cmd of linux/nvme_ioctl.h."""

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
        raise OSError(0, f"the drive returned status {status:#x}")
    return page.raw


def parse_smart_page(disk: str, page: bytes) -> DriveHealth:
    """Parse the log page "SMART / health information" of the NVM Express standard."""

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
