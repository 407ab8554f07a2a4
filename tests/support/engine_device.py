"""A fake asynchronous device for the real engine. The device's memory holds torch storages, and the store
copies on the device's streams.

    engine -> torch storage -> cells of 4 KiB in one arena
    kernels, copies         -> streams in virtual time
    store   native             the real Store on MemoryIo; its CudaCopier calls a driver in this file
            streams            tickets that are issued and then have an event, as with GPUDirect

A test uses one of two stores. The store `native` copies only when the test drives the in-memory I/O. The test
does this at random moments while virtual time passes. The store `streams` issues its copies itself,
immediately or after a disk's delay. A seed decides every delay.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from fake_device import POISON, Event, FakeDevice, Place, Storage, Stream, World
from for_now import folder_for_now

from teraio import _native
from teraio.runtime.device.pending_transfer import Mark, Pending, Start
from teraio.runtime.store.store import Store

CELL = 4096  # bytes of a cell; the engine records no smaller storage
TORN = -2  # the content of a cell whose words differ
SLABS = 3  # number of one-cell slabs; a tensor of two or three cells is copied through them in pieces

SOURCE = Path(__file__).with_name("asked_cuda.cpp")


def cell_bytes(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True) * (CELL // 8)


class Arena:
    """A block of real memory, divided into cells. An assignment fills a cell with one number, and an access
    returns this number.
    """

    def __init__(self, cells: int) -> None:
        self.raw = bytearray(cells * CELL)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        for cell in range(cells):
            self[cell] = POISON

    def __getitem__(self, cell: int) -> int:
        block = self.raw[cell * CELL : (cell + 1) * CELL]
        word = block[:8]
        return int.from_bytes(word, "little", signed=True) if block == word * (CELL // 8) else TORN

    def __setitem__(self, cell: int, value: int) -> None:
        self.raw[cell * CELL : (cell + 1) * CELL] = cell_bytes(value)


class DiskWorld(World):
    """A world (virtual time) in which transfers of the disk end at random moments while time passes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.flying: list[Any] = []  # tickets of the store that are in flight
        self.disk = Random(seed)

    def pass_time(self) -> None:
        super().pass_time()
        while self.flying and self.disk.random() < 0.4:
            ticket = self.disk.choice(self.flying)
            if ticket.done():
                self.flying.remove(ticket)


class Address:
    """A stand-in for a storage. The store needs only the storage's address."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class EngineDevice(FakeDevice):
    """A fake device for the real engine. The events of its streams have numbers, as in native code."""

    world: DiskWorld

    def __init__(self, world: DiskWorld, cells: int) -> None:
        super().__init__(world, cells)
        self.arena = Arena(cells)
        self.cells: Any = self.arena
        self.size = cells
        # address of a torch storage -> (its storage on the fake device, weak reference)
        self.known: dict[int, tuple[Storage, Any]] = {}
        self.events: dict[int, Event] = {}
        self.streams: dict[int, Stream] = {}
        self.fetch_begun: Callable[[], None] = lambda: None  # called after a fetch has allocated its memory

    # ---- torch's storages

    def place(self, storage: torch.UntypedStorage) -> Storage:
        return self.known[storage._cdata][0]

    def empty(self, name: str, cells: int, parameter: bool = False) -> torch.Tensor:
        """Return a new tensor, allocated as a program or user code would do."""
        self.sweep()
        tensor = torch.empty(cells * CELL, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        fake = Storage(name, cells)
        self.known[storage._cdata] = (fake, storage._weak_ref())
        super().resize_storage(fake, cells)
        return torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor

    def sweep(self) -> None:
        """Free the memory of storages that no tensor uses any more."""
        for key, (fake, weak) in list(self.known.items()):
            if torch.UntypedStorage._expired(weak):
                torch.UntypedStorage._free_weak_ref(weak)
                del self.known[key]
                if fake.at is not None:
                    super().resize_storage(fake, 0)

    def default_budget_bytes(self) -> int:
        return self.size * CELL

    def used_bytes(self) -> int:
        return (self.size - sum(size for _, size in self._free)) * CELL

    def resize_storage(self, storage: Any, size_bytes: int) -> None:
        self.sweep()
        storage.resize_(size_bytes)
        super().resize_storage(self.place(storage), size_bytes // CELL)

    def storage_at(self, address: int) -> Storage:
        cell = (address - self.arena.address) // CELL
        return next(fake for fake, _ in self.known.values() if fake.at == cell)

    # ---- arguments that the store receives

    def begin_copy_out(self, storage: Any, start: Start) -> Pending:
        return super().begin_copy_out(storage, self._with_address(start))

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        begun = super().begin_copy_in(storage, size_bytes, self._with_address(start))
        self.fetch_begun()
        return begun

    def _with_address(self, start: Start) -> Start:
        def begin(storage: Any, mark: Mark) -> Any:
            at = self.place(storage).at
            assert at is not None
            ticket = start(Address(self.arena.address + at * CELL), mark)
            self.world.flying.append(ticket)
            return ticket

        return begin

    def mark_compute_stream(self) -> Mark:
        event = super().mark_compute_stream().event
        return Mark(event, self.number_of(event))

    def number_of(self, event: Event) -> int:
        self.events[len(self.events) + 1] = event
        return len(self.events)

    # ---- answers to calls of the copier's driver

    def answer(self, what: int, a: int, b: int, c: int, d: int) -> int:
        """Answer a call that the fake driver passes to this device. `what` is the number of the driver's
        function in the enum of asked_cuda.cpp.
        """
        try:
            match what:
                case 0:
                    self.streams[len(self.streams) + 1] = Stream(self.world, "copier")
                    return len(self.streams)
                case 1:
                    self.streams[a].wait_event(self.events[b])
                case 2:
                    return self.number_of(Event())
                case 3:
                    # Each recording of an event makes a new point in the stream.
                    again = self.events[a] = Event()
                    self.streams[b].record(again)
                case 4:
                    event = self.events[a]
                    self.world.run_until(lambda: event.fired or not event.recorded)
                case _:
                    target, source, stream = a, b, self.streams[d]
                    (self._to_slab if what == 5 else self._from_slab)(stream, target, source, c)
        except BaseException as error:  # noqa: BLE001  no exception may pass through C++
            self.world.faults.append(f"the driver: {error!r}")
        return 0

    def _to_slab(self, stream: Stream, slab: int, source: int, size: int) -> None:
        """Copy from device memory to a slab, a transfer buffer. If the source changes during the copy, the
        slab receives the number POISON.
        """
        seen: list[bytes] = []

        def end() -> None:
            now = ctypes.string_at(source, size)
            ctypes.memmove(slab, now if seen == [now] else cell_bytes(POISON) * (size // CELL), size)

        stream.give(lambda: seen.append(ctypes.string_at(source, size)), end)

    def _from_slab(self, stream: Stream, target: int, slab: int, size: int) -> None:
        def begin() -> None:
            ctypes.memmove(target, cell_bytes(POISON) * (size // CELL), size)

        def end() -> None:
            ctypes.memmove(target, slab, size)

        stream.give(begin, end)


# ---- host memory


@dataclass(slots=True)
class HostPlace(Place):
    size: int = 0


class FakeHost:
    """Host memory with a limited number of cells.

    The next tensor of the same size gets a released place immediately. Old copies may still read and write
    this place.
    """

    def __init__(self, device: EngineDevice, cells: int) -> None:
        self.device = device
        self.left = cells
        self.free: dict[int, list[HostPlace]] = {}

    def reserve(self, size_bytes: int) -> HostPlace | None:
        cells = size_bytes // CELL
        if self.free.get(cells):
            return self.free[cells].pop()
        if cells > self.left:
            return None
        self.left -= cells
        return HostPlace(size=cells)

    def release(self, place: HostPlace) -> None:
        self.free.setdefault(place.size, []).append(place)

    def copy_out_starter(self, place: HostPlace) -> Start:
        return lambda storage, mark: self._start(self.device.copy_out(place), storage, mark)

    def copy_in_starter(self, place: HostPlace, demand: bool = False) -> Start:
        return lambda storage, mark: self._start(self.device.copy_in(place), storage, mark)

    def _start(self, copy: Callable[[Storage, Mark], Any], storage: Any, mark: Mark) -> Any:
        return copy(self.device.storage_at(storage.data_ptr()), Mark(self.device.events[mark.handle]))


# ---- the two stores


class StreamStore:
    """A store whose tickets (pending transfers) get an event when the transfer is issued. The device waits
    for this event, and the host does not wait.
    """

    def __init__(self, device: EngineDevice) -> None:
        self.device = device
        self.slab_bytes_total = self.total_written_bytes = self.total_read_bytes = 0

    def enable_transfer_times(self) -> None:
        """Do nothing, because these tickets have no times."""

    def reserve(self, size_bytes: int, name: str) -> Place:
        return Place()

    def release(self, extent: Place) -> None:
        pass

    def write(self, extent: Place, address: int, name: str, demand: bool = False, event: int = 0) -> Any:
        return self._start(self.device.copy_out(extent), address, event)

    def read(self, extent: Place, address: int, name: str, demand: bool = False, event: int = 0) -> Any:
        return self._start(self.device.copy_in(extent), address, event)

    def _start(self, copy: Callable[[Storage, Mark], Any], address: int, event: int) -> Any:
        return copy(self.device.storage_at(address), Mark(self.device.events[event]))

    def close(self) -> None:
        pass


@cache
def driver() -> tuple[str, ctypes.CDLL]:
    """Return the path and the library of the driver in asked_cuda.cpp. The driver is compiled only one time
    per process.
    """
    target = folder_for_now("test-driver") / "libcuda_asked.so"
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", SOURCE, "-o", target], check=True)
    return str(target), ctypes.CDLL(str(target))


QUESTION = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int, *[ctypes.c_uint64] * 4)


def native_store(device: EngineDevice, seed: int, folder: Path) -> Store:
    """Return the real store over in-memory I/O, for which a seed decides the order of transfers. The store
    copies on the device's streams.
    """
    path, library = driver()
    device.question = QUESTION(device.answer)  # type: ignore[attr-defined]  # C++ keeps only the address
    library.asked_by(device.question)  # type: ignore[attr-defined]
    side = SimpleNamespace(
        copier=_native.CudaCopier(path), allocate_slabs=lambda size, count: _native.Slabs(CELL, SLABS)
    )
    io = _native.MemoryIo(size_bytes=64 << 20, depth=2, jitter=3.0, seed=seed)
    return Store(folder, 4 << 20, accept=("tmpfs",), device=side, wrap=lambda _: io)
