"""A parameter that cannot be stepped whole, with what its update holds besides: some of its rows at a time.

The optimizer's own code gets views of the parameter, its gradient and its states, slice after slice. Only for
optimizers whose update of an element depends on that element alone, which is tried on clones (trial.py); and
only where nothing else fits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from .buckets import Bucket, Group, named_tensors_in

States = Mapping[torch.Tensor, Any]  # of an optimizer


def split_into_slices(
    groups: list[Group], limit_bytes: int, states: States = MappingProxyType({})
) -> list[Bucket]:
    """Each parameter alone, the larger ones in slices of so many bytes, or of a row."""
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
    """Whether nothing that it has is of several rows at once, such as a factor, or a mask."""
    beside = [*named_tensors_in([*vars(parameter).values()], "")]
    own = [tensor for tensor, _ in named_tensors_in(states.get(parameter, {}), "")]
    return not beside and all(state.shape == parameter.shape or state.numel() <= 1 for state in own)


def largest_slice_bytes(bucket: Bucket) -> int:
    """Of the largest slice."""
    (parameter,) = bucket.parameters
    return _rows_per_slice(parameter, bucket.slices) * (parameter.nbytes // parameter.shape[0])


def slices_of_bucket(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[Bucket]:
    """What the step's code gets of a bucket."""
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
    """Of a state with as many elements as the parameter the same rows; each slice has its own of others, such
    as a count of steps."""
    if isinstance(state, torch.Tensor) and state.shape == parameter.shape:
        return state[here]
    return state.clone() if isinstance(state, torch.Tensor) else copy.copy(state)


def _join_slice_state(
    whole: Any, state: Any, parameter: torch.Tensor, part: torch.Tensor, here: slice
) -> Any:
    """The parameter's own state, with what became of it for this slice."""
    if not isinstance(state, torch.Tensor):
        return state
    if state.shape == part.shape:
        if whole is None:  # made by this step
            whole = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=state.dtype, device=state.device
            )
        if whole[here].data_ptr() != state.data_ptr():
            whole[here].copy_(state)
        return whole
    if isinstance(whole, torch.Tensor) and here.start + part.shape[0] == parameter.shape[0]:
        return whole.copy_(state)
    return state if whole is None else whole
