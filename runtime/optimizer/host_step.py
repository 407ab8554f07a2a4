"""The optimizer's step on the host. torch's fused CPU kernels update weights and states in place, in host
memory.

    gradient    is read in host memory; a gradient on the device is first copied to host memory
    states      are only in host memory, and are updated in place
    weight      its copy in host memory is updated in place; if the weight is also resident on the device, the
                device then gets the new bytes

In each step, the gradients are copied to the host, and the weights are copied to the device. A step on the
device would move all states in both directions.

Only torch's own optimizers with fused CPU kernels are stepped on the host. Their own code runs on CPU
tensors, and it is known which tensors the code reads and writes. A bucket (parameters that are stepped
together) with unusual tensors is stepped on the device. The first step always runs on the device, because it
makes the states.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import _unsafe_preserve_version_counter

from ..eager.user_code import UserCode
from ..engine.engine import Engine
from ..ledger.record import HOST, Record, State
from ..ledger.residency import Residency
from ..ledger.shards import is_shard

log = logging.getLogger("teraio")

OWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
Pair = tuple[torch.Tensor, torch.Tensor]  # (tensor on the device, its twin in host memory)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def reason_against_host_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the reason why this optimizer must be stepped on the device. Return None if it may be stepped on
    the host."""
    if type(optimizer) not in OWN:
        names = ", ".join(kind.__name__ for kind in OWN)
        return f"torch has fused CPU kernels only for these classes, not for subclasses: {names}"
    if any(vars(optimizer).get(name) is not None for name in ("grad_scale", "found_inf")):
        return "a GradScaler leaves unscaling and skipping to the fused kernels of the device"
    for group in optimizer.param_groups:
        if any(map(is_shard, group["params"])):
            return "its parameters are shards (DTensor)"
        for name in ("capturable", "differentiable"):
            if group.get(name):
                return f"{name}=True"
        for name, value in group.items():
            if name not in {"lr", "initial_lr", "params"} and any(
                isinstance(v, torch.Tensor) for v in _as_list(value)
            ):
                return f"{name} is a tensor"
    return None


def set_host_buckets(engine: Engine, kernels: Collection[str] | None = None) -> None:
    """Step the buckets in `kernels` on the host from now on. `kernels` has names of buckets, which are
    parameters that are stepped together. None means all buckets of the engine's optimizers."""
    _STEPS[engine] = HostStep(engine.residency, engine.user, kernels)


def host_step_of(engine: Engine) -> HostStep | None:
    """Return the engine's HostStep, or None if the engine's optimizers step on the device only."""
    return _STEPS.get(engine)


class HostStep:
    """The steps of optimizers on the host. The engine has host memory as a tier beside its device."""

    def __init__(self, residency: Residency, user: UserCode, kernels: Collection[str] | None = None) -> None:
        self.residency, self.user = residency, user
        self.kernels = kernels  # the host steps the buckets with these names; None: all buckets
        self.could: set[str] = set()  # names of the buckets that the host can step
        self.reported: set[str] = set()

    def can_step_optimizer(self, optimizer: torch.optim.Optimizer, reason: str | None = None) -> bool:
        """Return whether the host may step parameters of this optimizer. If not, log why. `reason` is a
        reason against the host that the caller has found, or None."""
        if (reason := reason or reason_against_host_step(optimizer)) is not None:
            self.log_once(f"{type(optimizer).__name__} steps on the device: {reason}")
        return reason is None

    def is_host_bucket(
        self,
        kernel: str,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
    ) -> bool:
        """Return whether the host steps this bucket. The bucket's states and gradients must have the types,
        layouts and memory that torch itself gives them. `kernel` is the bucket's name."""
        if not parameters or not all(optimizer.state.get(parameter) for parameter in parameters):
            return False  # the first step, which makes the states, or an empty bucket
        with DisableTorchFunctionSubclass():
            named = all({*optimizer.state[p]} == _expected_state_names(optimizer, group) for p in parameters)
            usual = (
                named
                and all(_fits_fused_kernel(p, optimizer.state[p]) for p in parameters)
                and _has_separate_storages(
                    [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
                )
            )
        if not usual:
            self.log_once(
                f"{type(optimizer).__name__} steps a part of its parameters on the device: their states or "
                "gradients have other types, layouts or memory than torch gives them"
            )
            return False
        self.could.add(kernel)
        return self.kernels is None or kernel in self.kernels

    def step_bucket(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        after: Sequence[torch.Tensor],
    ) -> None:
        """Step these parameters on the host. `after` has the parameters of the next bucket. During the step,
        the gradients of these next parameters are evicted to host memory."""
        loans = HostTwins(self.residency, self.user)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            try:
                twins = [loans.make_parameter_twin(parameter) for parameter in parameters]
                states = [loans.make_state_twins(optimizer.state[parameter]) for parameter in parameters]
                # Before the step, all copies to and from host memory must have ended.
                self.residency.mover.device.wait_until_idle()
                self._evict_next_gradients(after)
                _run_step_on_twins(optimizer, group, twins, states)
            finally:
                loans.copy_results_back()
        if loans.full:
            self.log_once(
                "host memory is full: tensors stepped on the host are copied to it and back in each step"
            )

    def _evict_next_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            record = None if gradient is None else self.residency.evictable_record_of(gradient)
            if record is None or record.state is not State.RESIDENT or self.residency.in_use(record):
                continue
            if not self.user.must_be_resident(record) and self.residency.mover.reserve_host_place(record):
                self.residency.try_evict(record, HOST)

    def log_once(self, what: str) -> None:
        """Log a message, unless the same message was logged before. The level is warning if the user chose
        steps on the host, otherwise info."""
        if what not in self.reported:
            self.reported.add(what)
            log.log(logging.WARNING if self.kernels is None else logging.INFO, "teraio: %s", what)


class HostTwins:
    """Twins of a bucket's tensors. A twin is a tensor in host memory that replaces a tensor of the device
    while the host steps the bucket."""

    def __init__(self, residency: Residency, user: UserCode) -> None:
        self.residency, self.user, self.mover = residency, user, residency.mover
        # Pairs (tensor, twin) for tensors without a place in host memory. After the step, the twin's bytes
        # are copied to the tensor.
        self.copies: list[Pair] = []
        # Triples (tensor, twin, record) for tensors that are resident on the device and have a copy in host
        # memory. The twin is this copy. After the step, its bytes are copied to the tensor.
        self.renewed: list[tuple[torch.Tensor, torch.Tensor, Record]] = []
        self.full = False

    def make_parameter_twin(self, parameter: torch.Tensor) -> torch.Tensor:
        """Make the twin of a parameter: a parameter in host memory that replaces it during the step. The twin
        has a gradient, which the step only reads."""
        record = self._exclusive_record(parameter)
        own = None
        if record is not None:
            own = self._view_if_only_on_host(record, parameter)
            own = own if own is not None else self._copy_to_host_place(record, parameter)
        twin = torch.nn.Parameter(
            own if own is not None else self._copy_for_write_back(parameter), parameter.requires_grad
        )
        gradient = parameter.grad
        assert gradient is not None
        grad_record = self.residency.evictable_record_of(gradient)
        if grad_record is not None and grad_record.state is State.EVICTING:
            self.mover.end_evict(grad_record)
        twin.grad = None if grad_record is None else self._view_if_only_on_host(grad_record, gradient)
        if twin.grad is None:
            twin.grad = self._copy_to_scratch(gradient)
        return twin

    def make_state_twins(self, states: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._make_state_twin(value) if isinstance(value, torch.Tensor) else value
            for name, value in states.items()
        }

    def _make_state_twin(self, state: torch.Tensor) -> torch.Tensor:
        record = self._exclusive_record(state)
        if record is None:
            return self._copy_for_write_back(state)
        own = self._view_if_only_on_host(record, state)
        if own is None:
            if not self._reserve_host_place(record):
                return self._copy_for_write_back(state)
            if self.residency.try_evict(record, HOST):
                self.mover.end_evict(record)
            own = self._view_if_only_on_host(record, state)
        return own if own is not None else self._copy_for_write_back(state)

    def _exclusive_record(self, tensor: torch.Tensor) -> Record | None:
        """Return the tensor's record, or None if the host may not change the record's bytes.

        The tensor must cover all bytes of the record. The record must be evictable, and no pin may keep it
        resident.
        """
        record = self.residency.evictable_record_of(tensor)
        if record is None or record.pins or record.size_bytes != tensor.nbytes:
            return None
        return None if self.user.must_be_resident(record) else record

    def _view_if_only_on_host(self, record: Record, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor over the record's bytes in host memory. Return None unless the record is evicted to
        host memory. Also return None if scalings of the record are owed, because they run after a fetch."""
        only_on_host = record.state is State.EVICTED and record.place is not None
        observer = self.mover.device.observer
        if observer is not None and observer.owes_scalings(record.key):
            return None
        return _tensor_at_place(record.place, tensor) if only_on_host else None

    def _copy_to_host_place(self, record: Record, parameter: torch.Tensor) -> torch.Tensor | None:
        """Reserve a place in host memory for the parameter, and copy the parameter's bytes to this place if
        the place lacks them. Return a tensor over the place, or None if host memory is full."""
        if not self._reserve_host_place(record):
            return None
        own = _tensor_at_place(record.place, parameter)
        if not self.mover.is_clean(record):
            self.mover.counts.add(to_host_bytes=record.size_bytes)
            own.copy_(parameter)
            self.mover.mark_host_copy_clean(record)
        record.pin()  # a pinned record also keeps its place in host memory
        self.renewed.append((parameter, own, record))
        return own

    def _reserve_host_place(self, record: Record) -> bool:
        """Fetch the record's bytes to the device, and reserve a place for them in host memory. Return False
        if host memory is full."""
        self._fetch_to_device(record)
        has = self.mover.reserve_host_place(record)
        self.full |= not has
        return has

    def _copy_for_write_back(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self._copy_to_scratch(tensor)
        self.copies.append((tensor, copied))
        return copied

    def _copy_to_scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        record = self.residency.evictable_record_of(tensor)
        if record is not None:
            self._fetch_to_device(record)
        pinned = self.mover.device.kind == "cuda"
        self.mover.counts.add(to_host_bytes=tensor.nbytes)
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return copied.copy_(tensor.detach())

    def _fetch_to_device(self, record: Record) -> None:
        self.residency.make_resident_within_budget([record], 0, f"a step on the host of {record.name}", None)

    def copy_results_back(self) -> None:
        for tensor, own in self.copies:
            self._copy_twin_back(tensor, own)
            if (record := self.residency.evictable_record_of(tensor)) is not None:
                record.wrote()
        for tensor, own, record in self.renewed:
            self._copy_twin_back(tensor, own)
            record.unpin()
            self.mover.mark_host_copy_clean(record)

    def _copy_twin_back(self, tensor: torch.Tensor, own: torch.Tensor) -> None:
        """Copy the twin's bytes to its tensor on the device. Do not change the tensor's version counter,
        because fused kernels do not change it either. So a graph that saved the tensor remains valid."""
        with _unsafe_preserve_version_counter(tensor):
            tensor.detach().copy_(own.detach(), non_blocking=True)
        self.mover.counts.add(from_host_bytes=tensor.nbytes)


def _run_step_on_twins(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    twins: list[torch.Tensor],
    states: list[dict[str, Any]],
) -> None:
    """Run the optimizer's own step on twins: tensors in host memory that replace the tensors of a bucket. Do
    not run the step's hooks."""
    stand = object.__new__(type(optimizer))
    lr = group["lr"]
    own = {
        **group,
        "params": twins,
        "lr": lr.item() if isinstance(lr, torch.Tensor) else lr,
        "fused": True,
        "foreach": False,
    }
    state = defaultdict(dict, zip(twins, states))
    vars(stand).update({**vars(optimizer), "state": state, "param_groups": [own]})
    vars(stand).pop("step", None)  # a scheduler may have put a wrapper around `step`
    type(optimizer).step.__wrapped__(stand)  # type: ignore[attr-defined]


def _tensor_at_place(place: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the bytes at `place` in host memory, with the type, shape and offset of
    `tensor`."""
    size_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    held: Any = ctypes.c_char * size_bytes
    flat = torch.frombuffer(held.from_address(place.address), dtype=tensor.dtype)
    return flat[tensor.storage_offset() :].view(tensor.shape)


def _expected_state_names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Return the names of the states that a parameter has after its first step. Later steps make no other
    states."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if group["momentum"] else set()
    if isinstance(optimizer, torch.optim.Adagrad):
        return {"step", "sum"}
    return {"step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])}


def _parameter_sized_states(parameter: torch.Tensor, states: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in states.values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]


def _fits_fused_kernel(parameter: torch.Tensor, states: dict[str, Any]) -> bool:
    """Return whether torch's fused CPU kernel can update this parameter. Its tensors must be plain,
    contiguous and of one type. Fused kernels use bare addresses, so they do not check this themselves."""
    gradient = parameter.grad
    large = _parameter_sized_states(parameter, states)
    small = [v for v in states.values() if not any(v is one for one in large)]
    if gradient is None or not large or type(parameter) is not torch.nn.Parameter:
        return False
    kinds = {type(tensor) for tensor in (gradient, *large)}
    return (
        kinds == {torch.Tensor}
        and parameter.dtype in DTYPES
        and gradient.shape == parameter.shape
        and all(_is_contiguous_like(tensor, parameter) for tensor in (parameter, gradient, *large))
        and all(type(v) is torch.Tensor and v.numel() == 1 and not v.is_complex() for v in small)
    )


def _has_separate_storages(tensors: Sequence[Any]) -> bool:
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)


def _is_contiguous_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _as_list(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


_STEPS: WeakKeyDictionary[Engine, HostStep] = WeakKeyDictionary()
