"""Requirements of GPUDirect Storage (GDS), read from /sys and /proc. In: a directory, the names of the GPUs.
Out: each unmet requirement, with its remedy.

    GPU        a data-centre card; no GeForce, no GH200
    drives     NVMe drives at a PCIe port; no md array, no multipath of the device mapper, no NVMe-oF
    transfers  P2PDMA of the kernel (6.2 or newer, open driver 565 or newer), or the module nvidia-fs

    path -> device number -> /sys/dev/block/9:0 -> its `slaves` -> partition -> disk -> its controller

An empty answer means that no requirement is unmet. Only the trial in gds.py shows that transfers bypass RAM.
This module transfers nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .drive_health import NoAnswer, device_number_of_path, devices_of_block_device, is_disk

ROOT = Path("/")
# Cards that NVIDIA lists for GDS with P2PDMA. GB200 has the B200 of this list.
CARDS = re.compile(r"\b(A100|A40|L4|L40S|H100|H200|G?B[1-3]00)(?![0-9A-Z])")
KERNEL_LEAST = (6, 2)
DRIVER_LEAST = 565
STRIPE = (
    "give each of its drives a file system, and name all directories in `store`: teraio stripes over them"
)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One unmet requirement, and its remedy. `about` is "gpu", "drive" or "software"."""

    about: str
    found: str
    remedy: str


def find_gds_obstacles(
    folder: Path, gpus: Sequence[str], *, root: Path = ROOT, number: str = ""
) -> list[Obstacle]:
    """List the unmet requirements of GDS for a directory and the GPUs with these names.

    `root` replaces the root directory, for tests. `number` is the number of the directory's block device. If
    it is "", find the number.
    """
    found = [*_obstacles_of_gpus(gpus)]
    try:
        number = number or device_number_of_path(folder)
        found += _obstacles_of_block_device(root / "sys/dev/block" / number)
    except (NoAnswer, OSError) as why:
        fix = "name a directory on a local NVMe drive"
        found.append(Obstacle("drive", f"the drive is unknown ({why})", fix))
    return [*found, *_obstacles_of_software(root)]


def _obstacles_of_gpus(gpus: Sequence[str]) -> Iterator[Obstacle]:
    for gpu in dict.fromkeys(gpus):
        if not CARDS.search(gpu):
            cards = "A100, A40, L4, L40S, H100, H200 and the B series"
            yield Obstacle(
                "gpu", f"{gpu} is no data-centre card that GDS supports", f"GDS needs one of {cards}"
            )


def _obstacles_of_block_device(place: Path) -> Iterator[Obstacle]:
    """Yield the obstacles of a block device, and of the devices that it consists of."""
    for device in devices_of_block_device(place):
        if (device / "md").exists():
            yield Obstacle("drive", f"{device.name} is an md array", STRIPE)
        if "mpath-" in _text(device / "dm/uuid"):
            fix = "mount the drive without multipath: remove it from /etc/multipath.conf"
            yield Obstacle("drive", f"{device.name} is a multipath device of the device mapper", fix)
        if is_disk(device):
            yield from _obstacles_of_disk(device)


def _obstacles_of_disk(disk: Path) -> Iterator[Obstacle]:
    if not disk.name.startswith("nvme"):
        yield Obstacle("drive", f"{disk.name} is no NVMe drive", "name a directory on a local NVMe drive")
        return
    controllers = (disk / "device/transport", *sorted(disk.glob("device/nvme*/transport")))
    transports = {text for text in map(_text, controllers) if text}
    for transport in sorted(transports - {"pcie"}):
        found = f"{disk.name} is an NVMe drive over {transport} (NVMe-oF)"
        yield Obstacle("drive", found, "name a directory on a drive in this machine")


def _obstacles_of_software(root: Path) -> Iterator[Obstacle]:
    """Yield the reasons why the kernel offers no P2PDMA, unless the module nvidia-fs is loaded."""
    if (root / "sys/module/nvidia_fs").exists() or (root / "proc/driver/nvidia-fs").exists():
        return
    release = _text(root / "proc/sys/kernel/osrelease")
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if version < KERNEL_LEAST:
        least = ".".join(map(str, KERNEL_LEAST))
        yield Obstacle(
            "software",
            f"kernel {release or 'of unknown version'} has no P2PDMA for NVMe drives",
            f"install kernel {least} or newer, or load the module nvidia-fs",
        )
    driver = _text(root / "proc/driver/nvidia/version")
    number = re.search(r"\b(\d{3,})(?:\.\d+)+", driver)
    if not number:
        yield Obstacle("software", "the NVIDIA driver is not loaded", "install the open driver, 565 or newer")
    elif "Open Kernel Module" not in driver:
        yield Obstacle(
            "software",
            f"driver {number[0]} is the proprietary one",
            f"install the open driver, {DRIVER_LEAST} or newer, or load the module nvidia-fs",
        )
    elif int(number[1]) < DRIVER_LEAST:
        yield Obstacle(
            "software",
            f"driver {number[0]} has no P2PDMA",
            f"install the open driver, {DRIVER_LEAST} or newer, or load the module nvidia-fs",
        )


def _text(path: Path) -> str:
    """Return the text of a file of the kernel, or "" if the file cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
