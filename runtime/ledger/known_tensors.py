"""Known tensors: the tensor objects with which programs, optimizers and autograd access the storage of a
weight, gradient or state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from .record import Record


class KnownTensors:
    """The known tensors, each with the record of its storage. This object keeps no tensor and no storage
    alive."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}  # id of a tensor -> record of the tensor's storage
        self.lent: list[Record] = []  # records that are kept resident for the current optimizer's update

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
