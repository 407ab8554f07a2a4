"""The memory of this process as the system sees it."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")


def _read_status_bytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{STATUS} has no {name}")


def resident_bytes() -> int:
    """Pages of this process that are in memory now."""
    return _read_status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most there were since `reset_peak`."""
    return _read_status_bytes("VmHWM")


def reset_peak() -> None:
    """Forgets the peak so far; a process may do this to itself without any right."""
    Path("/proc/self/clear_refs").write_text("5")
