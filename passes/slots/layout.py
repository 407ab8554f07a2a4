"""The layout of slots. In: the events of a program and its signature. Out: its schedule and slot positions.

A program is the lines of Inductor's wrapper, or an FX graph. Both are first translated to events (events.py).
All rules about slots are in this file, so both kinds of programs have the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from teraio import switches
from teraio.errors import UnsupportedError
from teraio.formats.schedule import IN_FLIGHT, MADE, READ, RETURNED, WRITE, Buffer, Role, Schedule, Slot

from . import recompute_chains, symbolic_sizes
from .events import Alias, Event, Forget, Launch, Make, Signature


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """The position of a slot: before line or node `at`. `names` has the slot's tensors at this position. None
    is a tensor in flight that no variable names any more."""

    at: int
    names: tuple[str | None, ...]
    live: Any  # live bytes: a number, or an expression in the program's symbols


@dataclass
class _Names:
    """The live names of each storage, at the current event and at the mark.

    The mark is the position of the next slot. A root is the first name of a storage.
    """

    root: dict[str, str] = field(default_factory=dict)
    alive: dict[str, dict[str, None]] = field(default_factory=dict)  # root -> live names, oldest first
    past: dict[str, tuple[str, ...]] = field(default_factory=dict)  # root -> names at the mark, if different

    def add_storage(self, name: str) -> None:
        self.past.setdefault(name, ())
        self.root[name] = name
        self.alive[name] = {name: None}

    def add_alias(self, new: str, old: str) -> None:
        root = self.root.get(old)
        if root is not None:
            self.past.setdefault(root, self._live_variables_of_storage(root))
            self.root[new] = root
            self.alive[root][new] = None

    def remove_name(self, name: str) -> str | None:
        """Remove a name of a storage. If the name was the storage's last name, return the storage's root.

        A storage is freed with its last name. If the storage has another name, return None.
        """
        root = self.root.get(name)
        if root is None or name not in self.alive.get(root, {}):
            return None
        self.past.setdefault(root, self._live_variables_of_storage(root))
        del self.alive[root][name]
        return None if self.alive[root] else root

    def mark_current_names(self) -> None:
        self.past.clear()

    def variables_at_mark(self, root: str) -> tuple[str, ...]:
        """Return the variables that named the storage at the position of the next slot."""
        past = self.past.get(root)
        return self._live_variables_of_storage(root) if past is None else past

    def _live_variables_of_storage(self, root: str) -> tuple[str, ...]:
        """Return the live names of a storage that are variables of the program.

        The name `buf3.0` is no variable. It is an element of the tuple `buf3`, until a line unpacks the
        tuple.
        """
        return tuple(name for name in self.alive.get(root, ()) if name.isidentifier())


@dataclass
class _Flight:
    """A collective in flight: the tensors that it uses, and the results for which no wait has come yet. Both
    are given by their roots."""

    kernel: str
    tensors: set[str]
    results: set[str]


class _Layout:
    """A single pass over the events that inserts a slot before the allocations of each kernel."""

    def __init__(self, signature: Signature, events: Sequence[Event]) -> None:
        self.signature = signature
        self.names = _Names()
        self.buffers: list[Buffer] = []
        self.index: dict[str, int] = {}  # root -> index of its buffer
        self.slots: list[Slot] = []
        self.places: list[SlotPlace] = []
        self.live: dict[str, Make] = {}  # root -> allocated storage that no slot has received yet
        self.fresh: dict[str, None] = {}  # roots of outputs that a kernel wrote, and no slot has received yet
        self.results: dict[str, Make] = {}
        self.before: int | None = None  # position of the next slot; None until a Make or Launch sets it
        self.older: set[str] = set()  # roots of storages that are live at the position of the next slot
        self.dying: list[str] = []  # storages freed between the next slot's position and its kernel
        self.flights: list[_Flight] = []
        self.collectives: list[str] = []
        self.roles, self.returned, self.edges = _roles_and_edges_of_outputs(signature, events)
        self.again, self.nodes = recompute_chains.find_recompute_chains(signature, events, self.roles)
        for name, size_bytes in signature.arguments:
            self.names.add_storage(name)
            self._get_or_add_buffer(name, "argument", size_bytes)

    def _get_or_add_buffer(self, root: str, role: Role, size_bytes: int) -> int:
        if root not in self.index:
            self.index[root] = len(self.buffers)
            held, edge = root in self.signature.held, self.edges.get(root, -1)
            chain, nodes = self.again.get(root, ()), self.nodes.get(root, ())
            self.buffers.append(Buffer(root, role, size_bytes, held, edge, chain, nodes))
        return self.index[root]

    def apply_event(self, event: Event) -> None:
        match event:
            case Make():
                self._set_next_slot_position(event.at)
                self.names.add_storage(event.name)
                self.live[event.name] = event
            case Alias(_, new, old):
                self.names.add_alias(new, old)
            case Forget(_, name):
                dead = self.names.remove_name(name)
                if dead is not None and dead not in self.roles:
                    self.dying.append(dead)
                    if self.before is None:
                        self._remove_dead_storages()
            case Launch():
                self._set_next_slot_position(event.at)
                self._lay_slot_for_launch(event)

    def _set_next_slot_position(self, at: int) -> None:
        """Set the next slot's position to `at`, and mark the names. If the position is set, do nothing.

        The first allocation after a kernel sets the position, so the next slot is before all allocations of
        its kernel.
        """
        if self.before is None:
            self.before = at
            self._mark_slot_position()

    def _mark_slot_position(self) -> None:
        self.names.mark_current_names()
        self.older = set(self.live)

    def _remove_dead_storages(self) -> None:
        for root in self.dying:
            self.live.pop(root, None)
        self.dying.clear()

    def _lay_slot_for_launch(self, event: Launch) -> None:
        assert self.before is not None
        at, self.before = self.before, None
        reads = {self.names.root[n] for n in event.reads if n in self.names.root}
        writes = {self.names.root[n] for n in event.writes if n in self.names.root}
        flags: dict[str, int] = {}
        for root in list(self.fresh):  # the slot receives the outputs of earlier kernels
            if self.names.variables_at_mark(root):
                flags[root] = MADE
                del self.fresh[root]
                self._register_output_as_buffer(root)
        for root in sorted(reads | writes):
            if root in self.index:
                assert self.names.variables_at_mark(root), (
                    f"{event.kernel} uses {root}, but {root} has no name before {event.kernel}"
                )
                flags[root] = flags.get(root, 0) | READ * (root in reads) | WRITE * (root in writes)
                flags[root] |= IN_FLIGHT * bool(event.begins)
        self._add_tensors_in_flight(flags)
        self._append_slot(at, event.kernel, flags)
        self._note_flights(event, reads | writes)
        for root in sorted(writes):
            if root in self.roles and root in self.live:
                self.fresh[root] = None
        self._remove_dead_storages()

    def _add_tensors_in_flight(self, flags: dict[str, int]) -> None:
        """Add READ for each tensor in flight. So it is resident at this slot, and no plan evicts it here."""
        for flight in self.flights:
            for root in sorted(flight.tensors):
                if root in self.index:
                    flags[root] = flags.get(root, 0) | READ | IN_FLIGHT

    def _note_flights(self, event: Launch, used: set[str]) -> None:
        """Begin a flight if the kernel is a collective. End flights if the kernel is a wait for their last
        result."""
        awaited = {self.names.root.get(name, name) for name in event.awaits}
        for flight in self.flights:
            flight.results -= awaited
        self.flights = [flight for flight in self.flights if flight.results]
        if event.begins:
            results = {self.names.root.get(name, name) for name in event.begins}
            self.flights.append(_Flight(event.kernel, used, results))
            made = [self.live[root] for root in sorted(results) if root in self.live]
            sizes = [str(each.bytes_or_expression) for each in made]
            self.collectives.append(" ".join([event.collective, *sizes]))

    def _register_output_as_buffer(self, root: str) -> None:
        made = self.live.pop(root)
        self._get_or_add_buffer(root, self.roles[root], made.size_bytes)
        if self.roles[root] == "result":
            self.results[root] = made

    def _older_bytes(self) -> int:
        """Return the bytes that the program has allocated before the next slot, and that no slot receives."""
        return _total_bytes_of_storages(made for root, made in self.live.items() if root in self.older)

    def _append_slot(
        self, at: int, kernel: str, flags: dict[str, int], older_bytes: int | None = None
    ) -> None:
        self.slots.append(
            Slot(
                kernel,
                tuple(self.index[root] for root in flags),
                tuple(flags.values()),
                _total_bytes_of_storages(self.live.values()),
                self._older_bytes() if older_bytes is None else older_bytes,
            )
        )
        live = sum(make.bytes_or_expression for make in self.live.values())
        names = (next(iter(self.names.variables_at_mark(root)), None) for root in flags)
        self.places.append(SlotPlace(at, tuple(names), live))

    def lay_enter_slot(self) -> None:
        self._mark_slot_position()
        self._append_slot(0, "enter", dict.fromkeys(self.index, 0))

    def lay_exit_slot(self, at: int) -> None:
        """Lay the last slot, which receives all outputs of the program.

        After this slot the engine may evict saved outputs, and counts the bytes of user outputs.

        The live bytes of a forward's exit slot also leave room for zero gradients. Between the forward and
        its backward, autograd makes a zero gradient for each result that the loss does not use. By then, all
        storages that are no outputs are freed. The live bytes are therefore the larger of two sums: (1) the
        live storages at the exit, and (2) the results.
        """
        if self.flights:
            raise UnsupportedError(
                f"a {self.signature.kind} program returns before the collective {self.flights[0].kernel} has "
                f"ended, so its tensors could be evicted while other ranks use them. Wait for the collective "
                f"in the code that is compiled"
            )
        self._remove_dead_storages()
        self._mark_slot_position()
        flags: dict[str, int] = {}
        for root in self.roles:
            if self.names.variables_at_mark(root):
                flags[root] = MADE if root in self.live else 0
                if root in self.live:
                    self._register_output_as_buffer(root)
        for root in self.returned:
            if self.names.variables_at_mark(root):
                flags[root] = READ | RETURNED
        older_bytes = self._older_bytes()
        if self.signature.kind == "forward":
            self.live = max(self.live, self.results, key=lambda live: _total_bytes_of_storages(live.values()))
        self._append_slot(at, "exit", flags, older_bytes)


def _total_bytes_of_storages(storages: Iterable[Make]) -> int:
    return sum(made.size_bytes for made in storages)


def _roles_and_edges_of_outputs(
    signature: Signature, events: Iterable[Event]
) -> tuple[dict[str, Role], list[str], dict[str, int]]:
    """Return the roles of outputs, the arguments that the program returns, and the autograd edges of
    gradients.

    All three use roots: the first name of each storage. If the user receives any output of a storage, the
    storage's role is not `saved`. A program may return an argument, because a gradient may reuse an
    argument's memory. A gradient has an edge only if its storage holds no other output.
    """
    root = {name: name for name, _ in signature.arguments}
    for event in events:
        if isinstance(event, Make):
            root[event.name] = event.name
        elif isinstance(event, Alias) and event.old in root:
            root[event.new] = root[event.old]
    arguments = {name for name, _ in signature.arguments}
    roles: dict[str, Role] = {}
    returned: dict[str, None] = {}
    edges: dict[str, int] = {}
    for position, name in enumerate(signature.outputs):
        if name is None or name not in root:
            continue
        edge = signature.gradients[position] if signature.gradients else -1
        edges[root[name]] = -1 if root[name] in edges else edge
        role: Role = "saved" if position in signature.saved else "result"
        if root[name] in arguments:
            if role == "result":
                returned[root[name]] = None
            continue
        if roles.setdefault(root[name], role) != role:
            roles[root[name]] = "result"
    return roles, list(returned), {name: edge for name, edge in edges.items() if edge >= 0}


def lay_slots(signature: Signature, events: Sequence[Event], end: int) -> tuple[Schedule, list[SlotPlace]]:
    """Return the schedule of a program and the position of each slot. The program returns at `end`."""
    if "slots" in switches.disabled_features():
        own = symbolic_sizes.largest(live_bytes_per_launch(events), "program")
        sizes = {event.name: event.size_bytes for event in events if isinstance(event, Make)}
        outputs = [(name, sizes.get(name, 0)) for name in signature.outputs if name]
        return schedule_as_one_kernel(signature, "program", own, end, outputs)
    layout = _Layout(signature, events)
    layout.lay_enter_slot()
    for event in events:
        layout.apply_event(event)
    layout.lay_exit_slot(end)
    symbolic = any(isinstance(event, Make) and event.size is not None for event in events)
    edges = max(signature.gradients, default=-1) + 1
    schedule = Schedule(
        signature.kind,
        tuple(layout.buffers),
        tuple(layout.slots),
        symbolic,
        edges,
        signature.graph,
        tuple(layout.collectives),
    )
    return schedule, layout.places


def live_bytes_per_launch(events: Iterable[Event], kept: Iterable[str] = ()) -> list[Make]:
    """Return, for each launch of a kernel, the sum of the bytes that the program has allocated.

    Arguments and the buffers in `kept` are not counted. Callers pass the program's outputs in `kept`.
    """
    names = _Names()
    live: dict[str, Make] = {}
    sums: list[Make] = []
    for event in events:
        match event:
            case Make():
                names.add_storage(event.name)
                live[event.name] = event
            case Alias(_, new, old):
                names.add_alias(new, old)
            case Forget(_, name):
                live.pop(names.remove_name(name) or "", None)
            case Launch(at, kernel):
                inside = [made for root, made in live.items() if root not in kept]
                symbolic = any(made.size is not None for made in inside)
                size_bytes = sum(made.size_bytes for made in inside)
                sums.append(
                    Make(
                        at,
                        kernel,
                        size_bytes,
                        sum(m.bytes_or_expression for m in inside) if symbolic else None,
                    )
                )
    return sums


def schedule_as_one_kernel(
    signature: Signature, kernel: str, own: Make, end: int, outputs: Iterable[tuple[str, int]] = ()
) -> tuple[Schedule, list[SlotPlace]]:
    """Return the schedule of a program without slots between kernels.

    The program counts as one kernel. This kernel needs every argument from start to end, and allocates the
    bytes of `own`. The engine counts the outputs (name, size_bytes), but never evicts them, because two
    outputs may share a storage.
    """
    layout = _Layout(signature, ())
    layout.lay_enter_slot()
    layout.live = {own.name: own}
    layout._append_slot(0, kernel, dict.fromkeys(layout.index, READ | WRITE))
    layout.live = {}
    for name, size_bytes in dict(outputs).items():
        if name not in layout.index:
            layout.names.add_storage(name)
            layout.roles[name] = "result"
            layout.live[name] = Make(end, name, size_bytes)
    layout.lay_exit_slot(end)
    symbolic = own.size is not None
    return Schedule(signature.kind, tuple(layout.buffers), tuple(layout.slots), symbolic), layout.places
