"""Shards: weights, gradients and states that are DTensors. Each rank (process) has one part of such a tensor.

The bytes of a DTensor belong to its local tensor. `DTensor.nbytes` counts the bytes of all ranks, and the
storage of the DTensor itself has no bytes. So code that needs bytes or a storage calls `local_tensor` first.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

from teraio.errors import UnsupportedError


def is_shard(tensor: Any) -> bool:
    """Return whether the tensor is a DTensor."""
    # If torch.distributed.tensor is not imported, there is no DTensor. Its import takes a second.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the bytes: the local tensor of a DTensor, or the tensor itself."""
    if is_shard(tensor):
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        return local
    return tensor


def all_sharded_weights() -> list[torch.Tensor]:
    """Return all parameters of this process that are DTensors. This looks at every object of the process."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return []
    found = [each for each in gc.get_objects() if issubclass(type(each), module.DTensor)]
    return [each for each in found if isinstance(each, torch.nn.Parameter)]


def refuse_weights_of_fsdp(tensors: Iterable[Any]) -> None:
    """Raise UnsupportedError if one of these tensors is a weight of a model that `fully_shard` has divided.

    Such a model empties and fills the storages of its gathered weights by itself, between the kernels.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp")
    # The search looks at every object of the process. `fully_shard` needs a process group.
    if not hasattr(module, "FSDPModule") or not torch.distributed.is_initialized():
        return
    asked = {id(tensor) for tensor in tensors}
    for each in gc.get_objects():
        if issubclass(type(each), module.FSDPModule) and any(id(p) in asked for p in each.parameters()):
            raise UnsupportedError(
                f"{type(each).__name__} is divided among ranks by fully_shard, which empties and fills "
                f"memory of weights by itself. Use teraio.shard(model, mesh) instead of fully_shard, or "
                f"compile this model with another backend"
            )
