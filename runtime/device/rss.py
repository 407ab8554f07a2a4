"""The resident memory of this process, as the operating system counts it."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")


def _read_status_bytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{STATUS} has no {name}")


def resident_bytes() -> int:
    """Return the number of bytes of this process that are in RAM now."""
    return _read_status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the peak of the resident bytes since `reset_peak`."""
    return _read_status_bytes("VmHWM")


def reset_peak() -> None:
    """Restart the peak of the resident bytes. A process needs no privilege for its own peak."""
    Path("/proc/self/clear_refs").write_text("5")
