"""No schedule makes a kernel read bytes that are not there, and a missing wait is found without a GPU."""

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
    LEAVING = 2
    AWAY = 3
    ARRIVING = 4


@dataclass(slots=True)
class Tensor:
    """What the engine knows of a tensor, and what it holds if everything runs at once in program order."""

    storage: Storage
    holds: list[int]
    place: Place = field(default_factory=Place)
    at: At = At.DEVICE
    clean: bool = False
    pending: Pending | None = None


class Run:
    """A random program of kernels, evictions and fetches, as the engine may give them to a device."""

    def __init__(self, seed: int, kind: type[FakeDevice] = FakeDevice) -> None:
        self.world = World(seed)
        self.device = kind(self.world, CELLS)
        self.random = self.world.random
        self.number = 0
        self.tensors: list[Tensor] = []
        for index in range(5):
            size = self.random.randint(1, 3)
            tensor = Tensor(Storage(f"t{index}", size), [], at=At.AWAY)
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
            self.settle(tensor)
        self.world.run_out()
        return self.world.faults

    def some(self, *where: At) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.at in where]

    def kernel(self) -> None:
        """Reads up to two tensors, of which one may be leaving, and writes one that is not."""
        targets, sources = self.some(At.DEVICE), self.some(At.DEVICE, At.LEAVING)
        if targets:
            target = self.random.choice(targets)
            self.launch(self.random.sample(sources, min(2, len(sources))), target.storage, target)
            target.clean = False

    def transient(self) -> None:
        """A kernel's scratch memory: taken and given back at once by the host, used later."""
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
            tensor.at = At.LEAVING

    def fetch(self) -> None:
        away = [tensor for tensor in self.some(At.AWAY) if self.device.room(tensor.storage.size)]
        if away:
            self.begin_copy_in(self.random.choice(away))

    def begin_copy_in(self, tensor: Tensor) -> None:
        start = self.device.copy_in(tensor.place)
        tensor.pending = self.device.begin_copy_in(tensor.storage, tensor.storage.size, start)
        tensor.at = At.ARRIVING

    def end(self) -> None:
        under_way = self.some(At.LEAVING, At.ARRIVING)
        if under_way:
            self.end_of(self.random.choice(under_way))

    def end_of(self, tensor: Tensor) -> None:
        assert tensor.pending is not None
        if tensor.at is At.ARRIVING:
            self.device.end_copy_in(tensor.pending)
            tensor.at, tensor.clean = At.DEVICE, True
        elif self.random.random() < 0.3:
            self.device.end_copy_without_freeing(tensor.pending)
            tensor.at, tensor.clean = At.DEVICE, True
        else:
            self.device.end_copy_and_free(tensor.pending)
            tensor.at, tensor.clean = At.AWAY, True
        tensor.pending = None

    def drop(self) -> None:
        clean = [tensor for tensor in self.some(At.DEVICE) if tensor.clean]
        if clean:
            tensor = self.random.choice(clean)
            self.device.drop_bytes(tensor.storage)
            tensor.at = At.AWAY

    def settle(self, tensor: Tensor) -> None:
        """Every tensor is looked at once more in the end, then makes room."""
        while tensor.at in (At.LEAVING, At.ARRIVING):
            self.end_of(tensor)
        if tensor.at is At.AWAY:
            for other in self.tensors:
                if not self.device.room(tensor.storage.size):
                    self.make_away(other)
            self.begin_copy_in(tensor)
            self.end_of(tensor)
        self.device.launch([(tensor.storage, tensor.holds)], tensor.storage, tensor.holds)

    def make_away(self, other: Tensor) -> None:
        if other.at in (At.LEAVING, At.ARRIVING):
            self.end_of(other)
        if other.at is At.DEVICE:
            other.pending = self.device.begin_copy_out(other.storage, self.device.copy_out(other.place))
            self.device.end_copy_and_free(other.pending)
            other.at, other.clean, other.pending = At.AWAY, True, None


def test_no_schedule_lets_a_kernel_read_what_is_not_there() -> None:
    for seed in range(SCHEDULES):
        assert Run(seed).go() == [], f"seed {seed}"


# ---- what the fake is worth: each wait, left out


class FreesBeforeTheCopy(FakeDevice):
    """Rule: freed memory may be reused at once, so the compute stream waits for the copy first."""

    def end_copy_and_free(self, pending: Pending) -> None:
        pending.ticket.wait()
        self.resize_storage(pending.storage, 0)


class FetchesBeforeCompute(FakeDevice):
    """Rule: fresh memory may still be in use, so the side stream waits for the compute stream."""

    def begin_copy_in(self, storage: Storage, size_bytes: int, start: Start) -> Pending:
        self.resize_storage(storage, size_bytes)
        mark = Mark(Event())
        return Pending(storage, start(storage, mark), mark)


class WaitsForTheUnissued(FakeDevice):
    """Rule: the host waits until the transfer is issued, or there is no event to wait for yet."""

    def wait_for_copy(self, ticket: Ticket) -> None:
        if isinstance(ticket, StreamTicket):
            self.make_kernels_wait_for_event(ticket.event)
        else:
            ticket.wait()


class EvictsBeforeCompute(FakeDevice):
    """Rule: the kernel that makes the tensor may still run, so the copy waits for the compute stream."""

    def begin_copy_out(self, storage: Storage, start: Start) -> Pending:
        mark = Mark(Event())
        return Pending(storage, start(storage, mark), mark)


class ReadsBeforeTheCopy(FakeDevice):
    """Rule: a fetch that was issued has not arrived."""

    def end_copy_in(self, pending: Pending) -> bool:
        pending.ticket.wait()
        return False


class WritesWhileItLeaves(FakeDevice):
    """Rule: a tensor that was kept after all is written only when its copy is complete."""

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
        WritesWhileItLeaves,
    ],
)
def test_the_fake_catches_a_missing_wait(planted: type[FakeDevice]) -> None:
    """In 15 to 195 of the first 200 schedules: that 3000 are clean says something."""
    caught = sum(Run(seed, planted).go() != [] for seed in range(200))
    assert caught >= 10, f"{planted.__doc__} Left out, only {caught} of 200 schedules went wrong"


def test_a_seed_is_a_schedule() -> None:
    one, two = Run(7, FreesBeforeTheCopy), Run(7, FreesBeforeTheCopy)
    assert one.go() == two.go() != []
    assert one.world.now == two.world.now


# ---- the fake itself, by hand


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


def test_a_host_that_waits_for_ever_is_told() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        World(0).run_until(lambda: False)


# ---- errors and ends


class Failing:
    """A ticket that ends badly, or is interrupted while its copy still runs."""

    def __init__(self, error: BaseException, finished: bool = True) -> None:
        self.error = error
        self.finished = finished

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        raise self.error


@pytest.fixture
def evicted() -> Iterator[torch.Tensor]:
    """Emptied, and no engine is there to fetch it."""
    tensor, here = torch.arange(64, dtype=torch.uint8), CpuDevice()
    forget(tensor.untyped_storage())  # which may be where one was that an engine did not forget
    here.drop_bytes(tensor.untyped_storage())
    yield tensor
    forget(tensor.untyped_storage())


def forget(storage: torch.UntypedStorage) -> None:
    """Do what an engine does when a storage's record ends."""
    observer = CpuDevice().observer
    assert observer is not None
    observer.forget_storage(storage._cdata, alive=True)


def cannot_be_read(tensor: torch.Tensor) -> bool:
    with pytest.raises(RuntimeError, match="teraio: no engine is there to fetch it"):
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
    pending = cpu.begin_copy_in(storage, 64, lambda storage, mark: Failing(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
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


def test_what_a_copy_uses_is_kept_alive_until_its_end() -> None:
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
    away = bytearray(range(64))

    def out(storage: Any, mark: Mark) -> Ticket:
        assert mark.handle == 0
        away[:] = bytes(storage)
        return Done()

    def into(storage: Any, mark: Mark) -> Ticket:
        storage.copy_(torch.frombuffer(away, dtype=torch.uint8).untyped_storage())
        return Done()

    for _ in range(2):
        assert cannot_be_read(view)
        assert storage.nbytes() == 64
        cpu.end_copy_in(cpu.begin_copy_in(storage, 64, into))
        away[:] = bytes(64)
        assert view.tolist() == list(range(8, 16))
        cpu.end_copy_and_free(cpu.begin_copy_out(storage, out))


# ---- budgets


def test_the_cpu_budget_is_a_tenth_below_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_bytes", lambda: 1000)
    assert CpuDevice().default_budget_bytes() == 900


def test_without_a_gpu_the_device_is_ram() -> None:
    if not torch.cuda.is_available():
        assert choose.choose_device().kind == "cpu"
    assert choose.choose_device("cpu").copier is None
    slabs = choose.choose_device("cpu").allocate_slabs(4096, 2)
    assert slabs.arena_bytes == 8192
