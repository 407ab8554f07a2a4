"""A device in RAM that also has host memory. Bytes are really copied between the two."""

from __future__ import annotations

import ctypes
from typing import Any

from teraio.runtime.device import cpu
from teraio.runtime.device.device import Host
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.device.pending_transfer import Start

FAST = 8 * 10**9  # bytes per second; about the rate of copies in RAM


class Arrived:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Bytes:
    """A place in host memory. A released place is overwritten, so that a later read gets wrong numbers."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = bytearray(size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


class Ram:
    """Host memory that copies synchronously."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used_bytes, self.most_bytes = limit_bytes, 0, 0

    def reserve(self, size_bytes: int) -> Bytes | None:
        if self.used_bytes + size_bytes > self.limit_bytes:
            return None
        self.used_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return Bytes(size_bytes)

    def release(self, place: Bytes) -> None:
        self.used_bytes -= len(place.bytes)
        place.bytes[:] = b"\xff" * len(place.bytes)

    def copy_out_starter(self, place: Bytes) -> Start:
        return lambda storage, mark: self._copy(place.address, storage.data_ptr(), place)

    def copy_in_starter(self, place: Bytes, demand: bool = False) -> Start:
        return lambda storage, mark: self._copy(storage.data_ptr(), place.address, place)

    def _copy(self, target: int, source: int, place: Bytes) -> Arrived:
        ctypes.memmove(target, source, len(place.bytes))
        return Arrived()


class RamDevice(cpu.CpuDevice):
    refusal = ""

    def make_host_tier(self, limit_bytes: int) -> Host | None:
        return Ram(limit_bytes)

    def measure_host_link(self, host: Host, seconds: float, memory_bytes: int = 0) -> LinkRates | str:
        return self.refusal or LinkRates("host", FAST, FAST, FAST, FAST, 10_000, 10_000)


class LateBytes(Bytes):
    """A place whose new bytes are visible to later copies immediately, as on a stream. The host sees them
    only after it has waited.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.coming: bytes | None = None


class LateRam(Ram):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.late: list[LateBytes] = []

    def reserve(self, size_bytes: int) -> Bytes | None:
        place = super().reserve(size_bytes)
        return None if place is None else LateBytes(size_bytes)

    def copy_out_starter(self, place: Bytes) -> Start:
        def start(storage: Any, mark: Any) -> Arrived:
            assert isinstance(place, LateBytes)
            place.coming = ctypes.string_at(storage.data_ptr(), len(place.bytes))
            place.bytes[:] = b"\xff" * len(place.bytes)
            self.late.append(place)
            return Arrived()

        return start

    def copy_in_starter(self, place: Bytes, demand: bool = False) -> Start:
        def start(storage: Any, mark: Any) -> Arrived:
            assert isinstance(place, LateBytes)
            coming = bytes(place.bytes) if place.coming is None else place.coming
            ctypes.memmove(storage.data_ptr(), coming, len(coming))
            return Arrived()

        return start

    def arrive(self) -> int:
        count = len(self.late)
        for place in self.late:
            if place.coming is not None:
                place.bytes[:], place.coming = place.coming, None
        self.late.clear()
        return count


class Late(RamDevice):
    """A device whose copies to host memory become visible to the host only after the host has waited for the
    device.
    """

    arrived_late = 0

    def make_host_tier(self, limit_bytes: int) -> Host | None:
        self.beside = LateRam(limit_bytes)
        return self.beside

    def wait_until_idle(self) -> None:
        Late.arrived_late += self.beside.arrive()
