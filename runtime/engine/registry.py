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
from ..ledger.adoption import SMALLEST_BYTES, is_resizable
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
        self.unresizable = Unresizable(residency, self.is_kept_resident)
        self.gradients = Gradients(residency, user, self.register_gradient, lock)
        self.described: dict[str, TensorFacts] = {}  # all tensors of this step that move, dead ones too

    def is_kept_resident(self, name: str) -> bool:
        """Whether a tensor of this name never moves, if user code can reach it."""
        return self.blind or self._matches_keep_option(name)

    def _matches_keep_option(self, name: str) -> bool:
        found = {glob for glob in self.keep if fnmatchcase(name, glob)}
        self.found |= found
        return bool(found)

    # ---- what programs hand over

    def register_program_tensor(self, program: Program, buffer: int, tensor: Any) -> Record | None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None  # a sparse gradient has no storage
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        about = program.schedule.buffers[buffer]
        weight = about.role == "argument" and program.is_weight(buffer, tensor)
        if weight and record is not None and record.kind == "outside":
            self._promote_to_weight(record, storage, program.label_of_buffer(buffer), about)
        if record is None:
            if storage.nbytes() < SMALLEST_BYTES:
                return None
            if (
                about.edge >= 0
                and (owner := self.gradients.weight_of_early_gradient(about.edge, tensor)) is not None
            ):
                return self._add_early_gradient(owner, storage, about)
            record = self._add_program_tensor(
                program, about, storage, program.label_of_buffer(buffer) if weight else ""
            )
        elif about.role == "argument" and self._make_result_evictable(record):
            self.note_tensor_facts(record)
        if weight and record.kind == "weight":
            self.known_tensors.add(tensor, record)
            if not self.is_kept_resident(record.name):
                self.gradients.watch_gradient_of_weight(tensor)
        return record

    def _add_program_tensor(
        self, program: Program, about: Buffer, storage: torch.UntypedStorage, label: str
    ) -> Record:
        kind = "weight" if label else {"argument": "input"}.get(about.role, "activation")
        if program.schedule.kind == "backward" and about.role == "result":
            kind = "grad"
        name = self._unique_weight_name(label) if label else f"{self.tracker.call_label}.{about.name}"
        wanted = about.role == "saved" or (bool(label) and not about.held)
        wanted = wanted and not (self.is_kept_resident(name) if label else self._matches_keep_option(name))
        record = self._add_record(storage, name, kind, wanted)
        if label and record.evictable:
            self.residency.reachable[record.key] = record
        elif label and wanted:
            self.unresizable.add(record)
        elif label and self.is_kept_resident(name):
            record.because = BLIND if self.blind else "the option 'keep' names it"
        elif about.role == "result" and kind == "activation":
            self.user.hand_out_result(record)
        return record

    def _make_result_evictable(self, record: Record) -> bool:
        """Whether it is a result that moves from now on."""
        waits = record.handed_out and not record.evictable and not self._matches_keep_option(record.name)
        return waits and self.user.reclaim_result(record)

    def register_module_tensor(self, tensor: torch.Tensor, name: str) -> Record | None:
        """A module has it, and no program knows it yet: it may leave. A program that gets it names it."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.Tensor.untyped_storage(tensor)
            record = self.residency.records.get(storage._cdata) or self.register_immovable(
                tensor, name, "outside"
            )
        if record is None or self.blind or not is_resizable(storage) or is_traceable_wrapper_subclass(tensor):
            return record
        if record.kind == "outside" and not record.evictable:
            self.residency.rename(record, name)
            self.residency.allow_eviction(record)
        self.known_tensors.add(tensor, record)
        return record

    def register_eager_weight(self, tensor: torch.Tensor, name: str) -> None:
        """A weight that is trained beside those of programs, and that eager code alone uses."""
        record = self.residency.records.get(tensor.untyped_storage()._cdata)
        if self.is_kept_resident(name) or (record is not None and record.kind != "outside"):
            return
        record = self.register_module_tensor(tensor, name)
        if record is not None and record.evictable:
            self.residency.change_kind(record, "weight")
            record.persistent = True
            self.note_tensor_facts(record)
            self.gradients.watch_and_register_gradient(tensor)

    def _promote_to_weight(
        self, record: Record, storage: torch.UntypedStorage, label: str, about: Buffer
    ) -> None:
        """An optimizer knew it before any program did, or the module that it was made for."""
        self.residency.change_kind(record, "weight")
        record.persistent = True
        self.residency.rename(record, self._unique_weight_name(label))
        if self.is_kept_resident(record.name) or about.held or record.addressed:
            if record.evictable:
                self.residency.make_resident_within_budget([record], 0, f"{record.name}, which stays,", None)
                self.residency.forbid_eviction(record)
        elif is_resizable(storage):
            self.residency.allow_eviction(record)
            self.note_tensor_facts(record)
        else:
            self.unresizable.add(record)

    def _add_record(self, storage: torch.UntypedStorage, name: str, kind: str, wanted: bool) -> Record:
        record = self.residency.add_record_of_storage(storage, name, kind, wanted and is_resizable(storage))
        if record.evictable:
            self.note_tensor_facts(record)
        return record

    def note_tensor_facts(self, record: Record) -> None:
        self.described[record.name] = (record.name, record.kind, record.size_bytes, record.persistent)

    def _unique_weight_name(self, label: str) -> str:
        """One program may serve many layers: the second weight of the same name gets the call's number."""
        return label if label not in self.residency.by_name else f"{self.tracker.call_label}.{label}"

    # ---- gradients

    def _add_early_gradient(self, weight: Record, storage: torch.UntypedStorage, about: Buffer) -> Record:
        """Made by a backward, not yet given to its weight: the first of a step has the weight's name, those
        that are added to it have the call's."""
        name = f"{weight.name}.grad"
        if name in self.residency.by_name:
            name = f"{self.tracker.call_label}.{about.name}"
        record = self._add_record(storage, name, "grad", not self.is_kept_resident(name))
        if record.evictable:
            self.gradients.made[record.key] = record
        return record

    def register_gradient(self, weight: Record, gradient: torch.Tensor) -> Record | None:
        """A weight has this gradient now: it may leave."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = gradient.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        name = f"{weight.name}.grad"
        if (
            self.is_kept_resident(name)
            or not is_resizable(storage)
            or (record is not None and record.addressed)
        ):
            return record
        if record is None:
            if storage.nbytes() < SMALLEST_BYTES:
                return None
            record = self.residency.add_record_of_storage(storage, name, "grad", evictable=True)
        elif record.kind == "weight":
            return None
        if record.kind != "grad":
            self.residency.change_kind(record, "grad")
        if record.name != name:
            self.residency.rename(record, name)
        self.residency.allow_eviction(record)
        self.known_tensors.add(gradient, record)
        self.note_tensor_facts(record)
        return record

    # ---- what optimizers have

    def register_optimizer_state(self, tensor: torch.Tensor, name: str) -> Record | None:
        """A tensor of an optimizer's state, if it is worth a record. One that is made of others, as quantized
        ones are, stays: its own class calls kernels with those others."""
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                self.register_immovable(getattr(tensor, part), f"{name}.{part}", "state")
            return None
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        if record is not None or storage.nbytes() < SMALLEST_BYTES:
            return record
        wanted = type(tensor) is torch.Tensor and not self.is_kept_resident(name)
        record = self._add_record(storage, name, "state", wanted)
        if record.evictable:
            self.known_tensors.add(tensor, record)
            self.residency.reachable[record.key] = record
        return record

    def copy_foreign_states(self, states: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Before they are registered: as `torch.load` leaves them, their bytes belong to a file. All at once,
        because who holds them is found by looking at everything there is."""
        foreign = [
            (name, tensor)
            for tensor, name in states
            if type(tensor) is torch.Tensor
            and (storage := tensor.untyped_storage())._cdata not in self.residency.records
            and storage.nbytes() >= SMALLEST_BYTES
            and not is_resizable(storage)
            and name not in self.unresizable.refused
        ]
        if foreign:
            self.unresizable.make_resizable(foreign)

    def register_immovable(self, tensor: torch.Tensor, name: str, kind: str) -> Record | None:
        """Registers a tensor that is never moved, so that the ledger knows its bytes; one that is known stays
        what it is."""
        if tensor.layout != torch.strided:  # sparse gradients
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        if record is None and storage.nbytes() >= SMALLEST_BYTES:
            record = self.residency.add_record_of_storage(storage, name, kind, evictable=False)
        return record

    # ---- the step

    def mark_surviving_gradients_persistent(self) -> None:
        """A gradient that is still there when the next step begins lives on in it."""
        self.gradients.age_open_forwards()
        for record in self.residency.reachable.values():
            if record.kind == "grad" and not record.persistent:
                record.persistent = True
                self.note_tensor_facts(record)

    def forget_names_of_step(self) -> None:
        """Names of what does not outlive the step are given anew in the next."""
        known = self.residency.by_name
        self.residency.by_name = {name: record for name, record in known.items() if record.persistent}
        kept = self.residency.by_name
        self.described = {name: about for name, about in self.described.items() if name in kept}
