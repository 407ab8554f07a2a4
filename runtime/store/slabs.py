"""The slabs: the buffers between tensors and files. This module chooses the number and size of the slabs, and
allocates the slabs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from teraio import _native
from teraio.errors import StoreError
from teraio.units import fmt_bytes

from .extents import BLOCK

HUGE_PAGE = 2 << 20
SLABS_AT_MOST = 64 << 20
MEMORY_SHARE = 20  # slabs take at most a 20th of the budget
# The number of concurrent operations per drive, each of 2 MiB. 4 operations of 16 MiB reach the same rate.
# But a fetch on demand must wait for the running operations. With 8 operations of 2 MiB, it takes 7.5 ms.
# With 4 operations of 16 MiB, it takes 21 ms (docs/decisions/transfers.md).
LANES = 8
SLAB_BYTES = 2 << 20


class DeviceSide(Protocol):
    """The part of device.Device that a store uses."""

    @property
    def copier(self) -> _native.Copier | None: ...
    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs: ...


def slab_size_and_count(memory_bytes: int | None, files: int) -> tuple[int, int]:
    """Return a pair: the size of a slab, and the number of slabs. There is one slab per lane. A lane is one
    of the concurrent operations of a drive.

    A slab has at most 2 MiB. All slabs together take at most 64 MiB, and at most a 20th of the memory. But
    they take at least one huge page.
    """
    share = SLABS_AT_MOST if memory_bytes is None else min(SLABS_AT_MOST, memory_bytes // MEMORY_SHARE)
    share = max(HUGE_PAGE, share // HUGE_PAGE * HUGE_PAGE)  # whole huge pages
    count = LANES * files
    return max(BLOCK, min(SLAB_BYTES, share // count // BLOCK * BLOCK)), count


def slab_bytes_total(memory_bytes: int | None, files: int) -> int:
    """Return the number of bytes that the slabs will take, in whole huge pages."""
    size, count = slab_size_and_count(memory_bytes, files)
    return -(-size * count // HUGE_PAGE) * HUGE_PAGE


def make_slabs(
    device: DeviceSide | None, memory_bytes: int | None, files: int, fall_back: Callable[[str], None]
) -> _native.Slabs:
    """Let the device allocate the slabs. Without a device, allocate the slabs in RAM. If memory is short,
    halve the size of a slab and try again."""
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
