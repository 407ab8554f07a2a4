"""The optimizer's part of late updates. In: a bucket whose update may run late. Out: a function that runs the
update later, with the same result as now. Updates in the backward use this code, too (backward_step.py).

    at step()   copies of the options; shadows of the weights, gradients and states; the raised versions
    later       the optimizer's own code runs on a stand-in, which has one group with the shadows

A shadow is a detached tensor with the storage of its original. So the update reads and writes the same bytes,
whatever user code does with the originals in between. User code may replace `p.grad`, `p.data` or
`optimizer.state[p]`. It may change options, or delete the optimizer.

At this time the bytes are withheld: they are in blocks that belong to no tensor (owed_tensors.py). The update
runs on tensors in these blocks. So no other thread can see a weight before its update has ended.

Only an optimizer whose trial succeeds may run updates late. Its updates depend on nothing but options,
weights, gradients and states, and they change only weights and states, in place.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils._python_dispatch import _disable_current_modes

from . import trial
from .buckets import Bucket, Group, is_bitwise_equal, make_late_stand_in
from .slices import slices_of_bucket

Shadow = torch.Tensor
States = dict[str, Any]
Blocks = Mapping[int, Any]  # storage key -> the block that has the storage's bytes


class ReboundStateError(Exception):
    """The error for an update that replaced a state, or made one, when it ran late."""


def shadow_of(parameter: torch.Tensor) -> Shadow:
    """Return a shadow of the parameter, with a shadow of its gradient and with the parameter's
    attributes."""
    return _shadow_by(torch.Tensor.detach, parameter)


def shadows_of_states(states: dict[str, Any]) -> States:
    """Return these states of a parameter, with a shadow of each tensor."""
    return _states_by(torch.Tensor.detach, states)


def shadow_with_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> Shadow:
    """Return a shadow of the parameter, with this gradient and with the parameter's attributes."""
    return _shadow_of(parameter.detach(), gradient, parameter)


def _shadow_by(shadow: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> Shadow:
    gradient = parameter.grad
    assert gradient is not None
    return _shadow_of(shadow(parameter), shadow(gradient), parameter)


def _shadow_of(part: torch.Tensor, gradient: torch.Tensor, parameter: torch.Tensor) -> Shadow:
    part.requires_grad_()
    part.grad = gradient
    vars(part).update(vars(parameter))
    return part


def _states_by(shadow: Callable[[torch.Tensor], torch.Tensor], states: States) -> States:
    return {k: shadow(v) if isinstance(v, torch.Tensor) else v for k, v in states.items()}


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Everything but tensors on which the updates of one `step()` depend."""

    kind: type[torch.optim.Optimizer]
    attributes: dict[str, Any]
    grad_enabled: bool
    default_dtype: torch.dtype

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepSettings:
        """Return the settings that hold now, when `step()` runs."""
        own = {k: v for k, v in vars(optimizer).items() if k not in {"state", "param_groups"}}
        own |= copy.deepcopy(trial.extra_attributes(optimizer))
        return cls(type(optimizer), own, torch.is_grad_enabled(), torch.get_default_dtype())

    def with_attributes_of(self, optimizer: torch.optim.Optimizer) -> StepSettings:
        """Return these settings with the attributes that the optimizer has now."""
        now = StepSettings.of(optimizer)
        return StepSettings(now.kind, now.attributes, self.grad_enabled, self.default_dtype)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore these settings in the `with` block. Switch off all modes of the code around the block."""
        before, dtype = set_eval_frame(None), torch.get_default_dtype()
        try:
            with contextlib.ExitStack() as off:
                off.enter_context(torch.inference_mode(False))
                off.enter_context(torch.set_grad_enabled(self.grad_enabled))
                off.enter_context(_disable_current_modes())
                off.enter_context(torch._C.DisableTorchFunction())
                for kind in ("cpu", "cuda"):
                    if torch.is_autocast_enabled(kind):
                        off.enter_context(torch.autocast(kind, enabled=False))
                if dtype != self.default_dtype:
                    torch.set_default_dtype(self.default_dtype)
                yield
        finally:
            if dtype != self.default_dtype:
                torch.set_default_dtype(dtype)
            set_eval_frame(before)


def copy_of_options(group: Group) -> Group:
    """Return a copy of a group's options, which later changes do not reach. It has no parameters."""
    return {name: _copy_of_option(value) for name, value in group.items() if name != "params"}


def _copy_of_option(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return type(value)(map(_copy_of_option, value)) if type(value) in {tuple, list} else copy.copy(value)
    return copy.deepcopy(value) if isinstance(value, dict | set) else value


def updater(
    settings: StepSettings,
    options: Group,
    shadows: Sequence[Shadow],
    states: Sequence[States],
    slices: int = 1,
) -> Callable[[Blocks], None]:
    """Return a function that updates these parameters, whose bytes are in the given blocks.

    Its run leaves all versions unchanged, because they were raised when `step()` ran. A parameter with
    several slices is updated slice by slice.
    """
    tensors = [*shadows, *(v for each in states for v in each.values() if isinstance(v, torch.Tensor))]

    def run(blocks: Blocks) -> None:
        versions = tuple(tensor._version for tensor in tensors)
        with settings.restored():
            in_block = partial(_shadow_in_block, blocks)
            updated = [_shadow_by(in_block, shadow) for shadow in shadows]
            before = [_states_by(in_block, each) for each in states]
            after = [dict(each) for each in before]
            by_shadow = defaultdict(dict, zip(updated, after))
            bucket = Bucket(options, updated, slices)
            stand_in = make_late_stand_in(
                settings.kind, settings.attributes, by_shadow, bucket, slices_of_bucket
            )
            code: Any = settings.kind.step
            try:
                code.__wrapped__(stand_in)
            finally:
                # The stand-in is part of a reference cycle, which would keep the gradients alive.
                vars(stand_in).clear()
                bucket.parameters.clear()
                by_shadow.clear()
        set_versions(tensors, versions)
        for old, new in zip(before, after):
            if old.keys() != new.keys() or any(old[name] is not new[name] for name in old):
                raise ReboundStateError("the update replaced a state, which it did not do in its trial")

    return run


def _shadow_in_block(blocks: Blocks, tensor: torch.Tensor) -> torch.Tensor:
    """Return a shadow of the tensor, in the block that has its bytes. If no block has them, the shadow has
    the tensor's storage."""
    block = blocks.get(tensor.untyped_storage()._cdata)
    if block is None:
        return tensor.detach()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(block, tensor.storage_offset(), tensor.size(), tensor.stride())


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters of these tensors."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def are_modes_plain() -> bool:
    """Return whether no mode is active that could change what an update computes."""
    return not (
        torch.is_inference_mode_enabled()
        or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def has_only_tensor_states(states: dict[str, Any]) -> bool:
    """Return whether each state is None or a plain tensor. Code can read another state unnoticed."""
    return all(value is None or type(value) is torch.Tensor for value in states.values())


# ---- the trial


def reason_against_late_updates(optimizer: torch.optim.Optimizer, seen: trial.Outcome) -> str | None:
    """Return the reason why updates of this optimizer cannot run late. Return None if they can. To find out,
    step clones of its parameters, the later steps one parameter at a time and late."""
    scaled = any(vars(optimizer).get(name) is not None for name in ("grad_scale", "found_inf"))
    reasons = {
        "its updates write to gradients": seen.writes_gradients,
        f"its steps change {', '.join(sorted(seen.counts))}": seen.counts,
        "a GradScaler leaves unscaling and skipping to its kernels": scaled,
        "capturable=True": any(group.get("capturable") for group in optimizer.param_groups),
    }
    if (reason := seen.reason or next((r for r, holds in reasons.items() if holds), None)) is not None:
        return reason
    run: Any = type(optimizer).step
    try:
        whole = trial.run_trial(optimizer, run.__wrapped__)
        late = trial.run_trial(optimizer, _LateTrial().step)
    except Exception as error:  # noqa: BLE001  a third party's step may raise anything on clones
        return f"they could not be tried on clones: {type(error).__name__}: {error}"
    return None if whole.has_same_results(late) else "they give other results there"


class _LateTrial:
    """The steps of a trial on clones. The first step makes the states, as usual. Each later step runs late,
    one parameter after another, in reverse order."""

    def __init__(self) -> None:
        self.has_states = False

    def step(self, clone: Any) -> None:
        kind = type(clone)
        if not self.has_states:
            self.has_states = True
            kind.step.__wrapped__(clone)
            return
        settings = StepSettings.of(clone)
        updates = []
        for group in clone.param_groups:
            options = copy_of_options(group)
            for parameter in group["params"]:
                states = clone.state.get(parameter, {})
                if not has_only_tensor_states(states):
                    raise ReboundStateError("a state is not a tensor")
                shadow = shadow_of(parameter)
                updates.append(updater(settings, options, [shadow], [shadows_of_states(states)]))
        before = copy.deepcopy(trial.extra_attributes(clone)), torch.get_rng_state()
        for update in reversed(updates):
            update({})
        if not is_bitwise_equal(list(before), [trial.extra_attributes(clone), torch.get_rng_state()]):
            raise ReboundStateError("an update changed an attribute, or used random numbers")
