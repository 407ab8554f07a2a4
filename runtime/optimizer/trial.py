"""A trial on clones, which decides whether an optimizer may be stepped in buckets. A bucket is a small number
of parameters.

The trial steps small clones of a few parameters per group: first all clones together, and then bucket by
bucket. The parameters, states and groups must be equal in every bit after every step. If they are, the
optimizer updates each parameter independently. Only then is the optimizer stepped in buckets. The trial also
measures the memory that an update allocates.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .buckets import Bucket, Group, is_bitwise_equal, make_stand_in, split_into_buckets
from .slices import slices_of_bucket

GROUPS_MAX = 4
EDGE_MAX = 5  # a clone has at most this many elements along each dimension
# A clone in a trial of rows has at most this many elements along each of the first two dimensions. This
# number is larger than EDGE_MAX, because many optimizers treat a matrix as one unit only if it is large.
WIDE_EDGE_MAX = 130
KINDS_MAX = 6  # a trial clones at most this many kinds of parameters per group
# Scales of the gradients, one per step. The scales differ, because some optimizers have another rule for
# large or for small gradients.
SCALES = (4.0, 4.0, 1e-6, 1e6)
# Attributes that every optimizer has, or that other libraries add. None of these attributes takes part in an
# update.
OWN = {"state", "param_groups", "defaults", "step", "_zero_grad_profile_name", "profile_hook_step"}
DECIDES = (bool, str, type(None), int, float)
MISSING = object()
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type(Ellipsis))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial. `born` and `temporaries` are numbers of bytes per byte of parameter. Their
    defaults are the values of Adam."""

    reason: str | None  # why all parameters are stepped together; None: buckets are possible
    born: float = 2.0  # bytes of the states that the first step makes, per byte of parameter
    temporaries: float = 2.0  # bytes of an update's temporary tensors, per byte of parameter
    writes_gradients: bool = True  # True: the update writes to gradients, or could do so unnoticed
    counts: frozenset[str] = frozenset()  # options and attributes that the steps themselves change


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The results of a few optimizer steps on clones of parameters."""

    parameters: list[torch.Tensor]
    left: list[Any]  # after each step: parameters, states, groups, gradients
    random_numbers: torch.Tensor
    wrote_gradients: bool
    counts: frozenset[str]

    def has_same_results(self, other: TrialRun) -> bool:
        return is_bitwise_equal([self.left, self.random_numbers], [other.left, other.random_numbers])


def can_step_by_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer may step a parameter some rows at a time. To find out, step clones of the
    parameters as a whole and in slices, and compare the results."""
    try:
        run = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        whole, parts = (run_trial(optimizer, run, slices, edge=WIDE_EDGE_MAX) for slices in (0, 2))
        return any(p.ndim and p.shape[0] > 1 for p in whole.parameters) and whole.has_same_results(parts)
    except Exception:  # noqa: BLE001  a third party's step may raise anything on clones
        return False


def try_in_buckets(optimizer: torch.optim.Optimizer) -> Outcome:
    if (reason := _reason_against_buckets(optimizer)) is not None:
        return Outcome(reason)
    run = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    try:
        whole = run_trial(optimizer, run)
        parts = run_trial(optimizer, run, 1)
        seen = Allocations()
        # The optimizer may compile its update. `seen` counts only operators that run eagerly, so switch
        # compilation off.
        with torch.compiler.set_stance("force_eager"):
            watched = run_trial(optimizer, run, 1, seen)
    except Exception as error:  # noqa: BLE001  a third party's step may raise anything on clones
        return Outcome(f"it could not be tried on clones: {type(error).__name__}: {error}")
    if not whole.has_same_results(parts):
        return Outcome("its update of one parameter depends on the others")
    wrote = any(tried.wrote_gradients for tried in (whole, parts, watched))
    return Outcome(
        None, seen.born, seen.temporaries, wrote or not _is_torch_optimizer(optimizer), whole.counts
    )


def _is_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether both the optimizer's class and its `step` come from torch.

    For such an optimizer, only the options decide whether the update writes to gradients. So the trial shows
    this reliably. Another optimizer may write to gradients only in later steps, only for some values, or
    without a change of the version counter.
    """
    kind = type(optimizer)
    step: Any = kind.step  # the module of `step` may be another: AdamW inherits Adam's step
    return all(module.startswith("torch.optim.") for module in (kind.__module__, step.__wrapped__.__module__))


def _reason_against_buckets(optimizer: torch.optim.Optimizer) -> str | None:
    """Return a reason why the optimizer cannot be stepped in buckets. Return None if only a trial can find a
    reason."""
    if not hasattr(type(optimizer).step, "__wrapped__"):
        return "its step is not the one that torch wraps"
    for name, value in extra_attributes(optimizer).items():
        if not _is_plain_value(value):
            return f"it keeps more than its groups and states: {name}"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "differentiable=True"
        if len({*map(id, group["params"])}) < len(group["params"]):
            return "a parameter is in a group twice"
    return None


class Allocations(TorchDispatchMode):
    """A torch mode that counts the bytes of the storages that operators have made and that still exist. It
    also has the peak of this count in each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        self.born = self.temporaries = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes())
        return result

    def alive_bytes(self) -> int:
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        return sum(size_bytes for _, size_bytes in self.alive.values())

    def measure_bucket(self, parameters: list[torch.Tensor], before: int) -> int:
        """Measure the bytes of the states and temporaries of the bucket that was stepped last. Return the
        number of bytes of storages that exist now."""
        after = self.alive_bytes()
        own = sum(parameter.nbytes for parameter in parameters)
        if own:
            self.born = max(self.born, (after - before) / own)
            self.temporaries = max(self.temporaries, (self.peak_bytes - after) / own)
        self.peak_bytes = after
        return after


def extra_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in OWN and not (name.startswith("_optimizer_") and "hooks" in name)
    }


def _is_plain_value(value: Any) -> bool:
    """Return whether the value consists only of numbers, names, functions, and tensors of one element. The
    value may be nested. One-element tensors are allowed, because a GradScaler sets them as attributes."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= 1
    if isinstance(value, dict):
        return all(_is_plain_value(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain_value, value))
    return isinstance(value, PLAIN) or (callable(value) and not hasattr(value, "__self__"))


def run_trial(
    optimizer: torch.optim.Optimizer,
    run: Callable[..., Any],
    slices: int = 0,
    seen: Allocations | None = None,
    edge: int = EDGE_MAX,
) -> TrialRun:
    """Run some steps on clones of the parameters. Return the parameters, states, groups and random state
    after these steps.

    `slices` is the number of slices per parameter. With 1, one whole parameter is stepped at a time. With 0,
    all parameters are stepped together.
    """
    clone = object.__new__(type(optimizer))
    vars(clone).update({**vars(optimizer), **copy.deepcopy(extra_attributes(optimizer))})
    with torch.random.fork_rng(devices=_cuda_devices_of(optimizer)), _restore_random_states():
        torch.manual_seed(0)
        groups = [_clone_group(group, edge) for group in optimizer.param_groups[:GROUPS_MAX]]
        vars(clone).update(state=defaultdict(dict), param_groups=groups, step=None)
        del vars(clone)["step"]

        def iterate_buckets() -> Iterator[Bucket]:
            alive = seen.alive_bytes() if seen is not None else 0
            for bucket in split_into_buckets(groups, 0):
                rows = bucket.parameters[0].shape[:1].numel() if bucket.parameters else 1
                cut = Bucket(bucket.group, bucket.parameters, min(slices, max(rows, 1)))
                with seen or nullcontext():
                    yield from slices_of_bucket(clone, cut)
                if seen is not None:
                    alive = seen.measure_bucket(bucket.parameters, alive)

        subject = make_stand_in(clone, iterate_buckets) if slices else clone
        parameters = [parameter for group in groups for parameter in group["params"]]
        wrote, left, before = False, [], _deciding_options(clone)
        for scale in SCALES:
            for parameter in parameters:
                parameter.grad = _scale_fitting_dtype(scale, parameter.dtype) * torch.randn_like(parameter)
            given = [parameter.grad.clone() for parameter in parameters]
            run(subject)
            wrote |= not is_bitwise_equal(given, [parameter.grad for parameter in parameters])
            gradients = [parameter.grad for parameter in parameters]
            states = [clone.state.get(parameter, {}) for parameter in parameters]
            outside = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            left.append(_clone_tensors_in([parameters, states, outside, gradients]))
        counts = {
            name
            for one, other in zip(before, _deciding_options(clone))
            for name in one.keys() | other.keys()
            if one.get(name, MISSING) != other.get(name, MISSING)
        }
        return TrialRun(parameters, left, torch.get_rng_state(), wrote, frozenset(counts))


def _deciding_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the attributes and options that may decide how the optimizer computes its update."""
    about = (extra_attributes(optimizer), *optimizer.param_groups)
    return [{k: value for k, value in each.items() if isinstance(value, DECIDES)} for each in about]


def trial_key(optimizer: torch.optim.Optimizer, counts: frozenset[str]) -> tuple[Any, ...]:
    """Return the options and attributes on which the result of a trial depends. A number is replaced by True
    or False: whether it is not zero. Names in `counts` are left out, because the optimizer's own steps change
    their values."""
    return tuple(
        tuple((name, _value_as_switch(value)) for name, value in about.items() if name not in counts)
        for about in _deciding_options(optimizer)
    )


def _value_as_switch(value: Any) -> Any:
    """Return a string or None unchanged. Return True for any other value that is not zero, otherwise
    False."""
    return value if value is None or isinstance(value, str) else bool(value)


def _clone_tensors_in(value: Any) -> Any:
    """Return a copy of the value in which all tensors are clones."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _clone_tensors_in(part) for key, part in value.items()}
    return type(value)(map(_clone_tensors_in, value)) if type(value) in {list, tuple} else value


def _scale_fitting_dtype(wanted: float, dtype: torch.dtype) -> float:
    """Return `wanted`, or a smaller scale if the square of `wanted` is too large for the type."""
    return min(wanted, torch.finfo(dtype).max ** 0.5 / 64)


@contextmanager
def _restore_random_states() -> Iterator[None]:
    """Restore the random states of Python and numpy after the `with` block. A trial must not change the
    user's next random numbers."""
    numpy: Any = sys.modules.get("numpy")
    mine = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(mine[0])
        if numpy:
            numpy.random.set_state(mine[1])


def _cuda_devices_of(optimizer: torch.optim.Optimizer) -> list[torch.device]:
    found = {p.device for group in optimizer.param_groups for p in group["params"]}
    return [device for device in found if device.type == "cuda"]


def _clone_group(group: Group, edge: int) -> Group:
    """Clone a group of an optimizer. The clone has small parameters: one for each kind of parameter in the
    group."""
    made = [_small_parameter_like(parameter, edge) for parameter in _one_parameter_per_kind(group["params"])]
    return {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": made}


def _one_parameter_per_kind(own: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one parameter of each kind, and also the last parameter. Parameters of one kind have the same
    number of dimensions, type, device and plain attributes."""
    found: dict[Any, torch.Tensor] = {}
    for parameter in own:
        marks = sorted((name, repr(value)) for name, value in _plain_attributes(parameter).items())
        found.setdefault((parameter.ndim, parameter.dtype, parameter.device, *marks), parameter)
    return [*[*found.values()][:KINDS_MAX], *own[-1:]]


def _small_parameter_like(parameter: torch.Tensor, edge: int) -> torch.nn.Parameter:
    edges = [edge - at if at < 2 else max(EDGE_MAX - at, 1) for at in range(parameter.ndim)]
    sizes = [min(size, most) for size, most in zip(parameter.shape, edges)]
    made = torch.nn.Parameter(torch.randn(sizes, dtype=parameter.dtype, device=parameter.device))
    vars(made).update(_plain_attributes(parameter))
    return made


def _plain_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the parameter's attributes with plain values. Users set such attributes for an optimizer to
    read."""
    return {name: value for name, value in vars(parameter).items() if _is_plain_value(value)}
