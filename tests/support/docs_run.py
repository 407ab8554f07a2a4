"""A script that runs the code blocks and commands of the docs with small models.

The script reads a JSON object of two lists: `python` holds [name, code], and `commands` holds [name, command
line]. The script first executes each code block in its own namespace, which has the names that the docs
expect the reader to define. The script then runs the commands one after another. Blocks and commands run in
one folder, which is nearly empty at the start. The script prints one JSON object that maps each name to its
result.

    python docs_run.py < blocks.json

The script replaces every memory size by a size that is too small for the model, so that tensors move.
Synthetic models have two layers, and planners have a tenth of a second.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
import types
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import teraio
from teraio.cli import main as cli
from teraio.passes.synth import models

WIDTH, BLOCKS, STEPS = 256, 4, 3
MEMORY, LESS = "7MiB", "6800KiB"  # teraio reserves 4 MiB; weights, gradients and optimizer states take 4 MiB

Output = namedtuple("Output", "loss")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class MyModel(nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        for block in self.blocks:
            x = block(x)
        return Output((x - y).square().mean())


def smaller(code: str) -> str:
    code = re.sub(r'"16GiB"', f'"{LESS}"', re.sub(r'"(20GiB|160MiB)"', f'"{MEMORY}"', code))
    return re.sub(r'"/mnt/(nvme\d)/teraio"', r'"\1"', code)


def loader() -> Iterator[dict[str, torch.Tensor]]:
    for _ in range(STEPS):
        yield {"x": torch.randn(16, WIDTH), "y": torch.randn(16, WIDTH)}


def names_of_the_reader() -> dict[str, Any]:
    torch.manual_seed(0)
    model = MyModel(None)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(compiled: Any) -> None:
        for batch in loader():
            compiled(**batch).loss.backward()
            reader["optimizer"].step()
            reader["optimizer"].zero_grad()

    logged = types.SimpleNamespace(log=json.dumps)
    reader: dict[str, Any] = {"MyModel": MyModel, "config": None, "torch": torch, "teraio": teraio}
    reader |= {
        "model": model,
        "optimizer": optimizer,
        "loader": list(loader()),
        "train": train,
        "wandb": logged,
    }
    return reader


def run(code: str) -> dict[str, Any]:
    """Run this code. Return the engine's counts, or `error` with the traceback."""
    names = names_of_the_reader()
    try:
        exec(compile(smaller(code), "docs", "exec"), names)
        if "compiled" in names and not teraio.stats().get("slots"):
            names["train"](names["compiled"])  # train as well if the code only compiles the model
        results: dict[str, Any] = dict(teraio.stats())
        teraio.reset()
    except Exception:  # noqa: BLE001
        results = {"error": traceback.format_exc()}
        with contextlib.suppress(Exception):  # reset raises the same error again
            teraio.reset()
    torch._dynamo.reset()
    return results


def run_command(line: str) -> str:
    """Run a command line. Return an empty string if the command succeeds. Otherwise return its output and
    error.
    """
    line = re.sub(r" --plan-time \S+", "", line)  # the variable TERAIO_PLAN_TIME gives a short time
    words = shlex.split(re.sub(r"\b(20|24)GiB\b", MEMORY, line), comments=True)[1:]
    words += ["--seconds", "0.05"] * (words[0] == "doctor")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = cli.main(words)
    except (Exception, SystemExit):  # noqa: BLE001
        return f"{printed.getvalue()}\n{traceback.format_exc()}"
    # `doctor` exits with 1 if it has warnings for this machine.
    return (
        "" if code == 0 or (words[0] == "doctor" and code == 1) else f"{printed.getvalue()}\nexit code {code}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {k: v.contiguous() for k, v in MyModel(None).state_dict().items()},
            f"{folder}/weights.safetensors",
        )
        os.chdir(folder)
        request = json.load(sys.stdin)
        results = {name: run(code) for name, code in request["python"]}
        os.environ["TERAIO_PLAN_TIME"] = "100ms"
        for name, (model, parameters) in models.MODELS.items():
            models.MODELS[name] = replace(model, layers=2), parameters
        results["commands"] = {name: run_command(line) for name, line in request["commands"]}
        results["files"] = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
        os.chdir("/")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
