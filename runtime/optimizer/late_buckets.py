"""The buckets of one `step()` whose updates run late. A bucket is a set of parameters that are stepped
together.

In: a bucket with its tensors and records. Out: an update that the engine owes (late_updates.py).

An update may run late only if the observer detects each look at its tensors. So each of its tensors has a
record that may be evicted, or is too small for a record. Small parameters themselves are stepped at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass

from ..engine.engine import Engine
from ..engine.late_updates import LateUpdate
from ..ledger.adoption import SMALLEST_BYTES
from ..ledger.record import RESIDENT, Record
from . import late_step
from .buckets import Bucket, Group
from .strategy import Strategy

Member = tuple[torch.Tensor, Record | None]
PLAIN = {torch.Tensor, torch.nn.Parameter}
Stepped = Sequence[tuple[torch.Tensor, str]]  # parameters of a bucket, each with the name of its record


class LateBuckets:
    """The choice of the buckets that run late in one `step()`, and their updates."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, about: Strategy) -> None:
        self.engine, self.optimizer, self.about = engine, optimizer, about
        self.late = engine.late
        self.settings: late_step.StepSettings | None = None
        self.options: dict[int, Group] = {}  # id of a group -> a copy of its options at this step
        # Versions before the running update, by the name of the weight's record.
        self.before: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self.updated: Stepped = ()  # the parameters of the running update

    @staticmethod
    def is_small(parameter: torch.Tensor) -> bool:
        """Return whether a parameter is so small that it has no record. It is never stepped late."""
        return parameter.untyped_storage().nbytes() < SMALLEST_BYTES

    @property
    def is_off(self) -> bool:
        """Return whether the run has no late updates at all."""
        return self.late.weights is not None and not self.late.weights

    def may_owe_any(self) -> bool:
        """Return whether updates of this step may run late. If no tensor is evicted, and no plan evicts one,
        they run now, because late updates would gain nothing."""
        user, tracker, residency = self.engine.user, self.engine.tracker, self.engine.residency
        if self.is_off or user.observer is None or user.keeps_weights or residency.torn is not None:
            return False
        moves = bool(tracker.expected.table) or any(
            record.state is not RESIDENT for record in residency.records.values()
        )
        if not moves:
            return False
        if not late_step.are_modes_plain():
            reason = "a mode such as autocast is active around step()"
            self.about.report_no_late_updates(self.optimizer, reason)
            return False
        return self.about.can_run_late(self.optimizer)

    @staticmethod
    def separate_storages(members: Sequence[Member]) -> set[int]:
        """Return the keys of the storages of these tensors. Return an empty set if two of them share a
        storage, or if one of them is no plain tensor."""
        with DisableTorchFunctionSubclass():
            plain = [t for t, _ in members if type(t) in PLAIN and _has_only_strides(t)]
            keys = {tensor.untyped_storage()._cdata for tensor in plain}
        return keys if len(keys) == len(members) else set()

    def report_closure(self) -> None:
        """Log that updates with a closure run at `step()`."""
        if not self.is_off:
            self.about.report_no_late_updates(self.optimizer, "its step has a closure")

    def may_owe(self, stepped: Stepped, members: Sequence[Member], kernel: str) -> bool:
        """Return whether the update of a bucket with these members may run late."""
        with DisableTorchFunctionSubclass():
            large = [(p, name) for p, name in stepped if not self.is_small(p)]
            if not large or not self.late.is_chosen(kernel, (name for _, name in large)):
                return False
            states = [self.optimizer.state.get(p, {}) for p, _ in large]
            if not all(map(late_step.has_only_tensor_states, states)):
                return False
            if any(self.about.versions.get(name) is None for _, name in large):
                return False
            if not any(self._is_used_by_programs(name) for _, name in large):
                return False
            return all(self._may_withhold(*member) for member in members)

    def _is_used_by_programs(self, name: str) -> bool:
        """Return whether a kernel besides the update uses this weight in a known step. If only eager code
        uses it, the first such code would settle the update."""
        return any(
            sum(tick == int(tick) for tick in expected.uses.get(name, ())) > 1  # eager code's are fractions
            for expected in self.engine.tracker.known.values()
        )

    def _may_withhold(self, tensor: torch.Tensor, record: Record | None) -> bool:
        """Return whether the tensor can be withheld, so that each look at it is detected."""
        if record is None:
            return tensor.untyped_storage().nbytes() < SMALLEST_BYTES
        if not record.evictable or record.pins or record.kind not in {"weight", "grad", "state"}:
            return False
        return not self.engine.mover.is_address_taken(record)

    def owe_bucket(
        self,
        bucket: Bucket,
        stepped: Stepped,
        members: Sequence[Member],
        flags: Sequence[tuple[Record, int]],
        own_bytes: int,
        kernel: str,
    ) -> None:
        """Put off the update of a bucket, without its small parameters. Raise the versions of its tensors as
        the update would."""
        if self.settings is None:
            self.settings = late_step.StepSettings.of(self.optimizer)
        options = self.options.get(id(bucket.group)) or late_step.copy_of_options(bucket.group)
        self.options[id(bucket.group)] = options
        with DisableTorchFunctionSubclass(), torch.no_grad():
            large = [(p, name) for p, name in stepped if not self.is_small(p)]
            shadows = [late_step.shadow_of(p) for p, _ in large]
            states = [late_step.shadows_of_states(self.optimizer.state.get(p, {})) for p, _ in large]
            by_key = {tensor.untyped_storage()._cdata: tensor for tensor in _tensors_of(shadows, states)}
            small = [t.untyped_storage() for key, t in by_key.items() if key not in {r.key for r, _ in flags}]
            for shadow, own, (_, name) in zip(shadows, states, large):
                tensors = [shadow, *(v for v in own.values() if isinstance(v, torch.Tensor))]
                raised = [t._version + more for t, more in zip(tensors, self.about.versions[name])]
                late_step.set_versions(tensors, raised)
        self.late.owe(
            LateUpdate(
                self.late,
                kernel,
                [record for record, _ in flags],
                [use for _, use in flags],
                [by_key[record.key] for record, _ in flags],
                small,
                own_bytes,
                late_step.updater(self.settings, options, shadows, states, bucket.slices),
                self.engine.meter.begun,
            )
        )

    # ---- versions

    def begin_update(self, stepped: Stepped) -> None:
        """Begin an update that runs now. Note the versions of its tensors, if a later update may run late."""
        if self.is_off:
            return
        known = self.about.versions
        self.before = {
            name: [(tensor, tensor._version) for tensor in self._versioned_tensors(parameter)]
            for parameter, name in stepped
            if name not in known
        }
        self.updated = stepped

    def end_update(self) -> None:
        """End an update that has run now. Note by how much it has raised the versions."""
        before, self.before = self.before, {}
        updated, self.updated = self.updated, ()
        for parameter, name in updated:
            then = before.get(name, [])
            now = self._versioned_tensors(parameter)
            if then and [id(tensor) for tensor in now] == [id(tensor) for tensor, _ in then]:
                raised = (tensor._version - version for tensor, version in then)
                self.about.note_versions(name, tuple(raised))

    def _versioned_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        states = self.optimizer.state.get(parameter, {}).values()
        return [parameter, *(value for value in states if isinstance(value, torch.Tensor))]


def _has_only_strides(tensor: torch.Tensor) -> bool:
    """Return whether offset, sizes and strides tell where the tensor's values are, with no bit to negate
    them."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _tensors_of(
    shadows: Sequence[late_step.Shadow], states: Sequence[late_step.States]
) -> list[torch.Tensor]:
    """Return these shadows, with their gradients and states."""
    found = []
    for shadow, own in zip(shadows, states):
        assert shadow.grad is not None
        found += [shadow, shadow.grad, *(v for v in own.values() if isinstance(v, torch.Tensor))]
    return found
