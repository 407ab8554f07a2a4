"""The optimizer's step on the host: where the states are, by torch's fused kernels for the CPU.

    gradient    read in host memory if it is there, else copied there
    states      their copies in host memory are the only ones, and are stepped in place
    weight      its copy in host memory is stepped in place, and copied to the device if it is there, too

So one gradient goes down and one weight comes up, where a step on the device takes all states both ways. Only
torch's own optimizers that have such kernels are stepped so, and by nothing but their own code, on CPU
tensors: what that reads and writes is known. A bucket with anything unusual in it is stepped on the device,
and so is the first step, which makes the states.
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

log = logging.getLogger("teraio")

OWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
Pair = tuple[torch.Tensor, torch.Tensor]  # of the device, and what stands for it on the host

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def reason_against_host_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the steps of this optimizer stay on the device."""
    if type(optimizer) not in OWN:
        names = ", ".join(kind.__name__ for kind in OWN)
        return f"torch has fused kernels for the CPU of these alone, themselves: {names}"
    if any(vars(optimizer).get(name) is not None for name in ("grad_scale", "found_inf")):
        return "a GradScaler leaves its work to the fused kernels of the device"
    for group in optimizer.param_groups:
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
    """Step these buckets of the engine's optimizers on the host from now on. None: all buckets."""
    _STEPS[engine] = HostStep(engine.residency, engine.user, kernels)


def host_step_of(engine: Engine) -> HostStep | None:
    """Return what steps this engine's optimizers on the host, if something does."""
    return _STEPS.get(engine)


class HostStep:
    """Of one engine, beside whose device there is host memory."""

    def __init__(self, residency: Residency, user: UserCode, kernels: Collection[str] | None = None) -> None:
        self.residency, self.user = residency, user
        self.kernels = kernels  # of the buckets that it takes; None: of all
        self.could: set[str] = set()  # take these
        self.said: set[str] = set()

    def can_step_optimizer(self, optimizer: torch.optim.Optimizer, reason: str | None = None) -> bool:
        """Whether it may step some of the optimizer's parameters; the caller may have a reason against it."""
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
        """All of its tensors are what torch's own code makes of them."""
        if not parameters or not all(optimizer.state.get(parameter) for parameter in parameters):
            return False  # the first step, or nothing to step
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
        """Of these parameters; gradients of those that come after them begin to leave meanwhile."""
        loans = HostTwins(self.residency, self.user)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            try:
                twins = [loans.make_parameter_twin(parameter) for parameter in parameters]
                states = [loans.make_state_twins(optimizer.state[parameter]) for parameter in parameters]
                # What is copied to and from the places has arrived.
                self.residency.mover.device.wait_until_idle()
                self._evict_next_gradients(after)
                _run_step_on_twins(optimizer, group, twins, states)
            finally:
                loans.copy_results_back()
        if loans.full:
            self.log_once(
                "host memory is full: what is stepped on the host is copied there and back each time"
            )

    def _evict_next_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            record = None if gradient is None else self.residency.evictable_record_of(gradient)
            if record is None or record.state is not State.DEVICE or self.residency.in_use(record):
                continue
            if not self.user.must_be_resident(record) and self.residency.mover.reserve_host_place(record):
                self.residency.begin_evict_if_resizable(record, HOST)

    def log_once(self, what: str) -> None:
        """Aloud where the host was asked for."""
        if what not in self.said:
            self.said.add(what)
            log.log(logging.WARNING if self.kernels is None else logging.INFO, "teraio: %s", what)


class HostTwins:
    """What stands on the host for tensors of the device while they are stepped there."""

    def __init__(self, residency: Residency, user: UserCode) -> None:
        self.residency, self.user, self.mover = residency, user, residency.mover
        self.copies: list[Pair] = []  # of what has no place in host memory: to be copied back
        # Of what has one, and is on the device, too.
        self.renewed: list[tuple[torch.Tensor, torch.Tensor, Record]] = []
        self.full = False

    def make_parameter_twin(self, parameter: torch.Tensor) -> torch.Tensor:
        """With its gradient, which nothing writes."""
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
        away = self.residency.evictable_record_of(gradient)
        if away is not None and away.state is State.LEAVING:
            self.mover.end_evict(away)
        twin.grad = None if away is None else self._view_if_only_on_host(away, gradient)
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
            self.residency.begin_evict_if_resizable(record, HOST)
            if record.state is State.LEAVING:
                self.mover.end_evict(record)
            own = self._view_if_only_on_host(record, state)
        return own if own is not None else self._copy_for_write_back(state)

    def _exclusive_record(self, tensor: torch.Tensor) -> Record | None:
        """All of these bytes are the tensor's, and nobody else reaches them."""
        record = self.residency.evictable_record_of(tensor)
        if record is None or record.pins or record.size_bytes != tensor.nbytes:
            return None
        return None if self.user.must_be_resident(record) else record

    def _view_if_only_on_host(self, record: Record, tensor: torch.Tensor) -> torch.Tensor | None:
        """If its bytes are in host memory alone."""
        there = record.state is State.AWAY and record.place is not None
        return _tensor_at_place(record.place, tensor) if there else None

    def _copy_to_host_place(self, record: Record, parameter: torch.Tensor) -> torch.Tensor | None:
        """What is on the device has a copy of its bytes of now in host memory, if there is room."""
        if not self._reserve_host_place(record):
            return None
        own = _tensor_at_place(record.place, parameter)
        if not self.mover.is_clean(record):
            self.mover.counts.to_host_bytes += record.size_bytes
            own.copy_(parameter)
            self.mover.mark_host_copy_clean(record)
        record.pins += 1  # its place is not another's, either
        self.renewed.append((parameter, own, record))
        return own

    def _reserve_host_place(self, record: Record) -> bool:
        """Brought to the device, it has one for what is there."""
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
        self.mover.counts.to_host_bytes += tensor.nbytes
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return copied.copy_(tensor.detach())

    def _fetch_to_device(self, record: Record) -> None:
        self.residency.make_resident_within_budget([record], 0, f"a step on the host of {record.name}", None)

    def copy_results_back(self) -> None:
        for tensor, own in self.copies:
            self._copy_twin_back(tensor, own)
            if (record := self.residency.evictable_record_of(tensor)) is not None:
                record.clean = False
        for tensor, own, record in self.renewed:
            self._copy_twin_back(tensor, own)
            record.pins -= 1
            self.mover.mark_host_copy_clean(record)

    def _copy_twin_back(self, tensor: torch.Tensor, own: torch.Tensor) -> None:
        """Fused kernels move no version of what they write: a graph that ends at it stays good."""
        with _unsafe_preserve_version_counter(tensor):
            tensor.detach().copy_(own.detach(), non_blocking=True)
        self.mover.counts.from_host_bytes += tensor.nbytes


def _run_step_on_twins(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    twins: list[torch.Tensor],
    states: list[dict[str, Any]],
) -> None:
    """The optimizer's own step, beneath its hooks, on what stands for a bucket."""
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
    vars(stand).pop("step", None)  # what schedulers put there
    type(optimizer).step.__wrapped__(stand)  # type: ignore[attr-defined]


def _tensor_at_place(place: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one over the bytes of this place."""
    size_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    held: Any = ctypes.c_char * size_bytes
    flat = torch.frombuffer(held.from_address(place.address), dtype=tensor.dtype)
    return flat[tensor.storage_offset() :].view(tensor.shape)


def _expected_state_names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Of a parameter's states, when there are some: a step makes no other ones."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if group["momentum"] else set()
    if isinstance(optimizer, torch.optim.Adagrad):
        return {"step", "sum"}
    return {"step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])}


def _parameter_sized_states(parameter: torch.Tensor, states: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in states.values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]


def _fits_fused_kernel(parameter: torch.Tensor, states: dict[str, Any]) -> bool:
    """Contiguous, of one type, nothing hidden: fused kernels go by addresses, and ask for no more."""
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
