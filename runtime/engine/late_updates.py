"""Late updates. `optimizer.step()` owes an update, and the update runs in the next forward.

    step()              owes the updates of some weights: their bytes are withheld (owed_tensors.py)
    a program begins    if an update of its arguments is owed, the program is composed: it gets a slot for the
                        update, before the first kernel that uses a tensor of the update
    that slot           makes the tensors of the update resident, then the update runs
    anyone else looks   the update is settled: it runs at once, and then the look sees its result

With `updates="backward"`, updates run in the backward instead (backward_updates.py). Such an update is
composed into the program of the backward in the same way.

An owed update is settled in further cases: (1) It does not fit at its slot. (2) Its optimizer steps again.
(3) A whole step has passed. (4) The process forks, or the engine ends.

If an update cannot begin, because a tensor cannot be fetched, it is still owed. If the optimizer's code fails
inside of an update, the step is torn.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from typing import Any, Protocol
from weakref import ref

import torch

from teraio.errors import StoreError, TeraioError, TornStepError
from teraio.formats.schedule import WRITE

from ..eager.signals import SIGNALS
from ..eager.user_code import UserCode
from ..ledger.record import Record, State, pin_during_block
from ..ledger.residency import Need
from ..step.composed_program import Composition, UpdateSlot, compose
from ..step.program import Program
from .backward_updates import BackwardUpdate, BackwardUpdates
from .registry import Registry

log = logging.getLogger("teraio")

RunSlot = Callable[[Program, int, Sequence[Any], int | None], None]


class SlotUpdate(Protocol):
    """An update that runs at a slot of a composed program. `tensors` has one entry for each tensor of the
    slot: None for a tensor that the program has already registered."""

    @property
    def kernel(self) -> str: ...

    @property
    def records(self) -> list[Record]: ...

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]: ...

    @property
    def own_bytes(self) -> int: ...

    def is_due(self) -> bool:
        """Return whether the update can run now."""
        ...

    def give_up(self, place: str) -> None:
        """Do not run the update at its slot, now and in later steps, because `place` has no room for it."""
        ...

    def run_at_slot(self, composed: Program) -> None:
        """Run the update. Its tensors are resident."""
        ...


SETTLED_MOST = 4  # an update that is settled so often in a row runs at `step()` again
COMPOSED_MAX = 1024  # composed programs that are kept; one per program, layer and set of updates


@dataclass(eq=False, slots=True)
class LateUpdate:
    """An update of some weights that is owed. It implements `OwedUpdate` and `SlotUpdate`.

    kernel       the name of the update
    records      the records of its tensors, and in `flags` the use of each
    tensors      one tensor for each record
    small        storages of its tensors without a record
    own_bytes    the bytes of the update's temporary tensors
    run          runs the optimizer's code for these tensors, in the given blocks
    """

    owner: LateUpdates
    kernel: str
    records: list[Record]
    flags: list[int]
    tensors: list[torch.Tensor]
    small: list[Any]
    own_bytes: int
    run: Callable[[Mapping[int, Any]], None]
    step: int
    is_old: bool = field(default=False)

    def settle(self, place: str, may_evict: bool = True, name: str = "") -> None:
        """Run the update now, because the code at `place` needs one of its tensors."""
        self.owner.settle(self, place, may_evict)

    def is_due(self) -> bool:
        """Return whether the update is still owed."""
        return self in self.owner.owed

    def give_up(self, place: str) -> None:
        """Run the update now, and at `step()` in later steps."""
        self.owner.unfit.add(self.kernel)
        self.settle(f"{place}, which leaves no room for {self.kernel}")

    def run_at_slot(self, composed: Program) -> None:
        """Run the update. Its tensors are resident."""
        self.owner.run_at_slot(self)


@dataclass(slots=True)
class ComposedCall:
    """A running call of a composed program.

    updates        the updates before each slot of the compiled code, with their slots in the composed program
    awaited        slot of the compiled code -> (update, number of the gradient, position) for each gradient
                   that the slot hands over, and that an update in the backward reads
    """

    composition: Composition
    updates: dict[int, list[tuple[int, SlotUpdate]]]
    awaited: dict[int, list[tuple[BackwardUpdate, int, int]]]


class LateUpdates:
    """The owed updates of one engine, and the running calls of composed programs."""

    def __init__(self, user: UserCode, registry: Registry, run_slot: RunSlot) -> None:
        self.pid = os.getpid()
        self.user, self.registry = user, registry
        self.residency = user.residency
        self.tensors = user.residency.owed_tensors
        self.run_plain_slot = run_slot  # runs a slot without late updates
        # Names of the weights whose updates run late; None means all weights.
        self.weights: Collection[str] | None = ()
        self.owed: dict[LateUpdate, None] = {}  # in the order of the optimizers' steps
        self.running: dict[int, ComposedCall] = {}  # by id of the compiled program
        self.composed: dict[Any, Composition] = {}
        self.unfit: set[str] = set()  # names of updates that no longer run late
        self.in_row: dict[str, int] = {}  # name of an update -> how often it was settled, one after another
        self.around: set[str] = set()  # names of gradients of the previous step that this step has read
        self.updating: LateUpdate | None = None  # the update whose code runs now
        self.backward = BackwardUpdates(user, registry.gradients, registry.tracker)
        self.is_open = False  # True: an update is owed, a composed program runs, or a backward may run one
        _ENGINES[:] = [ref(self)]

    def choose(self, weights: Collection[str] | None) -> None:
        """Run the updates of these weights late from now on. None means all weights."""
        self.weights = weights if weights is None else frozenset(weights)

    def is_chosen(self, kernel: str, weights: Iterable[str]) -> bool:
        """Return whether the update with this name, which writes these weights, may run late."""
        if kernel in self.unfit:
            return False
        return self.weights is None or all(name in self.weights for name in weights)

    # ---- at the optimizer's step

    def owe(self, update: LateUpdate) -> None:
        """Put this update off, and withhold its tensors. If code uses one of them now, run it now."""
        self.tensors.settle_records(update.records, update.kernel)
        self.owed[update] = None
        self.is_open = True
        self.residency.mover.counts.add(owed_updates=1)
        if not self.tensors.withhold(update, update.records, update.small):
            update.settle("code that uses its tensors now")

    # ---- in a program

    def run_slot(self, program: Program, index: int, tensors: Sequence[Any], live_bytes: int | None) -> None:
        """Run a slot of a compiled program. If the program is composed, first run the updates before the
        slot."""
        if index == 0:
            self.running.pop(id(program), None)
            if (begun := self._begin_composed_call(program, tensors)) is not None:
                self.running[id(program)] = begun
        call = self.running.get(id(program))
        if call is None:
            self.run_plain_slot(program, index, tensors, live_bytes)
            return
        composed, places = call.composition.program, call.composition.places
        for waiting, number, position in call.awaited.get(index, ()):
            waiting.note_made(number, tensors[position])
        for place, update in call.updates.get(index, ()):
            self._run_update_slot(composed, place, update, tensors, live_bytes)
            tensors = ()
        self.run_plain_slot(composed, places[index], tensors, live_bytes)
        if index == program.last:
            self.running.pop(id(program), None)
            self.note_open()

    def _run_update_slot(
        self,
        composed: Program,
        place: int,
        update: SlotUpdate,
        tensors: Sequence[Any],
        live_bytes: int | None,
    ) -> None:
        """Run the slot of an update, and then the update. If the update is not due, only run the slot."""
        live = composed.stops[place].live_bytes if live_bytes is None else live_bytes + update.own_bytes
        if update.is_due() and not self._fits(update, live):
            update.give_up("a program")
        told = None if live_bytes is None else live
        if update.is_due():
            self.run_plain_slot(composed, place, [*tensors, *update.tensors], told)
            update.run_at_slot(composed)
        else:
            missing = len(composed.schedule.slots[place].buffers) - len(tensors)
            self.run_plain_slot(composed, place, [*tensors, *[None] * missing], told)

    def run_at_slot(self, update: LateUpdate) -> None:
        """Run an owed update at its slot."""
        self.residency.mover.counts.add(late_updates=1)
        self.in_row.pop(update.kernel, None)
        self._run_resident(update)

    def _fits(self, update: SlotUpdate, live_bytes: int) -> bool:
        """Return whether the update fits in the budget at its slot, if all other tensors are evicted."""
        residency = self.residency
        movable = sum(record.size_bytes for record in update.records if record.evictable)
        need = Need(residency.fixed_bytes, movable + live_bytes, update.kernel)
        return residency.elastic or not residency.is_over_budget(need)

    def _begin_composed_call(self, program: Program, tensors: Sequence[Any]) -> ComposedCall | None:
        """Return the composed call of this program, whose arguments are `tensors`. Return None if it runs no
        update."""
        backward = self.backward
        in_backward = backward.begin_call(program, tensors) if backward.candidates else []
        if not self.owed and not backward.pending and not in_backward:
            return None
        buffers: dict[int, int] = {}
        first: dict[LateUpdate, int] = {}
        small = []
        for position, buffer in program.stops[0].made:
            tensor = tensors[position]
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                continue
            key = tensor.untyped_storage()._cdata
            buffers[key] = buffer
            if key in self.tensors.small:
                small.append(key)
            record = self.residency.records.get(key)
            if record is not None and isinstance(record.owed, LateUpdate):
                at = _first_use(program, buffer)
                first[record.owed] = min(at, first.get(record.owed, at))
        backward.refuse_arguments(self.residency.records_of_storages(buffers))
        self.tensors.settle_storages(small, "a compiled program")
        slots: list[tuple[SlotUpdate, UpdateSlot]] = [
            (late, self._update_slot(late, at, buffers)) for late, at in first.items() if late in self.owed
        ]
        slots += [(update, backward.slot_of(update, program, buffers)) for update in in_backward]
        if not slots:
            return None
        slots.sort(key=lambda pair: pair[1].before)
        composition = self._compose(program, tuple(slot for _, slot in slots))
        updates: dict[int, list[tuple[int, SlotUpdate]]] = {}
        for (update, slot), place in zip(slots, composition.update_places):
            updates.setdefault(slot.before, []).append((place, update))
        awaited: dict[int, list[tuple[BackwardUpdate, int, int]]] = {}
        for waiting in in_backward:
            for number, (at, position) in enumerate(waiting.made_at):
                awaited.setdefault(at, []).append((waiting, number, position))
        return ComposedCall(composition, updates, awaited)

    def _update_slot(self, update: LateUpdate, before: int, buffers: dict[int, int]) -> UpdateSlot:
        tensors = tuple(
            (record.name, record.size_bytes, buffers.get(record.key, -1), flags)
            for record, flags in zip(update.records, update.flags)
        )
        return UpdateSlot(before, update.kernel, tensors, update.own_bytes)

    def _compose(self, program: Program, slots: tuple[UpdateSlot, ...]) -> Composition:
        key = program.identity, slots
        found = self.composed.pop(key, None) or compose(program, slots)
        self.composed[key] = found
        while len(self.composed) > COMPOSED_MAX:
            del self.composed[next(iter(self.composed))]
        return found

    # ---- when someone looks

    def settle(self, update: LateUpdate, place: str, may_evict: bool = True) -> None:
        """Run an owed update now, with room as for user code: an overrun is reported, and is no error."""
        if update is self.updating:
            raise TeraioError(f"{place} reads a tensor of {update.kernel} while this update runs")
        if update not in self.owed:
            return
        residency, user = self.residency, self.user
        if residency.torn is not None:
            residency.raise_torn_step_error()
        moving = residency.mover.moving
        if moving is not None and moving in update.records:
            raise TeraioError(f"{place} reads {moving.name} while it moves, before {update.kernel} has run")
        with pin_during_block(update.records):
            if may_evict:
                user.make_room_for_records(update.records, update.own_bytes, update.kernel)
            residency.fetch(update.records, user.must_be_resident)
            residency.note_peak(update.own_bytes)
            residency.mover.counts.add(settled_updates=1)
            self._run_resident(update)
        self._note_settled(update.kernel, place)

    def _note_settled(self, kernel: str, place: str) -> None:
        """Count that an update was settled. After SETTLED_MOST times in a row, it runs at `step()` again: it
        gains nothing from running late, and its fetches are not planned."""
        self.in_row[kernel] = self.in_row.get(kernel, 0) + 1
        if self.in_row[kernel] < SETTLED_MOST or kernel in self.unfit:
            return
        if not self.unfit:
            log.info(
                "teraio: %s runs at step() again, not in the next forward: %s needs its tensors before. The "
                "same holds for other updates that this happens to",
                kernel,
                place,
            )
        self.unfit.add(kernel)

    def settle_all(self, place: str) -> None:
        """Run all owed updates now."""
        for update in list(self.owed):
            self.settle(update, place)

    def settle_all_or_lose(self, place: str) -> None:
        """Run all owed updates now, because the engine ends. If one cannot run, its weights and states are
        lost: fill them with NaN."""
        for update in list(self.owed):
            try:
                self.settle(update, place)
            except TeraioError as error:
                if update in self.owed:
                    self._lose(update, error)

    def _lose(self, update: LateUpdate, error: TeraioError) -> None:
        del self.owed[update]
        self.tensors.release(update.records, update.small)
        self.tensors.reveal(update.records)
        self.residency.declare_loss(error)
        for record in update.records:
            with suppress(StoreError):
                self.residency.mover.end_move(record)
        for record, tensor, flags in zip(update.records, update.tensors, update.flags):
            if record.state is State.EVICTED and flags & WRITE:
                self.residency.mover.fill_with_nan(record)
            elif flags & WRITE:
                with torch.no_grad():
                    tensor.fill_(nan)
                record.wrote()

    def settle_parameters(self, parameters: Iterable[torch.Tensor], place: str) -> None:
        """Run the owed updates of these parameters now."""
        if self.owed:
            known = self.user.known_tensors.records
            records = [record for p in parameters if (record := known.get(id(p))) is not None]
            for record in records:
                if isinstance(record.owed, LateUpdate):
                    record.owed.settle(place)

    def _run_resident(self, update: LateUpdate) -> None:
        """Run an update whose tensors are on the device. Then forget its gradients, if no other code has
        them.

        The bytes are withheld until the update has ended. So other threads see its result, or wait for it.
        """
        observer = self.user.observer
        del self.owed[update]
        outer, self.updating = self.updating, update  # a finalizer may settle another update meanwhile
        if observer is not None:
            observer.change_program_depth(1)
        try:
            with pin_during_block(update.records):
                update.run(self.tensors.blocks_of(update.records, update.small))
        except BaseException as error:
            cause = TeraioError(f"{update.kernel} of step {update.step} failed: {error!r}")
            self.residency.declare_loss(cause, known=isinstance(error, Exception))
            if not isinstance(error, Exception):  # such as a second Ctrl-C
                raise
            raise TornStepError(
                f"{update.kernel}, an update of step {update.step}, failed when it ran late: {error}. "
                f"Weights and states belong to no whole step. Call teraio.reset() and load the last "
                f"checkpoint"
            ) from error
        finally:
            if observer is not None:
                observer.change_program_depth(-1)
            self.updating = outer
            self.tensors.release(update.records, update.small)
            self.tensors.reveal(update.records)
        for record, flags in zip(update.records, update.flags):
            if flags & WRITE:
                record.wrote()
        gradients = [record for record in update.records if record.kind == "grad"]
        update.records, update.tensors = [], []
        update.run = _no_update
        if update.is_old:  # otherwise the step that made the gradients has not ended
            self.around.update(record.name for record in gradients if record.is_dead())
        self.residency.forget_dead_records({record.key: record for record in gradients})
        self.note_open()

    # ---- the step

    def end_step(self) -> frozenset[str]:
        """End a step. Settle updates that are owed for a whole step. Return the names of the gradients of the
        previous step that this step has read."""
        for update in [each for each in self.owed if each.is_old]:
            self.settle(update, "the end of the next step")
        for update in self.owed:
            update.is_old = True
        around, self.around = frozenset(self.around), set()
        for update in self.owed:
            self.registry.note_outliving(update.records, around)
        return around

    def abandon_call(self) -> None:
        """Forget the running composed calls, because an exception ended a program. Their updates that have
        not run are still owed."""
        self.running.clear()
        SIGNALS.end_backward_updates()
        self.note_open()

    def note_open(self) -> None:
        """Record whether slots must look for updates."""
        backward = self.backward
        self.is_open = bool(self.owed or self.running or backward.candidates or backward.pending)


def _no_update(blocks: Mapping[int, Any]) -> None:
    """Do nothing, in place of an update that has run."""


def _first_use(program: Program, buffer: int) -> int:
    """Return the first slot whose kernel uses this argument, or the last slot."""
    return next((at for at, stop in enumerate(program.stops) if buffer in stop.needed), program.last)


# ---- fork

_ENGINES: list[ref[LateUpdates]] = []  # the owed updates of this process's engine


def _settle_before_fork() -> None:
    """Run all owed updates before the process forks, because the child has no engine to run them."""
    for late in [each() for each in _ENGINES]:
        if (
            late is not None
            and late.owed
            and late.pid == os.getpid()
            and not late.user.lock.is_held_by_this_thread
        ):
            with late.user.lock:
                late.settle_all("a fork")


os.register_at_fork(before=_settle_before_fork)
