"""Slices of a parameter. A slice is some of its rows. A parameter is stepped in slices if the parameter and
its update do not fit in the budget together.

The optimizer's own code gets views of the parameter, its gradient and its states, slice after slice. Slices
are correct only if the optimizer updates each element independently of all others. A trial on clones
(trial.py) decides whether this is true. Slices are used only if no split into whole parameters fits in the
budget.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..ledger.shards import is_shard, local_tensor
from .buckets import Bucket, Group, named_tensors_in

States = Mapping[torch.Tensor, Any]  # the attribute `state` of an optimizer


def split_into_slices(
    groups: list[Group], limit_bytes: int, states: States = MappingProxyType({})
) -> list[Bucket]:
    """Return one bucket per parameter. Divide a large parameter into slices of about `limit_bytes`, with at
    least one row each."""
    found = []
    for group in groups:
        for parameter in group["params"]:
            rows = parameter.shape[0] if parameter.ndim and _can_slice(parameter, states) else 1
            slices = min(rows, -(-local_tensor(parameter).nbytes // limit_bytes))
            found.append(Bucket(group, [parameter], max(slices, 1)))
        if not group["params"]:
            found.append(Bucket(group, []))
    return found


def _can_slice(parameter: torch.Tensor, states: States) -> bool:
    """Return whether the parameter can be divided by rows.

    There are four conditions. (1) The parameter is no shard. (2) Each state of the parameter has the
    parameter's shape, or at most one element. (3) No attribute of the parameter is a tensor, such as a mask.
    (4) The gradient is not sparse.
    """
    if is_shard(parameter) or (parameter.grad is not None and parameter.grad.layout != torch.strided):
        return False
    beside = [*named_tensors_in([*vars(parameter).values()], "")]
    own = [tensor for tensor, _ in named_tensors_in(states.get(parameter, {}), "")]
    return not beside and all(state.shape == parameter.shape or state.numel() <= 1 for state in own)


def largest_slice_bytes(bucket: Bucket) -> int:
    """Return the number of bytes of the bucket's largest slice."""
    (parameter,) = bucket.parameters
    return _rows_per_slice(parameter, bucket.slices) * (parameter.nbytes // parameter.shape[0])


def slices_of_bucket(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[Bucket]:
    """Yield the buckets that the step's code gets for `bucket`. If `bucket` has several slices and a
    gradient, yield one bucket per slice. Otherwise yield `bucket` itself."""
    if bucket.slices == 1 or bucket.parameters[0].grad is None:
        yield bucket
        return
    (parameter,) = bucket.parameters
    rows = _rows_per_slice(parameter, bucket.slices)
    states: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
    made: dict[str, Any] = {}
    # One update of the whole parameter raises versions as much as the update of the first slice.
    versions: dict[str, int] = {}
    version_of_parameter = None
    for first in range(0, parameter.shape[0], rows):
        here = slice(first, first + rows)
        part = parameter.detach()[here].requires_grad_()
        part.grad = parameter.grad.detach()[here]  # type: ignore[union-attr]
        vars(part).update(vars(parameter))
        if states:
            optimizer.state[part] = {
                name: _state_of_slice(state, parameter, here) for name, state in states.items()
            }
        yield Bucket(bucket.group, [part])
        for name, state in optimizer.state.pop(part, {}).items():
            whole = states.get(name, made.get(name))
            if isinstance(state, torch.Tensor) and name not in versions:
                versions[name] = _version_of_whole_state(whole, state, part)
            made[name] = _join_slice_state(whole, state, parameter, part, here)
        if version_of_parameter is None:
            version_of_parameter = parameter._version
    counted = [(whole, versions[name]) for name, whole in made.items() if name in versions]
    tensors, numbers = zip((parameter, version_of_parameter), *counted)
    torch._C._autograd._unsafe_set_version_counter(tensors, numbers)
    if made:
        optimizer.state[parameter] = made


def _version_of_whole_state(whole: Any, state: torch.Tensor, part: torch.Tensor) -> int:
    """Return the version that the whole state has after the update, from the state of the first slice.
    `whole` is None if the update has made the state.

    A state of the parameter's shape shares its version with its slices. Of any other state, a slice has a
    copy, whose version begins at 0.
    """
    if whole is None or state.shape == part.shape:
        return int(state._version)
    return int(whole._version + state._version)


def _rows_per_slice(parameter: torch.Tensor, slices: int) -> int:
    return int(-(-parameter.shape[0] // slices))


def _state_of_slice(state: Any, parameter: torch.Tensor, here: slice) -> Any:
    """Return the state for one slice of the parameter. If the state has the parameter's shape, return the
    slice's rows of the state.

    Return a copy of any other state, such as a count of steps. So each slice has a state of its own.
    """
    if isinstance(state, torch.Tensor) and state.shape == parameter.shape:
        return state[here]
    return state.clone() if isinstance(state, torch.Tensor) else copy.copy(state)


def _join_slice_state(
    whole: Any, state: Any, parameter: torch.Tensor, part: torch.Tensor, here: slice
) -> Any:
    """Write the state of one slice into `whole`, the state of the whole parameter. Return the state of the
    whole parameter."""
    if not isinstance(state, torch.Tensor):
        return state
    if state.shape == part.shape:
        if whole is None:  # the parameter had no such state before this step
            whole = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=state.dtype, device=state.device
            )
        if whole[here].data_ptr() != state.data_ptr():
            whole[here].copy_(state)
        return whole
    if isinstance(whole, torch.Tensor) and here.start + part.shape[0] == parameter.shape[0]:
        return whole.copy_(state)
    return state if whole is None else whole
