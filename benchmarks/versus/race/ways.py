"""The ways to train a subject step by step, all from the same weights and with the same batches.

plain         `torch.compile(model, backend="inductor")`, everything in memory
teraio        `torch.compile(model, backend="teraio")` with a budget of `memory` bytes
without       like `teraio`, but the backend is turned off
hooks         `torch.autograd.graph.saved_tensors_hooks` write saved activations to files. Every block is
              compiled separately, because hooks get saved tensors only when a compiled program ends
checkpoint    every block is recomputed in the backward
both          every block is recomputed, and the inputs of every block are written to files
deepspeed     ZeRO-3 with parameters and states on `offload`, which is none, cpu or nvme (deepspeed_way.py)
"""

from __future__ import annotations

import itertools
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from race.models import Batch, Subject


class Way(Protocol):
    def step(self, batch: Batch) -> torch.Tensor: ...

    def figures(self) -> dict[str, int]:
        """Return counts such as written bytes, summed since the start."""
        ...

    def settled(self) -> bool:
        """Return True if all further steps will be alike."""
        ...


class Plain:
    def __init__(self, subject: Subject, request: dict[str, Any]) -> None:
        self.model = subject.make()
        self.prepare(request)
        self.optimizer = subject.optimizer(self.model.parameters())
        self.compiled = self.compile(request)

    def prepare(self, request: dict[str, Any]) -> None:
        pass

    def compile(self, request: dict[str, Any]) -> Any:
        return torch.compile(self.model, dynamic=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.compiled(*batch)
        return loss

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self.forward(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def figures(self) -> dict[str, int]:
        return {}

    def settled(self) -> bool:
        return True


class Teraio(Plain):
    def compile(self, request: dict[str, Any]) -> Any:
        options = {"memory": request["memory"], "planning": "inline", **request.get("options", {})}
        return torch.compile(self.model, backend="teraio", options=options, dynamic=False)

    def figures(self) -> dict[str, int]:
        import teraio

        stats = teraio.stats()
        names = ("written_bytes", "read_bytes", "stall_ns", "misses", "overrun_bytes")
        return {name: stats.get(name, 0) for name in names}  # type: ignore[misc]

    def settled(self) -> bool:
        import teraio

        return teraio.stats().get("steady", False)


class Without(Teraio):
    """Training like `teraio`, but with the backend turned off by TERAIO_DISABLE."""

    def compile(self, request: dict[str, Any]) -> Any:
        os.environ["TERAIO_DISABLE"] = "1"
        return super().compile(request)

    def figures(self) -> dict[str, int]:
        return {}

    def settled(self) -> bool:
        return True


class Again(torch.nn.Module):
    """A block that saves its inputs and is recomputed in the backward."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: torch.Tensor) -> Any:
        return checkpoint(self.block, *inputs, use_reentrant=False)


class Checkpoint(Plain):
    def prepare(self, request: dict[str, Any]) -> None:
        self.model.layers = torch.nn.ModuleList(map(Again, self.model.layers))


class Files:
    """Saved tensors, each in a file of a folder.

    Two threads write the tensors while the forward continues. The backward reads each file when it needs the
    tensor. Weights and small tensors are kept in memory.
    """

    LEAST_BYTES = 2**16
    WRITERS = 2
    QUEUE = 4  # most unfinished writes, because their tensors are still in memory

    def __init__(self, unpacked: set[int]) -> None:
        self.unpacked = unpacked
        self.folder = tempfile.TemporaryDirectory(prefix="saved-tensors-")
        self.threads = ThreadPoolExecutor(self.WRITERS)
        self.waiting: list[Future[None]] = []
        self.names = itertools.count()
        self.written_bytes = self.read_bytes = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < self.LEAST_BYTES or tensor.untyped_storage()._cdata in self.unpacked:
            return tensor
        path = f"{self.folder.name}/{next(self.names)}"
        self.written_bytes += tensor.nbytes
        while len(self.waiting) >= self.QUEUE:
            self.waiting.pop(0).result()
        written = self.threads.submit(_write, path, tensor.detach())
        self.waiting.append(written)
        return path, tensor.dtype, tensor.shape, tensor.stride(), written

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        path, dtype, shape, stride, written = packed
        written.result()
        flat = torch.from_numpy(np.fromfile(path, np.uint8)).view(dtype)
        self.read_bytes += flat.nbytes
        os.unlink(path)
        return flat.as_strided(shape, stride)


def _write(path: str, tensor: torch.Tensor) -> None:
    """Write the elements in the order of memory, so that the file's bytes fit the tensor's strides."""
    strides = tuple(tensor.stride())
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    dense = tensor.permute(order)
    assert dense.is_contiguous(), (tensor.shape, tensor.stride())
    dense.reshape(-1).view(torch.uint8).numpy().tofile(path)


class Hooks(Plain):
    def compile(self, request: dict[str, Any]) -> Any:
        kept = (*self.model.parameters(), *self.model.buffers())
        self.files = Files({tensor.untyped_storage()._cdata for tensor in kept})
        for layer in self.model.layers:
            getattr(layer, "block", layer).compile(dynamic=False)
        return self.model

    def forward(self, batch: Batch) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.files.pack, self.files.unpack):
            return super().forward(batch)

    def figures(self) -> dict[str, int]:
        return {"written_bytes": self.files.written_bytes, "read_bytes": self.files.read_bytes}


class Both(Hooks, Checkpoint):
    """A combination of the ways `hooks` and `checkpoint`. The checkpoint contains the compiled block. So
    hooks get only the inputs of each block.
    """


def way_of(name: str) -> Any:
    if name == "deepspeed":
        from race.deepspeed_way import DeepSpeed

        return DeepSpeed
    return {
        "plain": Plain,
        "teraio": Teraio,
        "without": Without,
        "checkpoint": Checkpoint,
        "hooks": Hooks,
        "both": Both,
    }[name]
