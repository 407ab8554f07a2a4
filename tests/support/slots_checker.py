"""An independent checker of a program's slots, which are calls of the engine before kernels.

The checker executes the program on simulated storages, and checks the tensors that each slot receives. The
module also contains functions that make events for tests of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from teraio.formats.schedule import MADE, READ, WRITE, Schedule
from teraio.passes.slots.events import Alias, Event, Forget, Launch, Make, Signature
from teraio.passes.slots.layout import SlotPlace, lay_slots


def launch(at: int, kernel: str, reads: str = "", writes: str = "") -> Launch:
    return Launch(at, kernel, frozenset(reads.split()), frozenset(writes.split()))


def signature(outputs: str = "", saved: Sequence[int] = (), arguments: str = "w") -> Signature:
    sizes = tuple((name, 100) for name in arguments.split())
    return Signature("forward", sizes, tuple(outputs.split()), frozenset(saved))


def lay(about: Signature, events: Sequence[Event]) -> tuple[Schedule, list[SlotPlace]]:
    end = max((event.at for event in events), default=0) + 1
    return lay_slots(about, events, end)


# ---- the checker, which executes the program with storages instead of the storages' names


@dataclass(eq=False)
class Storage:
    size_bytes: int
    buffer: int | None = None  # the storage's buffer in the schedule, after a slot has received the storage
    known: bool = False


@dataclass
class Machine:
    """Variables that hold storages, as in a Python interpreter with an allocator."""

    variables: dict[str, Storage] = field(default_factory=dict)
    ever: dict[str, Storage] = field(default_factory=dict)

    def hold(self, name: str, storage: Storage) -> None:
        self.variables[name] = self.ever[name] = storage

    def alive(self) -> list[Storage]:
        return list({id(storage): storage for storage in self.variables.values()}.values())


class Checker:
    def __init__(
        self, about: Signature, events: Sequence[Event], laid: tuple[Schedule, list[SlotPlace]]
    ) -> None:
        self.about, self.events = about, events
        self.schedule, self.places = laid
        self.machine = Machine()
        self.given: set[int] = set()  # buffers that slots have received
        self.slot = -1
        self.high = 0  # peak of bytes outside of the schedule's buffers since the last slot
        self.outputs = {name for name in about.outputs if name}

    def run(self) -> None:
        assert (
            len(self.schedule.slots)
            == len(self.places)
            == 2 + sum(isinstance(event, Launch) for event in self.events)
        )
        assert [place.at for place in self.places] == sorted(place.at for place in self.places)
        for name, size_bytes in self.about.arguments:
            self.machine.hold(name, Storage(size_bytes))
        self.stand(argument=True)
        launched = True
        last = max((n for n, event in enumerate(self.events) if isinstance(event, Launch)), default=-1)
        for number, event in enumerate(self.events):
            if launched and number <= last and isinstance(event, Make | Launch):
                self.stand()
                launched = False
            self.do(event)
            self.high = max(self.high, self.unknown_bytes())
            launched = launched or isinstance(event, Launch)
        self.stand()
        assert self.slot == len(self.places) - 1
        self.ended()

    def do(self, event: Event) -> None:
        place, slot = self.places[self.slot], self.schedule.slots[self.slot]
        match event:
            case Make(at, name, size_bytes):
                assert place.at <= at, f"{slot.kernel}: {name} is allocated before its slot"
                self.machine.hold(name, Storage(size_bytes))
            case Alias(_, new, old):
                if old in self.machine.variables:
                    self.machine.hold(new, self.machine.variables[old])
            case Forget(_, name):
                self.machine.variables.pop(name, None)
            case Launch(at, kernel, reads, writes):
                assert place.at <= at and slot.kernel == kernel
                self.launched(kernel, reads, writes)

    def stand(self, argument: bool = False) -> None:
        """Run the next slot. Each tensor that the slot receives must be alive under its name."""
        self.slot += 1
        self.high = 0
        place, slot = self.places[self.slot], self.schedule.slots[self.slot]
        assert len(slot.buffers) == len(slot.flags) == len(place.names) == len(set(slot.buffers))
        for buffer, flags, name in zip(slot.buffers, slot.flags, place.names):
            assert name in self.machine.variables, f"{slot.kernel} receives {name}, which is no variable"
            storage = self.machine.variables[name]
            about = self.schedule.buffers[buffer]
            if flags & MADE or argument:
                assert buffer not in self.given, f"{about.name} is made twice"
                assert not storage.known, f"{name} has two buffers"
                assert (about.role == "argument") == argument
                self.given.add(buffer)
                storage.buffer, storage.known = buffer, True
            assert storage.buffer == buffer, f"{slot.kernel}: {name} is received as {about.name}"
        alive = self.unknown_bytes()
        assert slot.older_bytes == alive, f"{slot.kernel}: {alive} bytes are alive, not {slot.older_bytes}"

    def launched(self, kernel: str, reads: frozenset[str], writes: frozenset[str]) -> None:
        slot = self.schedule.slots[self.slot]
        flags = dict(zip(slot.buffers, slot.flags))
        for names, flag in ((reads, READ), (writes, WRITE)):
            for name in names & self.machine.variables.keys():
                storage = self.machine.variables[name]
                if storage.known:
                    assert storage.buffer is not None
                    assert flags.get(storage.buffer, 0) & flag, (
                        f"{kernel} touches {name}, unknown to its slot"
                    )
                elif flag == WRITE and self.leaves(storage):
                    storage.known = False  # a later slot receives the storage
        alive = max(self.high, self.unknown_bytes())
        assert slot.live_bytes >= alive, f"{kernel}: {alive} bytes are alive, {slot.live_bytes} are counted"

    def unknown_bytes(self) -> int:
        return sum(storage.size_bytes for storage in self.machine.alive() if not storage.known)

    def leaves(self, storage: Storage) -> bool:
        return any(self.machine.ever.get(name) is storage for name in self.outputs)

    def ended(self) -> None:
        """Check that a slot has received each returned tensor, and that the tensor has the right role."""
        visible = {
            id(self.machine.ever[name])
            for position, name in enumerate(self.about.outputs)
            if name and position not in self.about.saved
        }
        for name in self.outputs:
            storage = self.machine.ever[name]
            assert storage.buffer is not None, f"{name} is returned, but no slot received it"
            about = self.schedule.buffers[storage.buffer]
            if about.role != "argument":
                assert about.role == ("result" if id(storage) in visible else "saved")
                assert about.size_bytes == storage.size_bytes
        results = sum(b.size_bytes for b in self.schedule.buffers if b.role == "result")
        results *= self.about.kind == "forward"
        assert self.schedule.slots[-1].live_bytes >= max(self.unknown_bytes(), results)


def check(
    about: Signature, events: Sequence[Event], laid: tuple[Schedule, list[SlotPlace]] | None = None
) -> None:
    Checker(about, events, laid or lay(about, events)).run()
