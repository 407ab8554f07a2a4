"""The buckets of one `step()` whose updates run elsewhere: late, or in the backward. A bucket is a set of
parameters that are stepped together.

In: a bucket with its tensors and records. Out: an update that the engine owes (late_updates.py), or that the
next backward can run (backward_updates.py).

An update may run elsewhere only if the observer detects each look at its tensors. So each of its tensors has
a record that may be evicted, or is too small for a record. Small parameters themselves are stepped at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass

from ..engine.backward_updates import Order
from ..engine.engine import Engine
from ..engine.late_updates import LateUpdate
from ..ledger.adoption import SMALLEST_BYTES
from ..ledger.record import RESIDENT, Record
from ..ledger.shards import is_shard, local_tensor
from . import late_step
from .backward_step import BackwardStep, may_withhold
from .buckets import Bucket, Group
from .strategy import Strategy

Member = tuple[torch.Tensor, Record | None]
PLAIN = {torch.Tensor, torch.nn.Parameter}
Stepped = Sequence[tuple[torch.Tensor, str]]  # parameters of a bucket, each with the name of its record


class LateBuckets:
    """The choice of the buckets whose updates do not run in one `step()`, and these updates."""

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
        return local_tensor(parameter).untyped_storage().nbytes() < SMALLEST_BYTES

    @property
    def is_off(self) -> bool:
        """Return whether all updates of the run are at `step()`."""
        return self.late.weights is not None and not self.late.weights and self.late.backward.is_off

    def may_owe_any(self) -> bool:
        """Return whether updates may run late, or in the next backward. If no tensor is evicted, and no plan
        evicts one, they run now, because nothing would be gained."""
        user, tracker, residency = self.engine.user, self.engine.tracker, self.engine.residency
        if self.is_off or user.observer is None or user.keeps_weights or residency.torn is not None:
            return False
        moves = bool(tracker.expected.table) or any(
            record.state is not RESIDENT for record in residency.records.values()
        )
        if not moves:
            return False
        shards = any(is_shard(p) for group in self.optimizer.param_groups for p in group["params"])
        reasons = {
            "its parameters are shards (DTensor)": shards,
            "a mode such as autocast is active around step()": not late_step.are_modes_plain(),
        }
        if (reason := next((text for text, holds in reasons.items() if holds), None)) is not None:
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
        names = self._names_of_large(stepped)
        return (
            bool(names) and self.late.is_chosen(kernel, names) and self._may_run_elsewhere(stepped, members)
        )

    def _names_of_large(self, stepped: Stepped) -> list[str]:
        return [name for parameter, name in stepped if not self.is_small(parameter)]

    def _may_run_elsewhere(self, stepped: Stepped, members: Sequence[Member]) -> bool:
        """Return whether the update of a bucket with these members may run at another time than now."""
        with DisableTorchFunctionSubclass():
            large = [(p, name) for p, name in stepped if not self.is_small(p)]
            states = [self.optimizer.state.get(p, {}) for p, _ in large]
            if not all(map(late_step.has_only_tensor_states, states)):
                return False
            if any(self.about.versions.get(name) is None for _, name in large):
                return False
            if not any(self._is_used_by_programs(name) for _, name in large):
                return False
            return all(may_withhold(self.engine, *member) for member in members)

    def _is_used_by_programs(self, name: str) -> bool:
        """Return whether a kernel besides the update uses this weight in a known step. If only eager code
        uses it, the first such code would settle the update."""
        return any(
            sum(tick == int(tick) for tick in expected.uses.get(name, ())) > 1  # eager code's are fractions
            for expected in self.engine.tracker.known.values()
        )

    # ---- updates in the backward

    def note_settings(self) -> None:
        """Note the settings that hold while the step's code runs."""
        if not self.late.backward.is_off:
            self.settings = late_step.StepSettings.of(self.optimizer)

    def note_candidate(
        self, bucket: Bucket, stepped: Stepped, members: Sequence[Member], own_bytes: int, kernel: str
    ) -> None:
        """Let the next backward run the update of this bucket, if it can."""
        backward, names = self.late.backward, self._names_of_large(stepped)
        if not names or not backward.is_chosen(kernel, names):
            return
        if not self._may_run_elsewhere(stepped, members):
            return
        large = [parameter for parameter, _ in stepped if not self.is_small(parameter)]
        order = self._order_of_whole_gradients(large)
        if order is None:
            reason = "gradients are sums, or no compiled backward makes them"
            self.about.report_no_late_updates(self.optimizer, reason, "in the backward")
            return
        assert self.settings is not None
        step = BackwardStep(
            self.engine,
            self.optimizer,
            self.about,
            self.settings,
            bucket,
            large,
            names,
            own_bytes,
            kernel,
            order,
        )
        backward.note_candidate(large, step)

    def _order_of_whole_gradients(self, parameters: Sequence[torch.Tensor]) -> Order | None:
        """Return the programs of this step up to the backward that has made all gradients of these
        parameters. Return None if there is no such backward."""
        known, whole = self.engine.known_tensors.records, self.engine.gradients.whole
        found = set()
        for parameter in parameters:
            weight, gradient = known.get(id(parameter)), parameter.grad
            made = whole.get(weight.key) if weight is not None else None
            if made is None or gradient is None or gradient.untyped_storage()._cdata != made.record.key:
                return None
            found.add(made.order)
        return found.pop() if len(found) == 1 else None

    def confirm_updates(self, whole: bool) -> set[int]:
        """Confirm the updates of this optimizer that the backward has run. Return the ids of their weights.

        Raise BackwardUpdateError if `step()` would not do the same updates now. With `whole`, it steps all
        parameters together.
        """
        backward = self.late.backward
        if not backward.pending:
            return set()
        groups = self.optimizer.param_groups
        pending = backward.pending_of(p for group in groups for p in group["params"])
        for update in dict.fromkeys(pending.values()):
            step = update.candidate
            assert isinstance(step, BackwardStep)
            reason = step.difference_at_step(self.optimizer)
            if whole:
                reason = "step() now steps all parameters together"
            if reason is not None:
                backward.refuse(update, reason)
            backward.confirm(update)
            step.raise_versions()
        self.late.note_open()
        return set(pending)

    def updated_buckets(self, stepped: Sequence[Stepped], done: set[int]) -> set[int] | None:
        """Return the numbers of the buckets of which the backward has updated all weights. `done` has the ids
        of such weights. Return None if it has updated some weights of a bucket only."""
        found = set()
        for at, pairs in enumerate(stepped):
            large = [id(parameter) in done for parameter, _ in pairs if not self.is_small(parameter)]
            if any(large):
                found.add(at)
                if not all(large):
                    return None
        return found

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
