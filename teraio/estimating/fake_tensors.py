"""Fake copies of a model, its batch and its optimizer. Fake tensors have shapes but no bytes.

The copy of the model has the model's code, hooks and flags. Each real storage becomes one fake storage, so
tied weights and views are still tied. Making a copy reads only the shapes of the model's tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from teraio.errors import OptionError, UnsupportedError
from teraio.formats.fields import suggest_nearest_name

from .torch_errors import reason_of_error

Parameters = list[nn.Parameter]
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
BASE = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, BASE) and kind is not BASE
}


@dataclass
class FakeCopies:
    """A set of fake copies of tensors, with one fake storage for each real storage.

    A copy of a tensor on `meta` is on `device`. A copy of any other tensor is on the tensor's device.
    """

    device: torch.device
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    storages: dict[int, torch.Tensor] = field(default_factory=dict)  # address of a storage -> fake storage

    def copy_tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a fake tensor with the shape, strides and storage offset of this tensor."""
        if type(tensor) not in PLAIN or tensor.layout != torch.strided:
            raise UnsupportedError(
                f"estimate: {name} is a {type(tensor).__name__} of layout {tensor.layout}; expected a plain "
                f"dense tensor. Estimate the model before its weights are converted or sharded"
            )
        with without_fetching():
            extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1
            needed = (tensor.storage_offset() + extent) * tensor.element_size() if tensor.numel() else 0
            storage = self._fake_storage_of(tensor.untyped_storage(), int(needed))
            like = torch.empty(0, dtype=tensor.dtype, device="meta")
            like.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            device = self.device if tensor.device.type == "meta" else tensor.device
            made: torch.Tensor = FakeTensor(self.mode, like, device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def _fake_storage_of(self, storage: torch.UntypedStorage, needed: int) -> torch.UntypedStorage:
        """Return the fake storage that replaces a real storage. The fake storage has at least `needed` bytes.

        The storage of an evicted tensor is empty, so its size alone would be too small.
        """
        known = self.storages.get(storage._cdata)
        if known is None or known.nbytes < needed:
            size = max(int(storage.nbytes()), needed)
            known = torch.empty(size, dtype=torch.uint8, device="meta")
            self.storages[storage._cdata] = known
        return known.untyped_storage()

    def copy_model(self, model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
        """Return a copy of the model, and a map from the id of each original tensor to its copy."""
        memo: dict[int, Any] = {}
        for path, module in model.named_modules():
            own = {name: value for name, value in vars(module).items() if name != "_modules"}
            for tensor in tree_leaves(list(own.values())):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = self.copy_tensor(tensor, path or type(module).__name__)
        try:
            return copy.deepcopy(model, memo), memo
        except Exception as error:
            raise UnsupportedError(
                f"estimate: {type(model).__name__} cannot be copied ({reason_of_error(error)}), and an "
                "estimate must not change the model itself. Make copy.deepcopy(model) work, or estimate a "
                "part of the model that can be copied"
            ) from error

    def copy_batch(self, batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keyword arguments of one model call, with fake copies of all tensors in
        the batch.
        """

        once: dict[int, torch.Tensor] = {}  # a tensor may occur twice: labels often are the inputs

        def copy_nested(value: Any) -> Any:
            return tree_map_only(torch.Tensor, copy_once, value)

        def copy_once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in once:
                once[id(tensor)] = self.copy_tensor(tensor, "a tensor of the batch")
            return once[id(tensor)]

        args: tuple[Any, ...] = (batch,) if isinstance(batch, torch.Tensor) else ()
        kwargs: dict[str, Any] = {}
        if isinstance(batch, Mapping):
            kwargs = {str(name): copy_nested(value) for name, value in batch.items()}
        elif isinstance(batch, tuple | list):
            args = tuple(batch)
        elif not args:
            raise OptionError(
                f"estimate: batch is of type {type(batch).__name__}; give a tensor, a tuple of arguments or "
                f"a dict of keyword arguments; tensors on meta will do"
            )
        args = tuple(map(copy_nested, args))
        try:
            signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise OptionError(
                f"estimate: {type(model).__name__} cannot be called with this batch: {error}"
            ) from None
        return args, kwargs


@contextmanager
def without_fetching() -> Iterator[None]:
    """Let the block read the shapes of evicted weights. The engine does not fetch the weights for such a
    read.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        yield


def training_device(model: nn.Module) -> torch.device:
    """Return the device that a training of this model would use.

    It is the first device of a parameter or buffer that is neither meta nor the CPU. If there is none, it is
    the CPU.
    """
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return next((device for device in found if device.type not in ("meta", "cpu")), torch.device("cpu"))


OptimizerChoice = str | torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer]


def optimizer_for_copy(
    choice: OptimizerChoice,
    model: nn.Module,
    copied: nn.Module,
    memo: dict[int, Any],
    mode: FakeTensorMode,
) -> torch.optim.Optimizer:
    """Return the chosen optimizer with two changes: its parameters are the copied model's, and it has no
    states.
    """
    if isinstance(choice, torch.optim.Optimizer):
        return _copy_optimizer(choice, model, memo)
    trained = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    if not trained:
        raise OptionError(f"estimate: no parameter of {type(model).__name__} requires a gradient")
    if isinstance(choice, str):
        known = OPTIMIZERS.get(choice.lower())
        if known is None:
            near = suggest_nearest_name(choice.lower(), list(OPTIMIZERS))
            raise OptionError(f"estimate: optimizer {choice!r} is not in torch.optim{near}")
        choice = known
    if not callable(choice):
        raise OptionError(
            f"estimate: optimizer is of type {type(choice).__name__}; give a name such as 'adamw', an "
            f"optimizer, or a function such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    try:
        with mode:
            made = choice(trained)
    except Exception as error:
        what = getattr(choice, "__name__", type(choice).__name__)
        raise OptionError(
            f"estimate: {what} cannot be made for the parameters of {type(model).__name__}: "
            f"{reason_of_error(error)}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise OptionError(
            f"estimate: optimizer returns a {type(made).__name__}; expected a torch.optim.Optimizer"
        )
    return made


def _copy_optimizer(
    given: torch.optim.Optimizer, model: nn.Module, memo: dict[int, Any]
) -> torch.optim.Optimizer:
    own = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in given.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in parameters)
    if foreign:
        raise OptionError(
            f"estimate: {foreign} of {len(parameters)} parameters of the {type(given).__name__} are not in "
            f"this {type(model).__name__}; give an optimizer of this model, or a name such as 'adamw'"
        )
    made: torch.optim.Optimizer = object.__new__(type(given))
    groups = [{**group, "params": [memo[id(p)] for p in group["params"]]} for group in given.param_groups]
    rest = {name: value for name, value in vars(given).items() if name not in ("state", "param_groups")}
    vars(made).update(copy.copy(rest), state=given.state.__class__(dict), param_groups=groups)
    return made
