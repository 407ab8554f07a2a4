"""The order of kernels and copies on a fake device. No schedule lets a kernel read wrong bytes.

The tests remove one wait of the device at a time. The fake device must detect each missing wait.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from fake_device import Event, FakeDevice, FakeStreamTicket, Place, Storage, World
from unnoted import Done

from teraio.runtime.device import choose, cpu
from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.device.device import OrderedDevice
from teraio.runtime.device.pending_transfer import Mark, Pending, Start, StreamTicket, Ticket

SCHEDULES = 3000
CELLS = 9


class At(Enum):
    DEVICE = 1
    EVICTING = 2
    EVICTED = 3
    FETCHING = 4


@dataclass(slots=True)
class Tensor:
    """A tensor as the engine records it.

    `holds` is the list of values that the tensor has if all kernels and copies run in program order.
    """

    storage: Storage
    holds: list[int]
    place: Place = field(default_factory=Place)
    at: At = At.DEVICE
    clean: bool = False
    pending: Pending | None = None


class Run:
    """A random program of kernels, evictions and fetches, in an order that the engine could issue."""

    def __init__(self, seed: int, kind: type[FakeDevice] = FakeDevice) -> None:
        self.world = World(seed)
        self.device = kind(self.world, CELLS)
        self.random = self.world.random
        self.number = 0
        self.tensors: list[Tensor] = []
        for index in range(5):
            size = self.random.randint(1, 3)
            tensor = Tensor(Storage(f"t{index}", size), [], at=At.EVICTED)
            tensor.holds = tensor.place.cells = [100 * (index + 1) + cell for cell in range(size)]
            tensor.clean = True
            self.tensors.append(tensor)

    def go(self, moves: int = 50) -> list[str]:
        actions = (
            self.kernel,
            self.kernel,
            self.transient,
            self.evict,
            self.end,
            self.fetch,
            self.end,
            self.drop,
        )
        for _ in range(moves):
            self.random.choice(actions)()
        for tensor in self.tensors:
            self.check_last_value(tensor)
        self.world.run_out()
        return self.world.faults

    def some(self, *where: At) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.at in where]

    def kernel(self) -> None:
        """Launch a kernel that writes a resident tensor.

        The kernel also reads up to two tensors. Each of the two is resident or being evicted.
        """
        targets, sources = self.some(At.DEVICE), self.some(At.DEVICE, At.EVICTING)
        if targets:
            target = self.random.choice(targets)
            self.launch(self.random.sample(sources, min(2, len(sources))), target.storage, target)
            target.clean = False

    def transient(self) -> None:
        """Launch a kernel with scratch memory, which the host frees before the kernel has used it."""
        size = self.random.randint(1, 3)
        if self.device.room(size):
            scratch = Storage("scratch", size)
            self.device.resize_storage(scratch, size)
            self.launch(self.some(At.DEVICE)[:1], scratch, None)
            self.device.resize_storage(scratch, 0)

    def launch(self, reads: Iterable[Tensor], target: Storage, written: Tensor | None) -> None:
        self.number += 1
        result = [1000 * self.number + cell for cell in range(target.size)]
        self.device.launch([(tensor.storage, tensor.holds) for tensor in reads], target, result)
        if written is not None:
            written.holds = result

    def evict(self) -> None:
        for tensor in self.some(At.DEVICE)[:1]:
            tensor.pending = self.device.begin_copy_out(tensor.storage, self.device.copy_out(tensor.place))
            tensor.at = At.EVICTING

    def fetch(self) -> None:
        fitting = [tensor for tensor in self.some(At.EVICTED) if self.device.room(tensor.storage.size)]
        if fitting:
            self.begin_copy_in(self.random.choice(fitting))

    def begin_copy_in(self, tensor: Tensor) -> None:
        start = self.device.copy_in(tensor.place)
        tensor.pending = self.device.begin_copy_in(tensor.storage, tensor.storage.size, start)
        tensor.at = At.FETCHING

    def end(self) -> None:
        in_flight = self.some(At.EVICTING, At.FETCHING)
        if in_flight:
            self.end_of(self.random.choice(in_flight))

    def end_of(self, tensor: Tensor) -> None:
        assert tensor.pending is not None
        if tensor.at is At.FETCHING:
            self.device.end_copy_in(tensor.pending)
            tensor.at, tensor.clean = At.DEVICE, True
        elif self.random.random() < 0.3:
            self.device.end_copy_without_freeing(tensor.pending)
            tensor.at, tensor.clean = At.DEVICE, True
        else:
            self.device.end_copy_and_free(tensor.pending)
            tensor.at, tensor.clean = At.EVICTED, True
        tensor.pending = None

    def drop(self) -> None:
        clean = [tensor for tensor in self.some(At.DEVICE) if tensor.clean]
        if clean:
            tensor = self.random.choice(clean)
            self.device.drop_bytes(tensor.storage)
            tensor.at = At.EVICTED

    def check_last_value(self, tensor: Tensor) -> None:
        """Make the tensor resident at the end of the program, and launch a kernel that checks the tensor's
        value."""
        while tensor.at in (At.EVICTING, At.FETCHING):
            self.end_of(tensor)
        if tensor.at is At.EVICTED:
            for other in self.tensors:
                if not self.device.room(tensor.storage.size):
                    self.evict_now(other)
            self.begin_copy_in(tensor)
            self.end_of(tensor)
        self.device.launch([(tensor.storage, tensor.holds)], tensor.storage, tensor.holds)

    def evict_now(self, other: Tensor) -> None:
        if other.at in (At.EVICTING, At.FETCHING):
            self.end_of(other)
        if other.at is At.DEVICE:
            other.pending = self.device.begin_copy_out(other.storage, self.device.copy_out(other.place))
            self.device.end_copy_and_free(other.pending)
            other.at, other.clean, other.pending = At.EVICTED, True, None


def test_no_schedule_lets_a_kernel_read_wrong_bytes() -> None:
    for seed in range(SCHEDULES):
        assert Run(seed).go() == [], f"seed {seed}"


# ---- missing waits, which the fake device must detect


class FreesBeforeTheCopy(FakeDevice):
    """Rule: before an evicted tensor is freed, the compute stream must wait for the tensor's copy out. Freed
    memory may be reused immediately."""

    def end_copy_and_free(self, pending: Pending) -> None:
        pending.ticket.wait()
        self.resize_storage(pending.storage, 0)


class FetchesBeforeCompute(FakeDevice):
    """Rule: before a fetch begins, the side stream must wait for the compute stream. Earlier kernels may
    still use the memory that is newly allocated for the fetch."""

    def begin_copy_in(self, storage: Storage, size_bytes: int, start: Start) -> Pending:
        self.resize_storage(storage, size_bytes)
        mark = Mark(Event())
        return Pending(storage, start(storage, mark), mark)


class WaitsForTheUnissued(FakeDevice):
    """Rule: the host must wait until a transfer is issued. The CUDA event of the transfer is recorded only
    then, and kernels wait for this event."""

    def wait_for_copy(self, ticket: Ticket) -> None:
        if isinstance(ticket, StreamTicket):
            self.make_kernels_wait_for_event(ticket.event)
        else:
            ticket.wait()


class EvictsBeforeCompute(FakeDevice):
    """Rule: before a copy out begins, the side stream must wait for the compute stream. The kernel that
    writes the tensor may still run."""

    def begin_copy_out(self, storage: Storage, start: Start) -> Pending:
        mark = Mark(Event())
        return Pending(storage, start(storage, mark), mark)


class ReadsBeforeTheCopy(FakeDevice):
    """Rule: before a kernel reads a fetched tensor, the compute stream must wait for the end of the fetch. A
    fetch that has been issued may still run."""

    def end_copy_in(self, pending: Pending) -> bool:
        pending.ticket.wait()
        return False


class WritesDuringTheEviction(FakeDevice):
    """Rule: if a tensor is kept resident after its copy out has begun, the compute stream must wait for the
    copy. Kernels may write to the tensor only when the copy has ended."""

    def end_copy_without_freeing(self, pending: Pending) -> None:
        pass


@pytest.mark.parametrize(
    "planted",
    [
        FreesBeforeTheCopy,
        FetchesBeforeCompute,
        WaitsForTheUnissued,
        EvictsBeforeCompute,
        ReadsBeforeTheCopy,
        WritesDuringTheEviction,
    ],
)
def test_the_fake_catches_a_missing_wait(planted: type[FakeDevice]) -> None:
    """Run each device without one wait. The fake device must detect the missing wait in at least 10 of 200
    schedules.

    Each missing wait was detected in at least 15 and at most 195 of the first 200 schedules. If the real
    device lacked a wait, some of 3000 schedules would therefore fail.
    """
    caught = sum(Run(seed, planted).go() != [] for seed in range(200))
    assert caught >= 10, f"{planted.__doc__} Without it, only {caught} of 200 schedules had a fault"


def test_same_seed_gives_same_schedule() -> None:
    one, two = Run(7, FreesBeforeTheCopy), Run(7, FreesBeforeTheCopy)
    assert one.go() == two.go() != []
    assert one.world.now == two.world.now


# ---- tests of the fake device


def test_a_wait_for_an_event_that_was_not_recorded_is_a_no_op() -> None:
    world = World(0)
    fake = FakeDevice(world, 1)
    order: list[str] = []
    early, late = Event(), Event()
    fake.compute.wait_event(early)
    fake.side[0].give(lambda: None, lambda: order.append("side"))
    fake.side[0].record(late)
    fake.compute.give(lambda: order.append("compute"), lambda: None)
    assert order == ["compute"]
    fake.compute.wait_event(late)
    fake.compute.give(lambda: order.append("after"), lambda: None)
    world.run_out()
    assert order == ["compute", "side", "after"]


def test_endless_host_wait_raises_deadlock() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        World(0).run_until(lambda: False)


# ---- copies that fail, and when a copy has ended


class Failing:
    """A ticket whose wait raises an error. If `finished` is False, the ticket's copy still runs."""

    def __init__(self, error: BaseException, finished: bool = True) -> None:
        self.error = error
        self.finished = finished

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        raise self.error


@pytest.fixture
def evicted() -> Iterator[torch.Tensor]:
    """Yield an evicted tensor. No engine exists that could fetch the tensor."""
    tensor, device = torch.arange(64, dtype=torch.uint8), CpuDevice()
    # A freed storage may have had this address, and the observer may still watch the address.
    forget(tensor.untyped_storage())
    device.drop_bytes(tensor.untyped_storage())
    yield tensor
    forget(tensor.untyped_storage())


def forget(storage: torch.UntypedStorage) -> None:
    """End the observation of a storage, as an engine does when it deletes the storage's record."""
    observer = CpuDevice().observer
    assert observer is not None
    observer.forget_storage(storage._cdata, alive=True)


def cannot_be_read(tensor: torch.Tensor) -> bool:
    with pytest.raises(RuntimeError, match="teraio: no engine exists that could fetch it"):
        tensor.sum()
    return True


def test_an_eviction_that_failed_frees_nothing() -> None:
    cpu, storage = CpuDevice(), torch.full((64,), 7, dtype=torch.uint8).untyped_storage()
    pending = cpu.begin_copy_out(storage, lambda storage, mark: Failing(OSError("full")))
    with pytest.raises(OSError, match="full"):
        cpu.end_copy_and_free(pending)
    assert storage.tolist() == [7] * 64
    forget(storage)


def test_a_fetch_that_failed_leaves_the_storage_empty(evicted: torch.Tensor) -> None:
    cpu, storage = CpuDevice(), evicted.untyped_storage()
    pending = cpu.begin_copy_in(storage, 64, lambda storage, mark: Failing(OSError("lost")))
    with pytest.raises(OSError, match="lost"):
        cpu.end_copy_in(pending)
    assert pending.block.nbytes() == 0
    assert cannot_be_read(evicted)


def test_a_fetch_that_could_not_start_leaves_the_storage_empty(evicted: torch.Tensor) -> None:
    blocks: list[torch.UntypedStorage] = []

    def start(storage: Any, mark: Mark) -> Ticket:
        blocks.append(storage)
        raise OSError("queue")

    with pytest.raises(OSError, match="queue"):
        CpuDevice().begin_copy_in(evicted.untyped_storage(), 64, start)
    assert [block.nbytes() for block in blocks] == [0]
    assert cannot_be_read(evicted)


def test_an_interrupted_fetch_keeps_its_memory_while_the_copy_runs(evicted: torch.Tensor) -> None:
    cpu, storage = CpuDevice(), evicted.untyped_storage()
    pending = cpu.begin_copy_in(
        storage, 64, lambda storage, mark: Failing(KeyboardInterrupt(), finished=False)
    )
    with pytest.raises(KeyboardInterrupt):
        cpu.end_copy_in(pending)
    assert pending.block.nbytes() == 64
    assert cannot_be_read(evicted)


def test_storage_and_event_of_copy_live_until_its_end() -> None:
    class Held(Event):
        pass

    class Marking(OrderedDevice):
        def mark_compute_stream(self) -> Mark:
            return Mark(Held(), 1)

    world = World(0)
    tensor = torch.ones(64)
    pending = Marking().begin_copy_out(
        tensor.untyped_storage(), lambda storage, mark: FakeStreamTicket(world, Event())
    )
    event, alive = weakref.ref(pending.mark.event), weakref.ref(pending.storage)
    del tensor
    gc.collect()
    assert event() is not None
    assert alive() is not None
    del pending
    gc.collect()
    assert event() is None


def test_round_trip_of_a_storage_on_the_cpu(evicted: torch.Tensor) -> None:
    cpu, storage, view = CpuDevice(), evicted.untyped_storage(), evicted[8:16]
    copied = bytearray(range(64))

    def out(storage: Any, mark: Mark) -> Ticket:
        assert mark.handle == 0
        copied[:] = bytes(storage)
        return Done()

    def into(storage: Any, mark: Mark) -> Ticket:
        storage.copy_(torch.frombuffer(copied, dtype=torch.uint8).untyped_storage())
        return Done()

    for _ in range(2):
        assert cannot_be_read(view)
        assert storage.nbytes() == 64
        cpu.end_copy_in(cpu.begin_copy_in(storage, 64, into))
        copied[:] = bytes(64)
        assert view.tolist() == list(range(8, 16))
        cpu.end_copy_and_free(cpu.begin_copy_out(storage, out))


# ---- budgets


def test_cpu_budget_is_a_tenth_below_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_bytes", lambda: 1000)
    assert CpuDevice().default_budget_bytes() == 900


def test_without_a_gpu_the_device_is_ram() -> None:
    if not torch.cuda.is_available():
        assert choose.choose_device().kind == "cpu"
    assert choose.choose_device("cpu").copier is None
    slabs = choose.choose_device("cpu").allocate_slabs(4096, 2)
    assert slabs.arena_bytes == 8192
