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


def reason_against(optimizer: torch.optim.Optimizer) -> str | None:
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
                isinstance(v, torch.Tensor) for v in _parts(value)
            ):
                return f"{name} is a tensor"
    return None


def begin(engine: Engine, kernels: Collection[str] | None = None) -> None:
    """Step these buckets of the engine's optimizers on the host from now on. None: all buckets."""
    _STEPS[engine] = HostStep(engine.residency, engine.user, kernels)


def of(engine: Engine) -> HostStep | None:
    """Return what steps this engine's optimizers on the host, if something does."""
    return _STEPS.get(engine)


class HostStep:
    """Of one engine, beside whose device there is host memory."""

    def __init__(self, residency: Residency, user: UserCode, kernels: Collection[str] | None = None) -> None:
        self.residency, self.user = residency, user
        self.kernels = kernels  # of the buckets that it takes; None: of all
        self.could: set[str] = set()  # take these
        self.said: set[str] = set()

    def takes(self, optimizer: torch.optim.Optimizer, reason: str | None = None) -> bool:
        """Whether it may step some of the optimizer's parameters; the caller may have a reason against it."""
        if (reason := reason or reason_against(optimizer)) is not None:
            self.say(f"{type(optimizer).__name__} steps on the device: {reason}")
        return reason is None

    def takes_bucket(
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
            named = all({*optimizer.state[p]} == _names(optimizer, group) for p in parameters)
            usual = (
                named
                and all(_usual(p, optimizer.state[p]) for p in parameters)
                and _apart([t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())])
            )
        if not usual:
            self.say(
                f"{type(optimizer).__name__} steps a part of its parameters on the device: their states or "
                "gradients have other types, layouts or memory than torch gives them"
            )
            return False
        self.could.add(kernel)
        return self.kernels is None or kernel in self.kernels

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        after: Sequence[torch.Tensor],
    ) -> None:
        """Of these parameters; gradients of those that come after them begin to leave meanwhile."""
        loans = Loans(self.residency, self.user)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            try:
                twins = [loans.parameter(parameter) for parameter in parameters]
                states = [loans.states(optimizer.state[parameter]) for parameter in parameters]
                self.residency.mover.device.idle()  # what is copied to and from the places has arrived
                self._expect(after)
                _run(optimizer, group, twins, states)
            finally:
                loans.give_back()
        if loans.full:
            self.say("host memory is full: what is stepped on the host is copied there and back each time")

    def _expect(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            record = None if gradient is None else self.residency.leaving(gradient)
            if record is None or record.state is not State.DEVICE or self.residency.in_use(record):
                continue
            if not self.user.stays(record) and self.residency.mover.make_place(record):
                self.residency.evict(record, HOST)

    def say(self, what: str) -> None:
        """Aloud where the host was asked for."""
        if what not in self.said:
            self.said.add(what)
            log.log(logging.WARNING if self.kernels is None else logging.INFO, "teraio: %s", what)


class Loans:
    """What stands on the host for tensors of the device while they are stepped there."""

    def __init__(self, residency: Residency, user: UserCode) -> None:
        self.residency, self.user, self.mover = residency, user, residency.mover
        self.copies: list[Pair] = []  # of what has no place in host memory: to be copied back
        # Of what has one, and is on the device, too.
        self.renewed: list[tuple[torch.Tensor, torch.Tensor, Record]] = []
        self.full = False

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """With its gradient, which nothing writes."""
        record = self._movable(parameter)
        own = None
        if record is not None:
            own = self._there(record, parameter)
            own = own if own is not None else self._copy_there(record, parameter)
        twin = torch.nn.Parameter(
            own if own is not None else self._copied(parameter), parameter.requires_grad
        )
        gradient = parameter.grad
        assert gradient is not None
        away = self.residency.leaving(gradient)
        if away is not None and away.state is State.LEAVING:
            self.mover.end_evict(away)
        twin.grad = None if away is None else self._there(away, gradient)
        if twin.grad is None:
            twin.grad = self._scratch(gradient)
        return twin

    def states(self, states: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._state(value) if isinstance(value, torch.Tensor) else value
            for name, value in states.items()
        }

    def _state(self, state: torch.Tensor) -> torch.Tensor:
        record = self._movable(state)
        if record is None:
            return self._copied(state)
        own = self._there(record, state)
        if own is None:
            if not self._has_place(record):
                return self._copied(state)
            self.residency.evict(record, HOST)
            if record.state is State.LEAVING:
                self.mover.end_evict(record)
            own = self._there(record, state)
        return own if own is not None else self._copied(state)

    def _movable(self, tensor: torch.Tensor) -> Record | None:
        """All of these bytes are the tensor's, and nobody else reaches them."""
        record = self.residency.leaving(tensor)
        if record is None or record.pins or record.size_bytes != tensor.nbytes:
            return None
        return None if self.user.stays(record) else record

    def _there(self, record: Record, tensor: torch.Tensor) -> torch.Tensor | None:
        """If its bytes are in host memory alone."""
        there = record.state is State.AWAY and record.place is not None
        return _over(record.place, tensor) if there else None

    def _copy_there(self, record: Record, parameter: torch.Tensor) -> torch.Tensor | None:
        """What is on the device has a copy of its bytes of now in host memory, if there is room."""
        if not self._has_place(record):
            return None
        own = _over(record.place, parameter)
        if not self.mover.is_clean(record):
            self.mover.counts.to_host_bytes += record.size_bytes
            own.copy_(parameter)
            self.mover.copied_to_place(record)
        record.pins += 1  # its place is not another's, either
        self.renewed.append((parameter, own, record))
        return own

    def _has_place(self, record: Record) -> bool:
        """Brought to the device, it has one for what is there."""
        self._bring(record)
        has = self.mover.make_place(record)
        self.full |= not has
        return has

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self._scratch(tensor)
        self.copies.append((tensor, copied))
        return copied

    def _scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        record = self.residency.leaving(tensor)
        if record is not None:
            self._bring(record)
        pinned = self.mover.device.kind == "cuda"
        self.mover.counts.to_host_bytes += tensor.nbytes
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return copied.copy_(tensor.detach())

    def _bring(self, record: Record) -> None:
        self.residency.ensure([record], 0, f"a step on the host of {record.name}", None)

    def give_back(self) -> None:
        for tensor, own in self.copies:
            self._copy_back(tensor, own)
            if (record := self.residency.leaving(tensor)) is not None:
                record.clean = False
        for tensor, own, record in self.renewed:
            self._copy_back(tensor, own)
            record.pins -= 1
            self.mover.copied_to_place(record)

    def _copy_back(self, tensor: torch.Tensor, own: torch.Tensor) -> None:
        """Fused kernels move no version of what they write: a graph that ends at it stays good."""
        with _unsafe_preserve_version_counter(tensor):
            tensor.detach().copy_(own.detach(), non_blocking=True)
        self.mover.counts.from_host_bytes += tensor.nbytes


def _run(
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


def _over(place: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one over the bytes of this place."""
    size_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    held: Any = ctypes.c_char * size_bytes
    flat = torch.frombuffer(held.from_address(place.address), dtype=tensor.dtype)
    return flat[tensor.storage_offset() :].view(tensor.shape)


def _names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Of a parameter's states, when there are some: a step makes no other ones."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if group["momentum"] else set()
    if isinstance(optimizer, torch.optim.Adagrad):
        return {"step", "sum"}
    return {"step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])}


def _large(parameter: torch.Tensor, states: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in states.values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]


def _usual(parameter: torch.Tensor, states: dict[str, Any]) -> bool:
    """Contiguous, of one type, nothing hidden: fused kernels go by addresses, and ask for no more."""
    gradient = parameter.grad
    large = _large(parameter, states)
    small = [v for v in states.values() if not any(v is one for one in large)]
    if gradient is None or not large or type(parameter) is not torch.nn.Parameter:
        return False
    kinds = {type(tensor) for tensor in (gradient, *large)}
    return (
        kinds == {torch.Tensor}
        and parameter.dtype in DTYPES
        and gradient.shape == parameter.shape
        and all(_plain(tensor, parameter) for tensor in (parameter, gradient, *large))
        and all(type(v) is torch.Tensor and v.numel() == 1 and not v.is_complex() for v in small)
    )


def _apart(tensors: Sequence[Any]) -> bool:
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)


def _plain(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _parts(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


_STEPS: WeakKeyDictionary[Engine, HostStep] = WeakKeyDictionary()
