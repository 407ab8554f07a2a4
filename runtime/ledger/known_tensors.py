"""The tensors with which programs, optimizers and autograd access the storage of a weight, a gradient or a
state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from .record import Record


class KnownTensors:
    """Tensors, each with the record of its storage. Tensors and storages are held weakly."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}  # id of a tensor -> its storage's record
        self.lent: list[Record] = []  # records that are pinned for an optimizer's update

    def add(self, tensor: torch.Tensor, record: Record) -> None:
        """Add a tensor of the record's storage."""
        known = self.records.get(id(tensor))
        if known is record:
            return
        if known is not None:
            self.remove(tensor, known)
        record.add_face(self._make_self_removing_reference(tensor))
        self.records[id(tensor)] = record

    def remove(self, tensor: torch.Tensor, record: Record) -> None:
        """Remove a tensor that no longer has the record's storage."""
        record.remove_face(tensor)
        self.records.pop(id(tensor), None)

    def _make_self_removing_reference(self, tensor: torch.Tensor) -> ReferenceType[torch.Tensor]:
        """Return a weak reference that removes its tensor from this object when the tensor dies.

        The reference does not keep this object alive, because records of an ended engine live as long as its
        programs.
        """
        key, faces = id(tensor), ref(self)

        def remove_dead(_: Any) -> None:
            if (own := faces()) is not None:
                own.records.pop(key, None)

        return ref(tensor, remove_dead)

    def remove_rebound(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remove the tensors that user code has given another storage, for example by `p.data = q`."""
        for tensor in tensors:
            record = self.records.get(id(tensor))
            if record is not None and tensor.untyped_storage()._cdata != record.key:
                self.remove(tensor, record)

    def pin_for_update(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep these tensors resident until the optimizer's update ends or its next update begins."""
        self.unpin_after_update()
        self.lent = [known for t in tensors if (known := self.records.get(id(t))) is not None]
        for record in self.lent:
            record.pin()

    def unpin_after_update(self) -> None:
        """Unpin the tensors that `pin_for_update` pinned."""
        lent, self.lent = self.lent, []
        for record in lent:
            record.unpin()
