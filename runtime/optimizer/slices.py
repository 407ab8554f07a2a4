"""Slices of a parameter. A slice is some rows. A parameter is stepped in slices if it does not fit in the
budget together with its update.

The optimizer's own code gets views of the parameter, its gradient and its states, slice after slice. This
requires that the optimizer updates each element independently of all others. A trial on clones (trial.py)
decides whether this is true. Slices are used only if no other split fits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from .buckets import Bucket, Group, named_tensors_in

States = Mapping[torch.Tensor, Any]  # the `state` of an optimizer


def split_into_slices(
    groups: list[Group], limit_bytes: int, states: States = MappingProxyType({})
) -> list[Bucket]:
    """Return one bucket per parameter. A bucket with a large parameter is stepped in several slices, of about
    `limit_bytes` but at least one row each."""
    found = []
    for group in groups:
        for parameter in group["params"]:
            rows = parameter.shape[0] if parameter.ndim and _can_slice(parameter, states) else 1
            slices = min(rows, -(-parameter.nbytes // limit_bytes))
            found.append(Bucket(group, [parameter], max(slices, 1)))
        if not group["params"]:
            found.append(Bucket(group, []))
    return found


def _can_slice(parameter: torch.Tensor, states: States) -> bool:
    """Return whether the parameter can be cut by rows.

    There are two conditions. (1) Each state of the parameter has the same shape, or at most one element. (2)
    No attribute of the parameter is a tensor, such as a mask.
    """
    beside = [*named_tensors_in([*vars(parameter).values()], "")]
    own = [tensor for tensor, _ in named_tensors_in(states.get(parameter, {}), "")]
    return not beside and all(state.shape == parameter.shape or state.numel() <= 1 for state in own)


def largest_slice_bytes(bucket: Bucket) -> int:
    """Return the number of bytes of the bucket's largest slice."""
    (parameter,) = bucket.parameters
    return _rows_per_slice(parameter, bucket.slices) * (parameter.nbytes // parameter.shape[0])


def slices_of_bucket(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[Bucket]:
    """Yield the bucket as the step's code gets it. If the bucket has several slices and a gradient, yield it
    slice by slice, otherwise whole."""
    if bucket.slices == 1 or bucket.parameters[0].grad is None:
        yield bucket
        return
    (parameter,) = bucket.parameters
    rows = _rows_per_slice(parameter, bucket.slices)
    states: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
    made: dict[str, Any] = {}
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
            made[name] = _join_slice_state(whole, state, parameter, part, here)
    if made:
        optimizer.state[parameter] = made


def _rows_per_slice(parameter: torch.Tensor, slices: int) -> int:
    return int(-(-parameter.shape[0] // slices))


def _state_of_slice(state: Any, parameter: torch.Tensor, here: slice) -> Any:
    """Return the state of one slice. If the state has the parameter's shape, return the slice's rows of the
    state.

    For any other state, such as a count of steps, return a copy, so that each slice has a state of its own.
    """
    if isinstance(state, torch.Tensor) and state.shape == parameter.shape:
        return state[here]
    return state.clone() if isinstance(state, torch.Tensor) else copy.copy(state)


def _join_slice_state(
    whole: Any, state: Any, parameter: torch.Tensor, part: torch.Tensor, here: slice
) -> Any:
    """Write this slice's state into the parameter's state `whole`, and return the result."""
    if not isinstance(state, torch.Tensor):
        return state
    if state.shape == part.shape:
        if whole is None:  # this step made the state
            whole = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=state.dtype, device=state.device
            )
        if whole[here].data_ptr() != state.data_ptr():
            whole[here].copy_(state)
        return whole
    if isinstance(whole, torch.Tensor) and here.start + part.shape[0] == parameter.shape[0]:
        return whole.copy_(state)
    return state if whole is None else whole
