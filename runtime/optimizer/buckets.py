"""Buckets of parameters. The optimizer steps one bucket at a time, so only one bucket's states and gradients
must be resident.

    step()                          the optimizer's own code runs, on a stand-in for the optimizer
      for group in param_groups     the code gets each group several times, each time with one bucket
        before the update           the engine makes the bucket's tensors resident, and may evict the
                                    previous bucket
        update                      the optimizer's own code
      after the loop                the real group gets the options that the code wrote; the code must have
                                    written the same values for every bucket

The step's code runs only once per step, so hooks and closures run as they do without buckets. If the step's
code reads a tensor of another bucket, the engine fetches the tensor on demand. A trial on clones (trial.py)
decides whether an optimizer may be stepped in buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from teraio.errors import UnsupportedError

from ..ledger.shards import local_tensor

Group = dict[str, Any]
MISSING = object()


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one group of an optimizer that are stepped together."""

    group: Group  # the dict in the optimizer's `param_groups`, not a copy
    parameters: list[torch.Tensor]
    slices: int = 1  # number of slices (parts by rows); above 1 only for a bucket with one parameter


def split_into_buckets(groups: list[Group], limit_bytes: int) -> list[Bucket]:
    """Split the groups into buckets of at most `limit_bytes`, in the order of the parameters.

    A parameter of more than `limit_bytes` has a bucket of its own. A group without parameters becomes an
    empty bucket, because the step's code may write options into the group.
    """
    found: list[Bucket] = []
    for group in groups:
        parameters: list[torch.Tensor] = []
        size_bytes = 0
        for parameter in group["params"]:
            own_bytes = local_tensor(parameter).nbytes
            if parameters and size_bytes + own_bytes > limit_bytes:
                found.append(Bucket(group, parameters))
                parameters, size_bytes = [], 0
            parameters.append(parameter)
            size_bytes += own_bytes
        found.append(Bucket(group, parameters))
    return found


class BucketedGroups(list[Group]):
    """A list of the optimizer's groups for the step's code. Iteration yields one item per bucket: a copy of
    the bucket's group that has only the bucket's parameters."""

    def __init__(self, groups: list[Group], walk: Callable[[], Iterator[Bucket]]) -> None:
        super().__init__(groups)
        self.walk = walk

    def __iter__(self) -> Iterator[Group]:
        written: dict[int, Group] = {}
        for bucket in self.walk():
            seen = {**bucket.group, "params": bucket.parameters}
            before = dict(seen)
            yield seen
            changed = {k: v for k, v in seen.items() if k != "params" and v is not before.get(k, MISSING)}
            known = written.setdefault(id(bucket.group), changed)
            if known is not changed and not is_bitwise_equal(known, changed):
                raise UnsupportedError(
                    f"the optimizer wrote {changed} into a group for some parameters and {known} for others: "
                    f"it cannot be stepped in buckets. Load the last checkpoint and train with "
                    f"TERAIO_DISABLE=1, or with another optimizer"
                )
        write_back_group_options(self[:], written)


def write_back_group_options(groups: list[Group], written: dict[int, Group]) -> None:
    """Write options that the step's code has changed into the optimizer's groups. The code changed them in
    copies of the groups. `written` has the changed options by the id of the group."""
    for group in groups:
        group.update(written.get(id(group), {}))


def is_bitwise_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in every bit. The values may be tensors, and nested lists, tuples
    and dicts."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return _tensor_as_bytes(one) == _tensor_as_bytes(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_bitwise_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_bitwise_equal, one, other))
    return bool(one == other) or repr(one) == repr(other) == "nan"


def _tensor_as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


_CLASSES: dict[type, type] = {}


def make_stand_in(optimizer: torch.optim.Optimizer, walk: Callable[[], Iterator[Bucket]]) -> Any:
    """Make a stand-in for the optimizer, on which the step's code runs.

    The stand-in shares all attributes with the optimizer, except `param_groups`. Iteration over the
    stand-in's `param_groups` yields one bucket after another.
    """
    made = _new_stand_in(type(optimizer), walk)
    object.__setattr__(made, "__dict__", optimizer.__dict__)
    return made


def make_late_stand_in(
    kind: type[torch.optim.Optimizer],
    attributes: dict[str, Any],
    states: dict[Any, Any],
    bucket: Bucket,
    split: Callable[[Any, Bucket], Iterator[Bucket]],
) -> Any:
    """Make a stand-in for an optimizer of this class, which shares nothing with an optimizer. It has these
    attributes and states, and one bucket. `split` divides the bucket into slices."""
    made = _new_stand_in(kind, lambda: split(made, bucket))
    own = {**attributes, "state": states, "param_groups": [{**bucket.group, "params": bucket.parameters}]}
    object.__setattr__(made, "__dict__", own)
    return made


def _new_stand_in(kind: type[torch.optim.Optimizer], walk: Callable[[], Iterator[Bucket]]) -> Any:
    if kind not in _CLASSES:
        names = {
            "__slots__": ("_teraio_walk",),
            "param_groups": property(_bucketed_groups, _set_param_groups),
        }
        _CLASSES[kind] = type(kind.__name__, (kind,), names)
    made: Any = object.__new__(_CLASSES[kind])
    made._teraio_walk = walk
    return made


def is_stand_in(optimizer: Any) -> bool:
    return hasattr(type(optimizer), "_teraio_walk")


def _bucketed_groups(self: Any) -> BucketedGroups:
    return BucketedGroups(self.__dict__["param_groups"], self._teraio_walk)


def _set_param_groups(self: Any, groups: list[Group]) -> None:
    self.__dict__["param_groups"] = groups


def named_tensors_in(value: Any, name: str) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors in `value`, a part of an optimizer's state, each with its name. `value` may be a
    nested list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        yield value, name
    elif isinstance(value, list | tuple):
        for at, part in enumerate(value):
            yield from named_tensors_in(part, f"{name}.{at}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from named_tensors_in(part, f"{name}.{key}")
