"""A fake device that runs behind the host, without a GPU: streams, events and memory in virtual time.

    host      launches, marks and waits in program order; time passes meanwhile
    streams   queues of work; a seed decides durations, and some streams are 100 times slower
    memory    cells of numbers; a cell holds POISON while it is being written and after it was freed

A seed draws one of the orders of events that CUDA allows. If teraio misses a wait, CUDA also allows wrong
orders, and some of a few hundred seeds draw a wrong order. A kernel then reads a different number than in
program order. The durations do not estimate a GPU's speed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from teraio.runtime.device.device import OrderedDevice
from teraio.runtime.device.pending_transfer import Mark

POISON = -1


class Event:
    """An event like CUDA's. Waiting for an event that was never recorded returns immediately."""

    def __init__(self) -> None:
        self.recorded = False
        self.fired = False
        self.waiters: list[Stream] = []


@dataclass(slots=True)
class Work:
    """A piece of a stream's work. `begin` runs when the work starts, and `end` when the work ends."""

    begin: Callable[[], None]
    end: Callable[[], None]
    duration: int


@dataclass(slots=True)
class Wait:
    event: Event


@dataclass(slots=True)
class Record:
    event: Event


class World:
    """Virtual time, and the actions that are due at later times. The same seed always gives the same order of
    actions.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0
        self.faults: list[str] = []
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay: int, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, self._count, then))

    def pass_time(self) -> None:
        """Let the host take some time, occasionally a long time."""
        self._advance(self.now + self.random.choice((0, 0, 1, 3, 10, 100)))

    def _advance(self, until: int) -> None:
        while self._due and self._due[0][0] <= until:
            self._step()
        self.now = max(self.now, until)

    def _step(self) -> None:
        self.now, _, then = heapq.heappop(self._due)
        then()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Block the host until `reached` returns True."""
        while not reached():
            assert self._due, "deadlock: the host waits for an event that never happens"
            self._step()

    def run_out(self) -> None:
        while self._due:
            self._step()


class Stream:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.pace = world.random.choice((1, 1, 10, 100))
        self._queue: deque[Work | Wait | Record] = deque()
        self._busy = False

    def give(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._put(Work(begin, end, self.world.random.randint(1, 4) * self.pace))

    def record(self, event: Event) -> None:
        event.recorded = True
        self._put(Record(event))

    def wait_event(self, event: Event) -> None:
        if event.recorded:
            self._put(Wait(event))

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue

    def _put(self, item: Work | Wait | Record) -> None:
        self._queue.append(item)
        self.go_on()

    def go_on(self) -> None:
        while self._queue and not self._busy:
            match self._queue[0]:
                case Record(event):
                    self._queue.popleft()
                    event.fired = True
                    for stream in event.waiters:
                        self.world.at(0, stream.go_on)
                case Wait(event) if event.fired:
                    self._queue.popleft()
                case Wait(event):
                    event.waiters.append(self)
                    return
                case Work(begin, end, duration):
                    self._queue.popleft()
                    self._busy = True
                    begin()
                    self.world.at(duration, lambda end=end: self._end(end))  # type: ignore[misc]

    def _end(self, end: Callable[[], None]) -> None:
        end()
        self._busy = False
        self.go_on()


@dataclass(slots=True)
class Storage:
    """A tensor's cells, which begin at cell `at`. `at` is None while the tensor is evicted."""

    name: str
    size: int
    at: int | None = None


@dataclass(slots=True)
class Place:
    """A place for a copy in host memory or on disk."""

    cells: list[int] = field(default_factory=list)


class FakeTicket:
    """A ticket (pending copy) that another thread issues. The ticket has no event, so `wait` returns only
    when the copy is complete.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.issued = False

    def done(self) -> bool:
        return self.issued

    def wait(self) -> None:
        self.world.run_until(self.done)


class FakeStreamTicket(FakeTicket):
    """A ticket whose `wait` returns as soon as the transfer is issued. The compute stream must then wait for
    the ticket's event.
    """

    def __init__(self, world: World, event: Event) -> None:
        super().__init__(world)
        self.event = event


class FakeDevice(OrderedDevice):
    """A device with `cells` cells of memory. The device immediately reuses freed cells, and first uses the
    cells that were freed last.
    """

    kind = "fake"
    copier = None

    def __init__(self, world: World, cells: int) -> None:
        self.world = world
        self.compute = Stream(world, "compute")
        self.side = [Stream(world, f"side {number}") for number in range(3)]
        self.cells = [POISON] * cells
        self._free: list[tuple[int, int]] = [(0, cells)]

    # ---- the primitives of a device

    def resize_storage(self, storage: Storage, size_bytes: int) -> None:
        self.world.pass_time()
        if size_bytes:
            assert storage.at is None, f"{storage.name} has memory already"
            storage.at = self._take(size_bytes)
        else:
            assert storage.at is not None, f"{storage.name} is freed twice"
            where = range(storage.at, storage.at + storage.size)
            storage.at = None
            self._free.append((where.start, storage.size))
            # On a GPU, the next kernel on the compute stream may reuse freed memory. The fake device imitates
            # this: the next work on the stream overwrites the memory with POISON.
            self.compute.give(lambda: None, lambda: self._poison(where))

    def mark_compute_stream(self) -> Mark:
        event = Event()
        self.compute.record(event)
        self.world.pass_time()
        return Mark(event)

    def make_kernels_wait_for_event(self, event: Any) -> None:
        self.compute.wait_event(event)
        self.world.pass_time()

    def wait_for_copies(self) -> None:
        self.world.run_until(lambda: all(stream.idle for stream in self.side))

    # ---- memory

    def _take(self, size: int) -> int:
        assert self.room(size), f"{size} cells do not fit"
        index = max(index for index, (_, length) in enumerate(self._free) if length >= size)
        start, length = self._free.pop(index)
        if length > size:
            self._free.insert(0, (start + size, length - size))
        return start

    def room(self, size: int) -> bool:
        """Return True if so many adjacent cells are free. Merge free neighbours only if no free range is
        large enough.
        """
        if not any(length >= size for _, length in self._free):
            merged: list[tuple[int, int]] = []
            for start, length in sorted(self._free):
                if merged and sum(merged[-1]) == start:
                    before, size_before = merged.pop()
                    merged.append((before, size_before + length))
                else:
                    merged.append((start, length))
            self._free = merged
        return any(length >= size for _, length in self._free)

    def _poison(self, where: range) -> None:
        for cell in where:
            self.cells[cell] = POISON

    def _range(self, storage: Storage) -> range:
        assert storage.at is not None, f"{storage.name} is used while it is evicted"
        return range(storage.at, storage.at + storage.size)

    # ---- work

    def launch(
        self,
        reads: Sequence[tuple[Storage, list[int]]],
        target: Storage,
        result: list[int],
        stream: Stream | None = None,
    ) -> None:
        """Launch a kernel that reads storages and writes `result` to `target`. The kernel compares the
        content of each read storage with the expected content. It runs on the compute stream, or on `stream`.
        """
        sources = [(storage.name, self._range(storage), wanted) for storage, wanted in reads]
        where = self._range(target)

        def look(moment: str) -> None:
            for name, cells, wanted in sources:
                found = [self.cells[cell] for cell in cells]
                if found != wanted and not (moment == "end" and cells == where):
                    self.world.faults.append(
                        f"a kernel read {name} as {found}, not {wanted}, at its {moment}"
                    )

        def begin() -> None:
            look("begin")
            self._poison(where)

        def end() -> None:
            look("end")
            for cell, value in zip(where, result):
                self.cells[cell] = value

        (stream or self.compute).give(begin, end)
        self.world.pass_time()

    def begin_collective(
        self, reads: Sequence[tuple[Storage, list[int]]], target: Storage, result: list[int]
    ) -> Event:
        """Launch a kernel on a stream of its own, behind the kernels so far. Return the event of its end. The
        collective uses its memory until then, and writes POISON to its target before the result."""
        stream, begun, ended = Stream(self.world, "collectives"), Event(), Event()
        self.compute.record(begun)
        stream.wait_event(begun)
        self.launch(reads, target, result, stream)
        stream.record(ended)
        return ended

    def copy_out(self, place: Place) -> Callable[[Storage, Mark], FakeTicket]:
        def start(storage: Storage, mark: Mark) -> FakeTicket:
            where = self._range(storage)
            seen: list[int] = []

            def begin() -> None:
                place.cells = [POISON] * len(where)
                seen.extend(self.cells[cell] for cell in where)

            def end() -> None:
                now = [self.cells[cell] for cell in where]
                place.cells = [one if one == two else POISON for one, two in zip(seen, now)]

            return self._by_thread(mark, begin, end)

        return start

    def copy_in(self, place: Place) -> Callable[[Storage, Mark], FakeTicket]:
        def start(storage: Storage, mark: Mark) -> FakeTicket:
            where = self._range(storage)

            def end() -> None:
                for cell, value in zip(where, place.cells):
                    self.cells[cell] = value

            return self._by_thread(mark, lambda: self._poison(where), end)

        return start

    def _by_thread(self, mark: Mark, begin: Callable[[], None], end: Callable[[], None]) -> FakeTicket:
        """Issue the copy on a side stream as another thread would: immediately, soon, or after a disk's
        delay.
        """
        random = self.world.random
        stream, event = random.choice(self.side), Event()
        blocking = random.random() < 0.3
        ticket = FakeTicket(self.world) if blocking else FakeStreamTicket(self.world, event)

        def finish() -> None:
            end()
            if blocking:
                ticket.issued = True

        def issue() -> None:
            stream.wait_event(mark.event)
            stream.give(begin, finish)
            stream.record(event)
            if not blocking:
                ticket.issued = True

        delay = random.choice((0, 1, 20, 300))
        if delay:
            self.world.at(delay, issue)
        else:
            issue()
        self.world.pass_time()
        return ticket
