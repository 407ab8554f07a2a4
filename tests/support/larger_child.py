"""A training and an inference of a model whose weights alone are larger than the process's memory limit.

    larger_child.py plain|teraio EXTRA_BYTES FILE

Before the limit is set, all modules are loaded, and the training and the inference have run at small size.
The script then sets the limit RLIMIT_DATA to the bytes in use plus EXTRA_BYTES. If EXTRA_BYTES is 0, the
script sets no limit, and the training writes its initial weights to FILE. The inference loads its weights
from FILE.

The script prints one JSON object with the results of the training and of the inference. Both results have
counts. The training's result also has losses and a digest of the weights, and the inference's result has
outputs. If an error ended the training or the inference, its result is the error.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from typing import Any

import steady
import torch
from limited_child import data_bytes
from safetensors.torch import save_file
from torch import nn

import teraio
from teraio.runtime.device import cpu

WIDTH, LAYERS, ROWS, STEPS = 768, 42, 8, 3  # each layer has 2.25 MiB of weights, all layers together 94 MiB
MEMORY = 20 << 20
MADE = [False]  # MADE[0] is True after the model's constructor has ended


class Chain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        MADE[0] = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="teraio", options={"inner": "eager"}, dynamic=False)


def train(width: int, file: str) -> dict[str, Any]:
    MADE[0] = False
    torch.manual_seed(0)
    with teraio.init():
        model = Chain(width)
    if file:
        save_file(dict(model.named_parameters()), file)
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = run(torch.randn(ROWS, width))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().clone().numpy().tobytes())
    return {"losses": losses, "digest": digest.hexdigest(), "stats": teraio.stats()}


def infer(width: int, file: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = Chain(width)
    teraio.load(model.requires_grad_(False), file)
    run = compiled(model)
    torch.manual_seed(1)
    with torch.no_grad():
        outputs = [run(torch.randn(ROWS, width)).item() for _ in range(STEPS)]
    return {"outputs": outputs, "stats": teraio.stats()}


def attempt(part: Any, *arguments: Any) -> dict[str, Any]:
    try:
        result: dict[str, Any] = part(*arguments)
    except (MemoryError, RuntimeError) as error:
        return {"error": str(error), "made": MADE[0]}
    torch._dynamo.reset()  # reset fetches no tensor of the model, because the model is garbage
    return result


def main() -> None:
    kind, extra, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    steady.plans()
    # The constructor makes malloc return freed memory to the system, in plain runs too. The limit counts
    # memory that malloc keeps.
    cpu.CpuDevice()
    os.environ.update({"TERAIO_DISABLE": "1"} if kind == "plain" else {"TERAIO_MEMORY": str(MEMORY)})
    os.environ |= {
        "TERAIO_WARMUP": "1",
        "TERAIO_PLANNER": "greedy",
        "TERAIO_PLANNING": "inline",
        "TERAIO_INNER": "eager",
    }
    small = file + ".small"
    if kind != "plain" or not extra:  # a plain run under a limit ends before it compiles
        attempt(train, 16, small)
        attempt(infer, 16, small)
    torch._dynamo.reset()  # also imports the modules that the next reset needs
    base = data_bytes()
    if extra:
        resource.setrlimit(resource.RLIMIT_DATA, (base + extra, base + extra))
    result = {"train": attempt(train, WIDTH, "" if extra else file), "infer": attempt(infer, WIDTH, file)}
    print(json.dumps({**result, "grown_bytes": data_bytes() - base}))


if __name__ == "__main__":
    main()
