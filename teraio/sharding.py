"""`teraio.shard`: a model whose weights are divided among the ranks (the processes) of a device mesh.

    shard(model, mesh)    each weight becomes a DTensor: each rank keeps some rows of the weight, its shard
    forward               a module reads a weight: the shards of all ranks are gathered to the whole weight
    backward              the weight is gathered again; the ranks divide the averaged gradient among them

In a compiled program, the gathers are kernels, and the shards are the program's weights. So the engine evicts
and fetches the shards of a rank like the weights of a training with one process.

The model's modules get subclasses of their classes, with a property for each weight. While a forward runs,
the property gathers the weight. At any other time, it returns the DTensor.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from teraio.errors import UnsupportedError

Model = TypeVar("Model", bound=torch.nn.Module)
MARK = "_teraio_gathering"  # attribute of the classes that `shard` makes


@dataclass(frozen=True, slots=True)
class Gathering:
    """The types in which weights are gathered, and in which gradients are averaged. None: the type of the
    weight, or of its gathered copy."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    def gather(self, weight: DTensor) -> torch.Tensor:
        """Return the whole weight. The gradient of the result is averaged over the ranks."""
        ranks = weight.device_mesh.ndim
        is_real = weight.dtype.is_floating_point  # the types are not for integers and complex numbers
        whole = weight.redistribute(
            placements=[Replicate()] * ranks,
            forward_dtype=self.param_dtype if is_real else None,
            backward_dtype=self.reduce_dtype if is_real else None,
        )
        return whole.to_local(grad_placements=[Partial("avg")] * ranks)


def shard(
    model: Model,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Model:
    """Divide the model's weights among the ranks of the mesh, in place, and return the model.

    All ranks get the values of rank 0. The last dimension of the mesh divides each weight by rows. The other
    dimensions repeat the shards. Call `shard` before you make an optimizer, and then compile the model.

    Modules compute with weights of type `param_dtype`. Gradients are averaged in `reduce_dtype`. If a type is
    None, the type does not change. The types of integer and complex weights never change.
    """
    _refuse_other_types(model, mesh)
    _refuse_unfit_mesh(mesh)
    owners = _owners_of_parameters(model)
    _refuse_unfit_model(model, mesh, owners)
    sharded: dict[int, torch.nn.Parameter] = {}  # by the id of the weight before
    for name, module, parameter in owners:
        if id(parameter) not in sharded:
            sharded[id(parameter)] = _shard_of(parameter, mesh)
        module._parameters.update({name: sharded[id(parameter)]})
    gathering = Gathering(param_dtype, reduce_dtype)
    for module in model.modules():
        kind = _gathering_class(type(module), tuple(module._parameters), gathering)
        object.__setattr__(module, "__class__", kind)
    return model


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether `shard` has divided the weights of this model."""
    return hasattr(type(model), MARK)


def _shard_of(parameter: torch.nn.Parameter, mesh: DeviceMesh) -> torch.nn.Parameter:
    rows: Placement = Shard(0) if parameter.ndim else Replicate()
    placements = [*[Replicate()] * (mesh.ndim - 1), rows]
    divided = distribute_tensor(parameter.detach(), mesh, placements)
    made = torch.nn.Parameter(divided, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


# ---- the classes of modules


class _Reading(threading.local):
    """The number of forwards of sharded modules that this thread runs now."""

    depth = 0

    def change(self, by: int) -> None:
        """Change the number, because a forward begins or ends."""
        self.depth += by


_READING = _Reading()
_CLASSES: dict[tuple[type, tuple[str, ...], Gathering], type] = {}


@contextmanager
def _reading_weights() -> Iterator[None]:
    _READING.change(1)
    try:
        yield
    finally:
        _READING.change(-1)


def _is_forward_running() -> bool:
    return torch.compiler.is_compiling() or _READING.depth > 0


def _gathering_class(kind: type, names: tuple[str, ...], gathering: Gathering) -> type:
    """Return the subclass of `kind` for modules with parameters of these names."""
    key = kind, names, gathering
    if key not in _CLASSES:
        own: dict[str, Any] = {name: _gathering_property(name, gathering) for name in names}
        own["register_parameter"] = _register_sharded
        own |= {MARK: gathering, "forward": _forward_reading_weights(kind.forward)}  # type: ignore[attr-defined]
        own |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _CLASSES[key] = type(kind.__name__, (kind,), own)
    return _CLASSES[key]


def _gathering_property(name: str, gathering: Gathering) -> property:
    def read(module: torch.nn.Module) -> Any:
        if name not in module._parameters:  # user code has deleted the weight
            return torch.nn.Module.__getattr__(module, name)
        weight = module._parameters[name]
        if isinstance(weight, DTensor) and _is_forward_running():
            return gathering.gather(weight)
        return weight

    return property(read)


def _register_sharded(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    """Register a parameter of a sharded module. Raise UnsupportedError if the parameter is not divided."""
    if parameter is not None and not isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"teraio.shard: the new weight {type(module).__name__}.{name} is not sharded, and each rank "
            f"would train its own. Set the weight first, and then call teraio.shard. To change a sharded "
            f"weight, copy values into it"
        )
    torch.nn.Module.register_parameter(module, name, parameter)


def _forward_reading_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with _reading_weights():
            return forward(*args, **kwargs)

    # Log lines, and torch, name a function by its code.
    code = run.__code__.replace(co_name=forward.__name__, co_qualname=forward.__qualname__)
    return functools.wraps(forward)(FunctionType(code, globals(), forward.__name__, None, run.__closure__))


# ---- refusals


def _owners_of_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """Return (name, module, parameter) for each parameter of each module. A tied weight has several."""
    return [
        (name, module, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _refuse_other_types(model: object, mesh: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedError(f"teraio.shard takes a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("teraio.shard: a ScriptModule cannot be sharded. Pass the module itself")
    if not isinstance(mesh, DeviceMesh):
        raise UnsupportedError(
            f"teraio.shard takes a DeviceMesh, not a {type(mesh).__name__}. "
            f"torch.distributed.device_mesh.init_device_mesh makes one"
        )


def _refuse_unfit_mesh(mesh: DeviceMesh) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise UnsupportedError(
            "teraio.shard: this process has no process group. Start the program with torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    ranks = torch.distributed.get_world_size()
    if mesh.size() > ranks:
        raise UnsupportedError(
            f"teraio.shard: the mesh has {mesh.size()} ranks, and the process group has {ranks}"
        )
    if mesh.get_coordinate() is None:
        rank = torch.distributed.get_rank()
        raise UnsupportedError(
            f"teraio.shard: rank {rank} is not in the mesh {mesh.mesh.tolist()}. Call teraio.shard only on "
            f"ranks of the mesh"
        )


def _refuse_unfit_model(
    model: torch.nn.Module, mesh: DeviceMesh, owners: list[tuple[str, torch.nn.Module, torch.nn.Parameter]]
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if is_sharded(model):
        raise UnsupportedError(
            "teraio.shard: this model is already sharded. Call teraio.shard once per model"
        )
    for _, module, parameter in owners:
        if is_sharded(module):
            raise UnsupportedError(f"teraio.shard: module {type(module).__name__} is already sharded")
        reason = _reason_against(parameter, mesh)
        if reason is not None:
            raise UnsupportedError(f"teraio.shard: weight {names[id(parameter)]} {reason}")
    optimizer = next((o for o in _optimizers() if _steps_any(o, names)), None)
    if optimizer is not None:
        raise UnsupportedError(
            f"teraio.shard: an optimizer ({type(optimizer).__name__}) already has weights of this model. "
            f"They would not be the sharded ones. Call teraio.shard first, and then make the optimizer"
        )
    _refuse_weights_in_attributes(model, names)


def _reason_against(parameter: torch.nn.Parameter, mesh: DeviceMesh) -> str | None:
    """Return why this weight cannot be divided, or None if it can."""
    reason = None
    if isinstance(parameter, DTensor):
        reason = "is a DTensor. teraio.shard takes models that no other library has divided"
    elif isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        reason = "has no values yet. Call the model with a batch first"
    elif parameter.device.type not in {"meta", mesh.device_type}:
        reason = f"is on {parameter.device.type}, and the mesh is on {mesh.device_type}"
    elif parameter.grad is not None:
        reason = "has a gradient. Call teraio.shard before the first backward"
    elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        reason = "has a hook, which its shard would not have. Call teraio.shard first, and add hooks then"
    elif parameter.layout != torch.strided:
        reason = f"has the layout {parameter.layout}, which cannot be divided by rows"
    return reason


def _refuse_weights_in_attributes(model: torch.nn.Module, names: dict[int, str]) -> None:
    for module in model.modules():
        for attribute, value in vars(module).items():
            if attribute == "_parameters":
                continue
            parts = value.values() if isinstance(value, dict) else value
            if not isinstance(value, dict | list | tuple | set):
                parts = [value]
            if any(isinstance(part, torch.nn.Parameter) and id(part) in names for part in parts):
                raise UnsupportedError(
                    f"teraio.shard: {type(module).__name__}.{attribute} has weights of the model beside its "
                    f"parameters, and would not get the gathered ones"
                )


def _optimizers() -> list[torch.optim.Optimizer]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def _steps_any(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> bool:
    return any(id(parameter) in names for group in optimizer.param_groups for parameter in group["params"])
