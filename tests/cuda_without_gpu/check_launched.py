"""Checks of scripts that `teraio run` starts, whose models are larger than the GPU.

The checks need a `cuda` device that computes right numbers: a GPU, or the stand-in for its driver.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import teraio

MIB = 2**20
VARIABLES = {"STANDIN_MIB": "192"}
OPTIONS = {"MEMORY": "112MiB", "INNER": "eager", "PLANNER": "greedy", "HOST_MEMORY": "256MiB"}
WIDTH, LAYERS = 1024, 64


class Chain(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return x.square().mean()


def train(device: str) -> list[float]:
    """Build a model on the CPU and move it to the device, as scripts do. Then evaluate and train it."""
    torch.manual_seed(0)
    model = Chain().to(device)
    return train_model(model, model, device)


def train_model(model: nn.Module, call: Callable[[torch.Tensor], Any], device: str) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, WIDTH, generator=drawn) for _ in range(5)]
    with torch.no_grad():
        losses = [call(batches[0].to(device)).item()]
    for batch in batches:
        loss = call(batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def write_safetensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write float32 tensors. The environment of the stand-in does not have the package safetensors."""
    at, header = 0, {}
    for name, tensor in tensors.items():
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.numpy().tobytes())


def figures_of_training(losses: list[float], plain: list[float]) -> dict[str, Any]:
    """Check that the losses equal the plain training's, and that memory was within the budget."""
    stats = teraio.stats()
    assert losses == plain, (losses, plain)
    assert stats["peak_bytes"] <= 112 * MIB and not stats["overrun_bytes"], stats
    assert stats["device_peak_bytes"] <= 112 * MIB, stats
    return {"peak_mib": stats["peak_bytes"] / MIB, "written_mib": stats["written_bytes"] / MIB}


def check_a_model_larger_than_the_gpu_trains_in_an_unchanged_script() -> dict[str, Any]:
    """Check that a model of 256 MiB moves to a GPU of 192 MiB, and trains there within 112 MiB."""
    from teraio.launch.torch_import import wrap_torch_when_imported

    plain = train("cpu")
    try:
        Chain().to("cuda")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    else:
        raise AssertionError("the model fits on this GPU, so this check shows nothing")
    os.environ.update({f"TERAIO_{name}": value for name, value in OPTIONS.items()})
    wrap_torch_when_imported()
    losses = train("cuda")
    return figures_of_training(losses, plain)


def check_a_model_larger_than_the_gpu_is_loaded_from_files() -> dict[str, Any]:
    """Check that `teraio.load` puts weights of 256 MiB on a GPU of 192 MiB, and that they train."""
    plain = train("cpu")
    torch.manual_seed(0)
    saved = Chain().state_dict()
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        file = Path(folder, "model.safetensors")
        write_safetensors(file, saved)
        model = Chain()
        options = {name.lower(): value for name, value in OPTIONS.items()}
        with torch.device("cuda"):
            teraio.load(model, file, **options)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    losses = train_model(model, torch.compile(model, backend="teraio"), "cuda")
    return figures_of_training(losses, plain)
