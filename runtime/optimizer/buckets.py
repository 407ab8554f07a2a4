"""An optimizer's step, bucket after bucket: states and gradients of one bucket are there while the others are
away.

    step()                          the optimizer's own code, once, on a stand-in for the optimizer
      for group in param_groups     it gets each group several times, each time with a bucket of parameters
        slot                        all of the bucket is here and plain; the bucket before may leave
        update                      the optimizer's own code
      write back                    what it wrote into the group: the same from each bucket, once

Hooks and closures run where they always do, because the step runs once. What the code does with tensors of
other buckets meanwhile is fetched as for user code. Whether an optimizer may be stepped so is tried on clones
(trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from teraio.errors import UnsupportedError

Group = dict[str, Any]
MISSING = object()


@dataclass(frozen=True, slots=True)
class Bucket:
    group: Group  # the user's own
    parameters: list[torch.Tensor]
    slices: int = 1  # in which its one parameter is stepped


def split_into_buckets(groups: list[Group], limit_bytes: int) -> list[Bucket]:
    """Parameters in their order, as many together as the limit takes; one that is larger is alone. A group
    without parameters is a bucket too: the step may write into it."""
    found: list[Bucket] = []
    for group in groups:
        parameters: list[torch.Tensor] = []
        size_bytes = 0
        for parameter in group["params"]:
            own_bytes = parameter.numel() * parameter.element_size()
            if parameters and size_bytes + own_bytes > limit_bytes:
                found.append(Bucket(group, parameters))
                parameters, size_bytes = [], 0
            parameters.append(parameter)
            size_bytes += own_bytes
        found.append(Bucket(group, parameters))
    return found


class BucketedGroups(list[Group]):
    """The groups as the step sees them. Going through them goes through the buckets; all else is as in the
    optimizer."""

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
                    f"the optimizer wrote {changed} into a group for some of its parameters and {known} for "
                    f"others: it is not stepped per parameter. Load the last checkpoint and train with "
                    f"TERAIO_DISABLE=1, or with another optimizer"
                )
        write_back_group_options(self[:], written)


def write_back_group_options(groups: list[Group], written: dict[int, Group]) -> None:
    """What each bucket of a group wrote into its copy."""
    for group in groups:
        group.update(written.get(id(group), {}))


def is_bitwise_equal(one: Any, other: Any) -> bool:
    """Equal in every bit, however nested."""
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
    """What the step takes for its optimizer: all attributes are the optimizer's own, but its groups come in
    passes over buckets."""
    kind = type(optimizer)
    if kind not in _CLASSES:
        names = {
            "__slots__": ("_teraio_walk",),
            "param_groups": property(_bucketed_groups, _set_param_groups),
        }
        _CLASSES[kind] = type(kind.__name__, (kind,), names)
    made: Any = object.__new__(_CLASSES[kind])
    object.__setattr__(made, "__dict__", optimizer.__dict__)
    made._teraio_walk = walk
    return made


def is_stand_in(optimizer: Any) -> bool:
    return hasattr(type(optimizer), "_teraio_walk")


def _bucketed_groups(self: Any) -> BucketedGroups:
    return BucketedGroups(self.__dict__["param_groups"], self._teraio_walk)


def _set_param_groups(self: Any, groups: list[Group]) -> None:
    self.__dict__["param_groups"] = groups


def named_tensors_in(value: Any, name: str) -> Iterator[tuple[torch.Tensor, str]]:
    """Of an optimizer's state, however nested, with their names."""
    if isinstance(value, torch.Tensor):
        yield value, name
    elif isinstance(value, list | tuple):
        for at, part in enumerate(value):
            yield from named_tensors_in(part, f"{name}.{at}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from named_tensors_in(part, f"{name}.{key}")
