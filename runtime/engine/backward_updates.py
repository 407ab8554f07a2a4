"""Updates in the backward, for `updates="backward"`. An update runs as soon as its gradients are final.

    step()               notes the updates that the next backward can run (candidates)
    a backward begins    if it makes all gradients of a candidate, its program is composed: it gets a slot for
                         the update, after the last kernel that uses a tensor of the update
    that slot            the update runs. Then its gradients are freed, and weights and states are withheld
    step()               confirms the update: all that the update has used is still what `step()` would use.
                         Weights and states may be used again

This is exact only if no code looks at these tensors between the backward and `step()`, or changes options.
Every look is detected, because the bytes are withheld. It raises BackwardUpdateError with the user's line.
After `step()`, the gradient has no bytes until the user's code frees it, and a look at it raises the error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass

from teraio.errors import BackwardUpdateError, TeraioError, TornStepError
from teraio.formats.schedule import READ, WRITE

from ..eager.gradients import Gradients
from ..eager.signals import SIGNALS, is_user_file
from ..eager.user_code import UserCode
from ..ledger.record import Record, pin_during_block
from ..step.composed_program import UpdateSlot
from ..step.program import Program
from ..step.tracker import StepTracker

log = logging.getLogger("teraio")

Order = tuple[str, ...]  # identities of the step's programs, up to a backward


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """All that an update uses, except for gradients, at the beginning of a backward.

    records, tensors    of the weights and states; each of these is read and written
    small               storages of states without a record
    updater             takes the storages of the gradients, and returns the function that runs the update on
                        the bytes in the given blocks
    """

    records: list[Record]
    tensors: list[torch.Tensor]
    small: list[Any]
    updater: Callable[[Sequence[Any]], Callable[[Mapping[int, Any]], None]]


_NOTHING = UpdateInputs([], [], [], lambda gradients: lambda blocks: None)


class Candidate(Protocol):
    """An update of an optimizer that the next backward can run (optimizer/backward_step.py)."""

    kernel: str
    names: list[str]  # of its weights
    own_bytes: int
    order: Order

    def parameters(self) -> list[torch.Tensor] | None:
        """Return the weights of the update. Return None if the optimizer no longer has them."""
        ...

    def inputs(self) -> UpdateInputs | None:
        """Return what the update uses now, or None if it cannot run in this backward."""
        ...


@dataclass(eq=False, slots=True)
class BackwardUpdate:
    """An update that a running backward runs, or has run. It implements `OwedUpdate` and `SlotUpdate`.

    before       the slot of the program before which the update runs
    buffers      the numbers of its gradients in the program's schedule
    made_at      (slot, position) at which the program hands over each gradient
    gradients    the storages of the gradients that are made, until the update has run; by number
    """

    owner: BackwardUpdates
    candidate: Candidate
    inputs: UpdateInputs
    before: int
    buffers: list[int]
    made_at: list[tuple[int, int]]
    gradients: dict[int, Any] = field(default_factory=dict)
    has_stepped: bool = field(default=False)  # True: `step()` has confirmed the update

    @property
    def kernel(self) -> str:
        return self.candidate.kernel

    @property
    def own_bytes(self) -> int:
        return self.candidate.own_bytes

    @property
    def records(self) -> list[Record]:
        return self.inputs.records

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        return [*self.inputs.tensors, *[None] * len(self.buffers)]

    def note_made(self, number: int, gradient: Any) -> None:
        """Keep the gradient with this number, which the program has made, until the update runs."""
        if isinstance(gradient, torch.Tensor):
            with DisableTorchFunctionSubclass():
                self.gradients[number] = gradient.untyped_storage()

    def is_due(self) -> bool:
        """Return whether the program has made all gradients."""
        return len(self.gradients) == len(self.buffers)

    def give_up(self, place: str) -> None:
        """Leave the update to `step()`, because it cannot run at `place`."""
        self.owner.give_up(self, place)

    def run_at_slot(self, composed: Program) -> None:
        """Run the update. Its tensors are resident."""
        self.owner.run(self, composed)

    def settle(self, place: str, may_evict: bool = True, name: str = "") -> None:
        """Refuse to let the code at `place` see the tensor with this name."""
        self.owner.refuse_look(self, place, name)


class BackwardUpdates:
    """The candidates of one engine, and the updates that have run and that no `step()` has confirmed."""

    def __init__(self, user: UserCode, gradients: Gradients, tracker: StepTracker) -> None:
        self.gradients, self.tracker = gradients, tracker
        self.residency = user.residency
        self.tensors = user.residency.owed_tensors
        # Names of the weights whose updates run in the backward; None means all weights.
        self.weights: Collection[str] | None = ()
        self.candidates: dict[tuple[int, ...], Candidate] = {}  # by ids of the weights
        self.pending: dict[BackwardUpdate, None] = {}  # they have run, and `step()` has not confirmed them
        self.by_weight: dict[int, BackwardUpdate] = {}  # the pending update by id of each of its weights
        self.unfit: set[str] = set()  # names of updates that no longer run in the backward
        self.places: dict[str, _Places] = {}  # by identity of a program
        self.is_accumulation_known = False  # True: a log line has reported that gradients are accumulated

    def choose(self, weights: Collection[str] | None) -> None:
        """Run the updates of these weights in the backward from now on. None means all weights."""
        self.weights = weights if weights is None else frozenset(weights)
        self.candidates = {
            key: candidate
            for key, candidate in self.candidates.items()
            if self.is_chosen(candidate.kernel, candidate.names)
        }

    @property
    def is_off(self) -> bool:
        """Return whether no update may run in the backward."""
        return self.weights is not None and not self.weights

    def is_chosen(self, kernel: str, weights: Iterable[str]) -> bool:
        """Return whether the update with this name, which writes these weights, may run in the backward."""
        if kernel in self.unfit:
            return False
        return self.weights is None or all(name in self.weights for name in weights)

    def note_candidate(self, parameters: Iterable[torch.Tensor], candidate: Candidate) -> None:
        """Let the next backward run this update of these parameters."""
        self.candidates[tuple(map(id, parameters))] = candidate

    # ---- in a backward

    def begin_call(self, program: Program, tensors: Sequence[Any]) -> list[BackwardUpdate]:
        """Return the updates that a beginning call of this program will run. Its arguments are `tensors`."""
        if program.schedule.kind != "backward" or self.residency.torn is not None:
            return []
        order = self._order_up_to(program)
        buffers = self._gradient_buffers(program)
        arguments: dict[int, list[int]] = {}  # storage key -> numbers of the program's buffers
        for position, buffer in program.stops[0].made:
            tensor = tensors[position]
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                arguments.setdefault(tensor.untyped_storage()._cdata, []).append(buffer)
        found = []
        for key, candidate in list(self.candidates.items()):
            if candidate.order != order:
                continue
            if (parameters := candidate.parameters()) is None:
                del self.candidates[key]
                continue
            made = [buffers.get(id(parameter), -1) for parameter in parameters]
            if min(made) < 0 or self._are_accumulated(parameters):
                continue
            update = self._update_of(program, candidate, made, arguments)
            if update is not None:
                found.append(update)
        return found

    def _order_up_to(self, program: Program) -> Order:
        before = [] if self.tracker.stepped is not None else self.tracker.programs
        return (*(each.own_identity for each in before), program.own_identity)

    def _gradient_buffers(self, program: Program) -> dict[int, int]:
        """Return the buffers of the gradients that the program makes and that nobody adds up, by id of the
        weight."""
        self.gradients.begin_call(program)
        leaves = self.gradients.leaves
        count = Counter(id(leaf) for leaf in leaves)
        return {
            id(leaves[about.edge]): number
            for number, about in enumerate(program.schedule.buffers[: program.own_buffers])
            if self.gradients.is_evictable_early(about) and count[id(leaves[about.edge])] == 1
        }

    def _are_accumulated(self, parameters: Iterable[torch.Tensor]) -> bool:
        found = any(parameter.grad is not None for parameter in parameters)
        if found and not self.is_accumulation_known:
            self.is_accumulation_known = True
            log.info(
                "teraio: updates run at step(), not in the backward, if their weights already have gradients"
            )
        return found

    def _update_of(
        self, program: Program, candidate: Candidate, made: list[int], arguments: Mapping[int, list[int]]
    ) -> BackwardUpdate | None:
        if (places := self.places.get(program.identity)) is None:
            places = self.places[program.identity] = _Places.of(program)
        if not all(buffer in places.made for buffer in made) or (inputs := candidate.inputs()) is None:
            return None
        taken = [buffer for record in inputs.records for buffer in arguments.get(record.key, ())]
        made_at = [places.made[buffer] for buffer in made]
        ready = max(slot for slot, _ in made_at)
        before = max([ready, *(places.last_use.get(buffer, -1) + 1 for buffer in (*made, *taken))])
        if before > program.last or not ready > 0:
            return None
        return BackwardUpdate(self, candidate, inputs, before, made, made_at)

    def slot_of(self, update: BackwardUpdate, program: Program, buffers: Mapping[int, int]) -> UpdateSlot:
        """Return the slot of this update. `buffers` has the number of each argument by storage key."""
        tensors = [
            (record.name, record.size_bytes, buffers.get(record.key, -1), READ | WRITE)
            for record in update.records
        ]
        about = program.schedule.buffers
        tensors += [(about[buffer].name, about[buffer].size_bytes, buffer, READ) for buffer in update.buffers]
        return UpdateSlot(update.before, update.kernel, tuple(tensors), update.own_bytes)

    def give_up(self, update: BackwardUpdate, place: str) -> None:
        """Leave this update to `step()` from now on."""
        if not self.unfit:
            log.info(
                "teraio: %s runs at step(), not in the backward: it cannot run in %s. The same holds for "
                "other updates to which this happens",
                update.kernel,
                place,
            )
        self.unfit.add(update.kernel)
        update.gradients.clear()
        for key, candidate in list(self.candidates.items()):
            if candidate is update.candidate:
                del self.candidates[key]

    def run(self, update: BackwardUpdate, composed: Program) -> None:
        """Run an update whose tensors are resident. Then free its gradients, and withhold the other
        tensors."""
        gradients = [composed.bound[buffer] for buffer in update.buffers]
        records = [*update.records, *(record for record in gradients if record is not None)]
        is_whole = len(records) == len(update.records) + len(update.buffers)
        if not is_whole or any(record.owed is not None or not record.evictable for record in records):
            update.give_up("a program that keeps its gradients")
            return
        small = update.inputs.small
        if not self.tensors.withhold(update, records, small):
            update.give_up("a program while other code uses its tensors")
            return
        SIGNALS.begin_backward_updates()
        self.pending[update] = None
        self.by_weight.update((id(p), update) for p in update.candidate.parameters() or ())
        try:
            with pin_during_block(records):
                run = update.inputs.updater([update.gradients[at] for at in range(len(gradients))])
                run(self.tensors.blocks_of(records, small))
        except BaseException as error:
            cause = TeraioError(f"{update.kernel} failed in the backward: {error!r}")
            self.residency.declare_loss(cause, known=isinstance(error, Exception))
            SIGNALS.end_backward_updates()
            if not isinstance(error, Exception):  # such as a second Ctrl-C
                raise
            raise TornStepError(
                f"{update.kernel} failed when it ran in the backward: {error}. Weights and states belong to "
                f"no whole step. Call teraio.reset() and load the last checkpoint"
            ) from error
        finally:
            update.gradients.clear()
        for record in update.records:
            record.wrote()
        for record in records[len(update.records) :]:
            self.residency.mover.discard(record)
        self.residency.mover.counts.add(backward_updates=1)

    # ---- at the optimizer's step

    def pending_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, BackwardUpdate]:
        """Return the updates of these parameters that have run, by id of the parameter."""
        return {id(p): update for p in parameters if (update := self.by_weight.get(id(p))) is not None}

    def confirm(self, update: BackwardUpdate) -> None:
        """End an update, because `step()` would do the same update now. Its weights and states may be used
        again."""
        del self.pending[update]
        for parameter in update.candidate.parameters() or ():
            self.by_weight.pop(id(parameter), None)
        update.has_stepped = True
        self.tensors.release(update.records, update.inputs.small)
        self.tensors.reveal(update.records)
        update.inputs = _NOTHING  # the update may live as long as its gradients
        if not self.pending:
            SIGNALS.end_backward_updates()

    def forget_all(self) -> bool:
        """Give all tensors back, because the engine ends. Return whether an update was not confirmed."""
        left, self.pending, self.by_weight = list(self.pending), {}, {}
        for update in left:
            self.tensors.release(update.records, update.inputs.small)
            self.tensors.reveal(update.records)
        SIGNALS.end_backward_updates()
        return bool(left)

    # ---- when someone looks

    def refuse_look(self, update: BackwardUpdate, place: str, name: str) -> NoReturn:
        """Raise an error, because the code at `place` needs this tensor of the update."""
        if update.has_stepped:
            raise BackwardUpdateError(
                f"{_user_line()} ({place}) needs {name}: updates='backward' has freed this gradient after "
                f"its update. Set gradients to None after step(), as zero_grad() does by default. Read them "
                f"with updates='late', which keeps them"
            )
        self.refuse(update, f"{place} needs {name or 'a state'}")

    def refuse(self, update: BackwardUpdate, reason: str, compiled: bool = False) -> NoReturn:
        """Raise an error, because the loop breaks an assumption. Without the error, the training would go on
        with other numbers. If `compiled` is True, a compiled function has found the cause."""
        error = BackwardUpdateError(
            f"{_user_line(compiled)}: {reason}, but {update.kernel} has run in the backward. "
            f"updates='backward' assumes that between the backward and step() no code uses weights, "
            f"gradients or states, or changes options. Remove this code, or set updates='late', which allows "
            f"it. The weights belong to no whole step now: call teraio.reset() and load the last checkpoint"
        )
        self.residency.declare_loss(error, known=True)
        SIGNALS.end_backward_updates()
        raise error

    def refuse_arguments(self, records: Iterable[Record]) -> None:
        """Raise an error if a tensor of a pending update is among these arguments of a program."""
        for record in records:
            if isinstance(record.owed, BackwardUpdate) and not record.owed.has_stepped:
                self.refuse(record.owed, f"a program takes {record.name} before step()", compiled=True)


@dataclass(frozen=True, slots=True)
class _Places:
    """The slots at which a program makes its outputs, and at which it uses each buffer last.

    made        buffer -> the slot that hands it over, and the position there
    last_use    buffer -> the last slot whose kernel uses it
    """

    made: dict[int, tuple[int, int]]
    last_use: dict[int, int]

    @classmethod
    def of(cls, program: Program) -> _Places:
        made = {}
        last_use = {}
        for index, stop in enumerate(program.stops):
            for position, buffer in stop.made:
                made[buffer] = index, position
            for buffer in stop.needed:
                last_use[buffer] = index
        return cls(made, last_use)


def _user_line(compiled: bool = False) -> str:
    """Return the file and line of the user's code that runs now. If `compiled` is True, it is the code that
    has called the compiled function."""
    frames = list(_frames(sys._getframe()))
    if compiled:
        last = max((at for at, frame in enumerate(frames) if _is_dynamo(frame)), default=0)
        frames = frames[last:]
    frame = next((each for each in frames if is_user_file(each.f_code.co_filename)), frames[-1])
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_dynamo(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("_dynamo/eval_frame.py")
