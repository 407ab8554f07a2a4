"""Which tensors are whose bytes: those by which programs, optimizers and autograd know a weight, a gradient
or a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch

from .record import Record


class KnownTensors:
    """Tensors that are known, and the records of their storages. Holds neither."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}  # id of a tensor -> its storage's record
        self.lent: list[Record] = []  # to an optimizer's update

    def add(self, tensor: torch.Tensor, record: Record) -> None:
        """One more tensor by which these bytes are known."""
        known = self.records.get(id(tensor))
        if known is record:
            return
        if known is not None:
            self.remove(tensor, known)
        record.faces = [
            *(face for face in record.faces if face() is not None),
            self._make_self_removing_reference(tensor),
        ]
        self.records[id(tensor)] = record

    def remove(self, tensor: torch.Tensor, record: Record) -> None:
        """The tensor has other bytes now."""
        record.faces = [
            face for face in record.faces if (other := face()) is not None and other is not tensor
        ]
        self.records.pop(id(tensor), None)

    def _make_self_removing_reference(self, tensor: torch.Tensor) -> ReferenceType[torch.Tensor]:
        """Records of an engine that has ended live as long as its programs: they do not hold the engine."""
        key, faces = id(tensor), ref(self)

        def remove_dead(_: Any) -> None:
            if (own := faces()) is not None:
                own.records.pop(key, None)

        return ref(tensor, remove_dead)

    def remove_rebound(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget tensors of these that were given other bytes: `p.data = q`."""
        for tensor in tensors:
            record = self.records.get(id(tensor))
            if record is not None and tensor.untyped_storage()._cdata != record.key:
                self.remove(tensor, record)

    def pin_for_update(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep these resident, until others are lent or these are taken back."""
        self.unpin_after_update()
        self.lent = [known for t in tensors if (known := self.records.get(id(t))) is not None]
        for record in self.lent:
            record.pins += 1

    def unpin_after_update(self) -> None:
        lent, self.lent = self.lent, []
        for record in lent:
            record.pins -= 1
