"""Known tensors: the tensor objects with which programs, optimizers and autograd access the storage of a
weight, gradient or state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from .record import Record
from .shards import local_tensor


class KnownTensors:
    """The known tensors, each with the record of its storage. This object keeps no tensor and no storage
    alive."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}  # id of a tensor -> record of the tensor's storage
        self.lent: list[Record] = []  # records that are kept resident for the current optimizer's update
        self.wholes: dict[int, ReferenceType[torch.Tensor]] = {}  # id of a local tensor -> its DTensor

    def add(self, tensor: torch.Tensor, record: Record) -> None:
        """Add a tensor whose storage has this record."""
        known = self.records.get(id(tensor))
        if known is record:
            return
        if known is not None:
            self.remove(tensor, known)
        record.add_face(self._make_self_removing_reference(tensor))
        self.records[id(tensor)] = record

    def remove(self, tensor: torch.Tensor, record: Record) -> None:
        """Remove a tensor whose storage no longer is the storage of this record."""
        record.remove_face(tensor)
        self.records.pop(id(tensor), None)

    def note_whole(self, weight: torch.Tensor) -> None:
        """Note that this DTensor is the weight that user code and autograd know, if the tensor is one."""
        local = local_tensor(weight)
        if local is not weight and ((known := self.wholes.get(id(local))) is None or known() is not weight):
            key = id(local)
            self.wholes[key] = ref(weight, lambda _: self.wholes.pop(key, None) and None)

    def whole_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the weight that user code and autograd know: the DTensor of this local tensor, or the tensor
        itself."""
        known = self.wholes.get(id(tensor))
        whole = None if known is None else known()
        return tensor if whole is None or local_tensor(whole) is not tensor else whole

    def record_of(self, weight: torch.Tensor) -> Record | None:
        """Return the record of this tensor, or of the local tensor of this DTensor."""
        return self.records.get(id(local_tensor(weight)))

    def _make_self_removing_reference(self, tensor: torch.Tensor) -> ReferenceType[torch.Tensor]:
        """Return a weak reference to the tensor. When the tensor is freed, the reference removes the tensor
        from `records`.

        The reference does not keep this KnownTensors alive. Records hold such references, and may live longer
        than the engine.
        """
        key, faces = id(tensor), ref(self)

        def remove_dead(_: Any) -> None:
            if (own := faces()) is not None:
                own.records.pop(key, None)

        return ref(tensor, remove_dead)

    def remove_rebound(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remove the tensors to which user code has given another storage, for example by `p.data = q`."""
        for tensor in tensors:
            record = self.records.get(id(tensor))
            if record is not None and tensor.untyped_storage()._cdata != record.key:
                self.remove(tensor, record)

    def pin_for_update(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep these tensors resident until the optimizer's update ends, or until another update begins."""
        self.unpin_after_update()
        self.lent = [known for t in tensors if (known := self.records.get(id(t))) is not None]
        for record in self.lent:
            record.pin()

    def unpin_after_update(self) -> None:
        """Allow the eviction of the tensors that `pin_for_update` keeps resident."""
        lent, self.lent = self.lent, []
        for record in lent:
            record.unpin()
