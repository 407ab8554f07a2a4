"""Registry of tensors: one record for each storage. A tensor's record has the same name in each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from teraio import switches
from teraio.formats.schedule import Buffer

from ..eager.gradients import Gradients
from ..eager.user_code import UserCode
from ..ledger.adoption import SMALLEST_BYTES, is_resizable
from ..ledger.engine_lock import EngineLock
from ..ledger.record import Record
from ..ledger.residency import Residency
from ..ledger.shards import local_tensor
from ..step.program import Program
from ..step.tracker import StepTracker, TensorFacts


class Registry:
    """The registration of tensors. A method finds the record of a tensor's storage, or makes a record with a
    name."""

    def __init__(self, residency: Residency, tracker: StepTracker, user: UserCode, lock: EngineLock) -> None:
        self.residency = residency
        self.tracker = tracker
        self.user = user
        self.known_tensors = user.known_tensors
        self.keep = residency.keep
        self.unresizable = residency.unresizable
        self.gradients = Gradients(residency, user, self.register_gradient, lock)
        self.fetches_for_calls = "gradient_calls" in switches.disabled_features()
        # Name, kind, size and lifetime of this step's evictable tensors, even after they are freed.
        self.described: dict[str, TensorFacts] = {}

    # ---- tensors of programs

    def register_program_tensor(self, program: Program, buffer: int, tensor: Any) -> Record | None:
        """Register a tensor that a program has as an argument or output. Return the record of the tensor's
        storage. Return None for a tensor without a record, such as a small tensor."""
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
            if not self.keep.covers(record.name):
                self.gradients.watch_gradient_of_weight(self.known_tensors.whole_of(tensor))
        return record

    def _add_program_tensor(
        self, program: Program, about: Buffer, storage: torch.UntypedStorage, label: str
    ) -> Record:
        kind = "weight" if label else {"argument": "input"}.get(about.role, "activation")
        if program.schedule.kind == "backward" and about.role == "result":
            kind = "grad"
        name = self._unique_weight_name(label) if label else f"{self.tracker.call_label}.{about.name}"
        wanted = about.role == "saved" or (bool(label) and not about.held)
        wanted = wanted and not (self.keep.covers(name) if label else self.keep.lists(name))
        record = self._add_record(storage, name, kind, wanted)
        if label and record.evictable:
            self.residency.make_reachable(record)
        elif label and wanted:
            self.unresizable.add(record)
        elif label and self.keep.covers(name):
            record.explain(self.keep.reason)
        elif about.role == "result" and kind == "activation":
            self.user.hand_out_result(record)
        return record

    def _make_result_evictable(self, record: Record) -> bool:
        """Allow the eviction of a program's result that another program takes as an argument, if possible.
        Return whether this call has allowed the eviction."""
        waits = record.handed_out and not record.evictable and not self.keep.lists(record.name)
        return waits and self.user.reclaim_result(record)

    def register_module_tensor(self, tensor: torch.Tensor, name: str) -> Record | None:
        """Register a module's tensor before any program uses the tensor, and allow its eviction.

        `name` is preliminary. The first program that takes the tensor as an argument gives it the final name.
        """
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.Tensor.untyped_storage(tensor)
            record = self.residency.records.get(storage._cdata) or self.register_immovable(
                tensor, name, "outside"
            )
        if (
            record is None
            or self.keep.unobserved
            or not is_resizable(storage)
            or is_traceable_wrapper_subclass(tensor)
        ):
            return record
        if record.kind == "outside" and not record.evictable:
            self.residency.rename(record, name)
            self.residency.allow_eviction(record)
        self.known_tensors.add(tensor, record)
        return record

    def register_eager_weight(self, tensor: torch.Tensor, name: str) -> None:
        """Register a weight that only eager code uses, so that it may be evicted like the weights of
        programs. The optimizer that trains it also trains weights of programs."""
        local = local_tensor(tensor)
        record = self.residency.records.get(local.untyped_storage()._cdata)
        if self.keep.covers(name) or (record is not None and record.kind != "outside"):
            return
        record = self.register_module_tensor(local, name)
        if record is not None and record.evictable:
            self.residency.change_kind(record, "weight", persistent=True)
            self.note_tensor_facts(record)
            self.gradients.watch_and_register_gradient(tensor)

    def _promote_to_weight(
        self, record: Record, storage: torch.UntypedStorage, label: str, about: Buffer
    ) -> None:
        """Change the record to a record of a weight. An optimizer or a module registered the tensor before a
        program took it as a weight."""
        self.residency.change_kind(record, "weight", persistent=True)
        self.residency.rename(record, self._unique_weight_name(label))
        if self.keep.covers(record.name) or about.held or record.addressed:
            if record.evictable:
                place = f"{record.name}, which is kept resident"
                self.residency.make_resident_within_budget([record], 0, place, None)
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
        """Record name, kind, size and lifetime of a tensor, for the profile of this step."""
        self.described[record.name] = (record.name, record.kind, record.size_bytes, record.persistent)

    def _unique_weight_name(self, label: str) -> str:
        """Return a name for a weight that no other record has.

        If several layers share one program, their weights have the same label. The first weight gets the
        label as its name. The name of each other weight also contains the label of the call.
        """
        return label if label not in self.residency.by_name else f"{self.tracker.call_label}.{label}"

    # ---- gradients

    def _add_early_gradient(self, weight: Record, storage: torch.UntypedStorage, about: Buffer) -> Record:
        """Register a gradient that a backward has made, before autograd sets the weight's `.grad`.

        The name of the first gradient of a step contains the weight's name. Autograd adds later gradients to
        the first one. The name of a later gradient contains the label of the call.
        """
        name = f"{weight.name}.grad"
        known = self.residency.by_name.get(name)
        if known is not None and not known.is_dead():
            name = f"{self.tracker.call_label}.{about.name}"
        record = self._add_record(storage, name, "grad", not self.keep.covers(name))
        if record.evictable:
            self.gradients.note_made(record)
            self._note_gradient(storage, name)
        return record

    def _note_gradient(self, storage: torch.UntypedStorage, name: str) -> None:
        """Let user code scale this gradient, and ask for its norm, without a fetch."""
        if self.user.observer is not None and not self.fetches_for_calls:
            self.user.observer.note_gradient(storage, name)

    def register_gradient(self, weight: Record, gradient: torch.Tensor) -> Record | None:
        """Register the tensor that is now the weight's `.grad`, and allow its eviction."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = gradient.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        name = f"{weight.name}.grad"
        if self.keep.covers(name) or not is_resizable(storage) or (record is not None and record.addressed):
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
        if record.evictable and record.owed is None:
            self._note_gradient(storage, name)
        return record

    # ---- tensors of optimizers

    def register_optimizer_state(self, tensor: torch.Tensor, name: str) -> Record | None:
        """Register a tensor of an optimizer's state, unless the tensor is small.

        A state may be an object that wraps inner tensors, such as a quantized state. The inner tensors are
        kept resident, because the object's class calls kernels with them.
        """
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
        wanted = type(tensor) is torch.Tensor and not self.keep.covers(name)
        record = self._add_record(storage, name, "state", wanted)
        if record.evictable:
            self.known_tensors.add(tensor, record)
            self.residency.make_reachable(record)
        return record

    def copy_foreign_states(self, states: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Copy states to memory of torch's allocator if their bytes belong to a file, as after `torch.load`.
        Only then can the states be evicted. They are not registered yet.

        All states are copied together. Each copy needs a search for other users of the memory, and one search
        looks at every object of the process.
        """
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
        """Register a tensor that cannot be evicted, so that the ledger counts its bytes. If the tensor
        already has a record, return this record unchanged."""
        if tensor.layout != torch.strided:  # a sparse gradient has no storage
            return None
        storage = tensor.untyped_storage()
        record = self.residency.records.get(storage._cdata)
        if record is None and storage.nbytes() >= SMALLEST_BYTES:
            record = self.residency.add_record_of_storage(storage, name, kind, evictable=False)
        return record

    # ---- the step

    def mark_surviving_gradients_persistent(self) -> None:
        """Mark gradients as persistent if they are still alive when the next step begins."""
        self.gradients.age_open_forwards()
        for record in self.residency.reachable.values():
            # An owed update frees its gradient in the next step.
            if record.kind == "grad" and not record.persistent and record.owed is None:
                record.persist()
                self.note_tensor_facts(record)

    def note_outliving(self, records: Iterable[Record], besides: Collection[str]) -> None:
        """Record that these gradients outlive this step, for its profile. Leave out the names in
        `besides`."""
        for record in records:
            if record.kind == "grad" and record.name not in besides:
                self.described[record.name] = (record.name, record.kind, record.size_bytes, True)

    def forget_names_of_step(self) -> None:
        """Forget the names of tensors that do not outlive the step, because the next step assigns these names
        again."""
        self.residency.forget_names_of_step()
        kept = self.residency.by_name
        self.described = {name: about for name, about in self.described.items() if name in kept}
