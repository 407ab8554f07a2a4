"""The buffers between tensors and files: how many, how large, and less of them where memory is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from teraio import _native
from teraio.errors import StoreError
from teraio.units import fmt_bytes

from .extents import BLOCK

HUGE_PAGE = 2 << 20
SLABS_AT_MOST = 64 << 20
MEMORY_SHARE = 20  # slabs take at most a 20th of `memory`
# Operations per drive. 8 of 2 MiB run as fast as 4 of 16 MiB, and a demand waits 4 to 18 ms behind them, not
# 12 to 47.
LANES = 8
SLAB_BYTES = 2 << 20


class DeviceSide(Protocol):
    """What a store needs of a device: device.Device has it."""

    @property
    def copier(self) -> _native.Copier | None: ...
    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs: ...


def slab_size_and_count(memory_bytes: int | None, files: int) -> tuple[int, int]:
    """(slab bytes, count): one per lane, of at most 2 MiB; at most 64 MiB and a 20th of the memory in all."""
    share = SLABS_AT_MOST if memory_bytes is None else min(SLABS_AT_MOST, memory_bytes // MEMORY_SHARE)
    share = max(HUGE_PAGE, share // HUGE_PAGE * HUGE_PAGE)  # pages are taken whole
    count = LANES * files
    return max(BLOCK, min(SLAB_BYTES, share // count // BLOCK * BLOCK)), count


def slab_bytes_total(memory_bytes: int | None, files: int) -> int:
    """Memory that they will take, whole pages."""
    size, count = slab_size_and_count(memory_bytes, files)
    return -(-size * count // HUGE_PAGE) * HUGE_PAGE


def make_slabs(
    device: DeviceSide | None, memory_bytes: int | None, files: int, fall_back: Callable[[str], None]
) -> _native.Slabs:
    """Slabs that the device can copy from and to; None: tensors are in RAM."""
    size, count = slab_size_and_count(memory_bytes, files)
    while True:
        try:
            return device.allocate_slabs(size, count) if device is not None else _native.Slabs(size, count)
        except OSError as error:
            if size * count <= HUGE_PAGE or size % (2 * BLOCK):
                raise StoreError(
                    f"no memory for {fmt_bytes(size * count)} of slabs: {error}. Raise ulimit -v or the "
                    f"memory limit of the container",
                    errno=error.errno or 0,
                ) from None
            size //= 2
            fall_back(
                f"memory for slabs is short ({error}): {fmt_bytes(size * count)} instead of "
                f"{fmt_bytes(2 * size * count)}; transfers are somewhat slower"
            )
