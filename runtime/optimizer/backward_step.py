"""The optimizer's part of an update in the backward. In: a bucket of one `step()`. Out: the same update for
the next backward (engine/backward_updates.py).

    step()          makes the BackwardStep
    the backward    `inputs`: copies of the options; shadows of the weights and states, as for late updates
    next step()     `difference_at_step`: options, weights, gradients and states must be those of the backward
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch._C import DisableTorchFunctionSubclass

from ..engine.backward_updates import Order, UpdateInputs
from ..engine.engine import Engine
from ..ledger.adoption import SMALLEST_BYTES
from ..ledger.record import Record
from . import late_step, trial
from .buckets import Bucket, Group, is_bitwise_equal
from .strategy import Strategy

Layout = tuple[Any, ...]


def may_withhold(engine: Engine, tensor: torch.Tensor, record: Record | None) -> bool:
    """Return whether the tensor can be withheld, so that each look at it is detected."""
    if record is None:
        return tensor.untyped_storage().nbytes() < SMALLEST_BYTES
    if not record.evictable or record.pins or record.kind not in {"weight", "grad", "state"}:
        return False
    return not engine.mover.is_address_taken(record)


class BackwardStep:
    """An update of one bucket that the next backward can run. It implements `Candidate`."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        about: Strategy,
        settings: late_step.StepSettings,
        bucket: Bucket,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        own_bytes: int,
        kernel: str,
        order: Order,
    ) -> None:
        self.engine, self.about = engine, about
        self.optimizer = ref(optimizer)
        self.group, self.slices = bucket.group, bucket.slices
        self.weights = [ref(parameter) for parameter in parameters]
        self.names = list(names)
        self.own_bytes, self.kernel, self.order = own_bytes, kernel, order
        # The program may make a gradient in another shape, and return a view of it.
        self.gradients = [_layout(p.grad) for p in parameters if p.grad is not None]
        self.raised = [about.versions[name] for name in names]  # as in LateBuckets.owe_bucket
        self.settings = settings  # of the last `step()`
        # What the update in this step's backward has used.
        self.options: Group = {}
        self.attributes: dict[str, Any] = {}
        self.used: list[dict[str, Layout | None]] = []  # for each weight: itself, its gradient, its states

    def parameters(self) -> list[torch.Tensor] | None:
        """Return the weights of the update. Return None if the optimizer no longer has them."""
        optimizer = self.optimizer()
        found = [weight() for weight in self.weights]
        if optimizer is None or not any(self.group is group for group in optimizer.param_groups):
            return None
        alive = [parameter for parameter in found if parameter is not None]
        return alive if len(alive) == len(found) else None

    def inputs(self) -> UpdateInputs | None:
        """Return what the update uses now, or None if it cannot run in this backward."""
        optimizer, parameters = self.optimizer(), self.parameters()
        if optimizer is None or parameters is None:
            return None
        with DisableTorchFunctionSubclass(), torch.no_grad():
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
            if not all(map(late_step.has_only_tensor_states, states)):
                return None
            tensors = [*parameters, *(v for own in states for v in own.values() if v is not None)]
            by_key = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
            records = {key: self.engine.residency.records.get(key) for key in by_key}
            movable = all(may_withhold(self.engine, by_key[key], records[key]) for key in by_key)
            are_born = all(states) or not self.about.seen.born
            if len(by_key) < len(tensors) or not (movable and are_born and all(map(_is_plain, tensors))):
                return None
            self.options = late_step.copy_of_options(self.group)
            self.attributes = copy.deepcopy(trial.extra_attributes(optimizer))
            self.used = [_layouts(*pair) for pair in zip(parameters, states)]
            own = [late_step.shadows_of_states(state) for state in states]
        settings = self.settings.with_attributes_of(optimizer)
        return UpdateInputs(
            [record for record in records.values() if record is not None],
            [by_key[key] for key, record in records.items() if record is not None],
            [by_key[key].untyped_storage() for key, record in records.items() if record is None],
            lambda gradients: self._updater(settings, parameters, own, gradients),
        )

    def _updater(
        self,
        settings: late_step.StepSettings,
        parameters: Sequence[torch.Tensor],
        states: Sequence[late_step.States],
        gradients: Sequence[Any],
    ) -> Callable[[Mapping[int, Any]], None]:
        shadows = []
        for parameter, storage, layout, used in zip(parameters, gradients, self.gradients, self.used):
            _, dtype, *place = layout
            gradient = torch.empty(0, dtype=dtype, device=parameter.device).set_(storage, *place)
            shadows.append(late_step.shadow_with_gradient(parameter, gradient))
            used["its gradient"] = _layout(gradient)
        return late_step.updater(settings, self.options, shadows, states, self.slices)

    # ---- at `step()`

    def difference_at_step(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Return how this optimizer's `step()` differs from the update that the backward has run, or None."""
        if self.optimizer() is not optimizer:
            return "another optimizer steps its weights now"
        if self.parameters() is None:
            return "the optimizer has other groups now"
        now = late_step.copy_of_options(self.group)
        for name in sorted(now.keys() | self.options.keys()):
            before, after = self.options.get(name), now.get(name)
            if not is_bitwise_equal([before], [after]):
                return f"the option {name!r} was {before!r} in the backward and is {after!r} at step()"
        if self._has_other_settings(optimizer):
            return "attributes of the optimizer, or modes around step(), have changed"
        with DisableTorchFunctionSubclass():
            for name, used, weight in zip(self.names, self.used, self.weights):
                parameter = weight()
                assert parameter is not None
                found = _layouts(parameter, optimizer.state.get(parameter, {}))
                for part in found | used:
                    if used.get(part) != found.get(part):
                        what = f"{part} of {name} is another tensor now"
                        return what if part else f"{name} has other bytes"
        return None

    def _has_other_settings(self, optimizer: torch.optim.Optimizer) -> bool:
        now = late_step.StepSettings.of(optimizer)
        before = self.settings.with_attributes_of(optimizer)
        scaled = any(vars(optimizer).get(name) is not None for name in ("grad_scale", "found_inf"))
        same = is_bitwise_equal([self.attributes], [trial.extra_attributes(optimizer)])
        modes = (now.grad_enabled, now.default_dtype) == (before.grad_enabled, before.default_dtype)
        return scaled or not same or not modes or not late_step.are_modes_plain()

    def raise_versions(self) -> None:
        """Raise the versions of weights and states as `step()` would."""
        optimizer, parameters = self.optimizer(), self.parameters()
        assert optimizer is not None and parameters is not None
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, more in zip(parameters, self.raised):
                states = optimizer.state.get(parameter, {}).values()
                tensors = [parameter, *(v for v in states if isinstance(v, torch.Tensor))]
                late_step.set_versions(tensors, [t._version + by for t, by in zip(tensors, more)])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether offset, sizes and strides tell where the tensor's values are."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _layouts(parameter: torch.Tensor, states: dict[str, Any]) -> dict[str, Layout | None]:
    """Return where the values of a weight, its gradient and its states are, by the name of the part."""
    found: dict[str, Layout | None] = {"": _layout(parameter)}
    found["its gradient"] = None if parameter.grad is None else _layout(parameter.grad)
    return found | {f"state {name!r}": _layout(v) for name, v in states.items() if v is not None}


def _layout(tensor: torch.Tensor) -> Layout:
    key = tensor.untyped_storage()._cdata
    return key, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
