"""Who a tensor is: one record per storage, under a name that the same tensor gets again in the next step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from teraio.formats.schedule import Buffer

from ..eager.gradients import Gradients
from ..eager.user_code import UserCode
from ..ledger.adoption import SMALLEST_BYTES, movable
from ..ledger.engine_lock import EngineLock
from ..ledger.record import Record
from ..ledger.residency import Residency
from ..ledger.unresizable import Unresizable
from ..step.program import Program
from ..step.tracker import StepTracker, TensorFacts

BLIND = "nobody sees who reads it"


class Registry:
    def __init__(
        self,
        residency: Residency,
        tracker: StepTracker,
        user: UserCode,
        lock: EngineLock,
        keep: Sequence[str] = (),
    ) -> None:
        self.residency = residency
        self.tracker = tracker
        self.user = user
        self.known_tensors = user.known_tensors
        self.keep = keep  # name globs of tensors that never move
        self.found: set[str] = set()  # of these
        self.blind = False  # nobody sees who reads: what user code can reach never moves
        self.unresizable = Unresizable(residency, self.kept)
        self.gradients = Gradients(residency, user, self.adopt_gradient, lock)
        self.described: dict[str, TensorFacts] = {}  # all tensors of this step that move, dead ones too

    def kept(self, name: str) -> bool:
        """Whether a tensor of this name never moves, if user code can reach it."""
        return self.blind or self._named(name)

    def _named(self, name: str) -> bool:
        found = {glob for glob in self.keep if fnmatchcase(name, glob)}
        self.found |= found
        return bool(found)

    # ---- what programs hand over

    def register(self, program: Program, buffer: int, tensor: Any) -> Record | None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None  # a sparse gradient has no storage
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        about = program.schedule.buffers[buffer]
        weight = about.role == "argument" and program.is_weight(buffer, tensor)
        if weight and record is not None and record.kind == "outside":
            self._bring_in(record, storage, program.label(buffer), about)
        if record is None:
            if storage.nbytes() < SMALLEST_BYTES:
                return None
            if about.edge >= 0 and (owner := self.gradients.early(about.edge, tensor)) is not None:
                return self._add_gradient(owner, storage, about)
            record = self._add(program, about, storage, program.label(buffer) if weight else "")
        elif about.role == "argument" and self._takes_up(record):
            self.describe(record)
        if weight and record.kind == "weight":
            self.known_tensors.add(tensor, record)
            if not self.kept(record.name):
                self.gradients.watch(tensor)
        return record

    def _add(self, program: Program, about: Buffer, storage: torch.UntypedStorage, label: str) -> Record:
        kind = "weight" if label else {"argument": "input"}.get(about.role, "activation")
        if program.schedule.kind == "backward" and about.role == "result":
            kind = "grad"
        name = self._weight_name(label) if label else f"{self.tracker.label}.{about.name}"
        wanted = about.role == "saved" or (bool(label) and not about.held)
        wanted = wanted and not (self.kept(name) if label else self._named(name))
        record = self._new(storage, name, kind, wanted)
        if label and record.evictable:
            self.residency.reachable[record.key] = record
        elif label and wanted:
            self.unresizable.add(record)
        elif label and self.kept(name):
            record.because = BLIND if self.blind else "the option 'keep' names it"
        elif about.role == "result" and kind == "activation":
            self.user.hand_out(record)
        return record

    def _takes_up(self, record: Record) -> bool:
        """Whether it is a result that moves from now on."""
        waits = record.handed_out and not record.evictable and not self._named(record.name)
        return waits and self.user.take_up(record)

    def take_in(self, tensor: torch.Tensor, name: str) -> Record | None:
        """A module has it, and no program knows it yet: it may leave. A program that gets it names it."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.Tensor.untyped_storage(tensor)
            record = self.residency.records.get(storage._cdata) or self.count(tensor, name, "outside")
        if record is None or self.blind or not movable(storage) or is_traceable_wrapper_subclass(tensor):
            return record
        if record.kind == "outside" and not record.evictable:
            self.residency.rename(record, name)
            self.residency.unsettle(record)
        self.known_tensors.add(tensor, record)
        return record

    def take_in_eager(self, tensor: torch.Tensor, name: str) -> None:
        """A weight that is trained beside those of programs, and that eager code alone uses."""
        record = self.residency.records.get(tensor.untyped_storage()._cdata)
        if self.kept(name) or (record is not None and record.kind != "outside"):
            return
        record = self.take_in(tensor, name)
        if record is not None and record.evictable:
            self.residency.becomes(record, "weight")
            record.persistent = True
            self.describe(record)
            self.gradients.watch_late(tensor)

    def _bring_in(self, record: Record, storage: torch.UntypedStorage, label: str, about: Buffer) -> None:
        """An optimizer knew it before any program did, or the module that it was made for."""
        self.residency.becomes(record, "weight")
        record.persistent = True
        self.residency.rename(record, self._weight_name(label))
        if self.kept(record.name) or about.held or record.addressed:
            if record.evictable:
                self.residency.ensure([record], 0, f"{record.name}, which stays,", None)
                self.residency.settle(record)
        elif movable(storage):
            self.residency.unsettle(record)
            self.describe(record)
        else:
            self.unresizable.add(record)

    def _new(self, storage: torch.UntypedStorage, name: str, kind: str, wanted: bool) -> Record:
        record = self.residency.add(storage, name, kind, wanted and movable(storage))
        if record.evictable:
            self.describe(record)
        return record

    def describe(self, record: Record) -> None:
        self.described[record.name] = (record.name, record.kind, record.size_bytes, record.persistent)

    def _weight_name(self, label: str) -> str:
        """One program may serve many layers: the second weight of the same name gets the call's number."""
        return label if label not in self.residency.by_name else f"{self.tracker.label}.{label}"

    # ---- gradients

    def _add_gradient(self, weight: Record, storage: torch.UntypedStorage, about: Buffer) -> Record:
        """Made by a backward, not yet given to its weight: the first of a step has the weight's name, those
        that are added to it have the call's."""
        name = f"{weight.name}.grad"
        if name in self.residency.by_name:
            name = f"{self.tracker.label}.{about.name}"
        record = self._new(storage, name, "grad", not self.kept(name))
        if record.evictable:
            self.gradients.made[record.key] = record
        return record

    def adopt_gradient(self, weight: Record, gradient: torch.Tensor) -> Record | None:
        """A weight has this gradient now: it may leave."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = gradient.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        name = f"{weight.name}.grad"
        if self.kept(name) or not movable(storage) or (record is not None and record.addressed):
            return record
        if record is None:
            if storage.nbytes() < SMALLEST_BYTES:
                return None
            record = self.residency.add(storage, name, "grad", evictable=True)
        elif record.kind == "weight":
            return None
        if record.kind != "grad":
            self.residency.becomes(record, "grad")
        if record.name != name:
            self.residency.rename(record, name)
        self.residency.unsettle(record)
        self.known_tensors.add(gradient, record)
        self.describe(record)
        return record

    # ---- what optimizers have

    def state(self, tensor: torch.Tensor, name: str) -> Record | None:
        """A tensor of an optimizer's state, if it is worth a record. One that is made of others, as quantized
        ones are, stays: its own class calls kernels with those others."""
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                self.count(getattr(tensor, part), f"{name}.{part}", "state")
            return None
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        if record is not None or storage.nbytes() < SMALLEST_BYTES:
            return record
        wanted = type(tensor) is torch.Tensor and not self.kept(name)
        record = self._new(storage, name, "state", wanted)
        if record.evictable:
            self.known_tensors.add(tensor, record)
            self.residency.reachable[record.key] = record
        return record

    def adopt_states(self, states: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Before they are registered: as `torch.load` leaves them, their bytes belong to a file. All at once,
        because who holds them is found by looking at everything there is."""
        foreign = [
            (name, tensor)
            for tensor, name in states
            if type(tensor) is torch.Tensor
            and (storage := tensor.untyped_storage())._cdata not in self.residency.records
            and storage.nbytes() >= SMALLEST_BYTES
            and not movable(storage)
            and name not in self.unresizable.refused
        ]
        if foreign:
            self.unresizable.adopt(foreign)

    def count(self, tensor: torch.Tensor, name: str, kind: str) -> Record | None:
        """Registers a tensor that is never moved, so that the ledger knows its bytes; one that is known stays
        what it is."""
        if tensor.layout != torch.strided:  # sparse gradients
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        if record is None and storage.nbytes() >= SMALLEST_BYTES:
            record = self.residency.add(storage, name, kind, evictable=False)
        return record

    # ---- the step

    def end_step(self) -> None:
        """A gradient that is still there when the next step begins lives on in it."""
        self.gradients.end_step()
        for record in self.residency.reachable.values():
            if record.kind == "grad" and not record.persistent:
                record.persistent = True
                self.describe(record)

    def forget_names(self) -> None:
        """Names of what does not outlive the step are given anew in the next."""
        known = self.residency.by_name
        self.residency.by_name = {name: record for name, record in known.items() if record.persistent}
        kept = self.residency.by_name
        self.described = {name: about for name, about in self.described.items() if name in kept}
