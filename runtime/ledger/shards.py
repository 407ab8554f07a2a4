"""Shards: weights, gradients and states that are DTensors. Each rank (process) has one part of such a tensor.

The bytes of a DTensor belong to its local tensor. `DTensor.nbytes` counts the bytes of all ranks, and the
storage of the DTensor itself has no bytes. So code that needs bytes or a storage calls `local_tensor` first.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from teraio.errors import UnsupportedError
from teraio.ranks.rank_store import count_ranks
from teraio.units import fmt_count

log = logging.getLogger("teraio")

_REPORTED = WeakIdKeyDictionary()  # the weights that a warning has named


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


def warn_of_unsharded_weights(owner: str, tensors: Iterable[Any]) -> None:
    """Warn if some of these weights are shards and others are not, so that each rank trains the others for
    itself. A model has such weights if a module was added after the model was sharded. `owner` names the
    program or the optimizer that has the tensors."""
    weights = [t for t in tensors if isinstance(t, torch.nn.Parameter) and t.requires_grad]
    plain = [weight for weight in weights if not is_shard(weight)]
    new = [weight for weight in plain if weight not in _REPORTED]
    if new and len(plain) < len(weights) and count_ranks() > 1:
        _REPORTED.update(dict.fromkeys(new))
        log.warning(
            "teraio: %s of %s are not sharded, the largest with shape %s: each rank trains its own copy, "
            "unless your code averages the gradients. teraio.shard of the whole model shards all weights",
            fmt_count(len(new), "weight"),
            owner,
            list(max(new, key=torch.Tensor.numel).shape),
        )
