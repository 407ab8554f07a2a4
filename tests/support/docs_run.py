"""Runs the docs in small: reads a JSON object of two lists, `python` of [name, code] and `commands` of [name,
command line]. Each code is executed in a namespace of its own, with what the docs say is the reader's. Then
the commands run one after another, in the same folder, which was empty. Prints one JSON object: name -> what
happened.

    python docs_run.py < blocks.json

Every size becomes one in which the model does not fit, so that things move; a model that is made up has two
layers, and planners have a tenth of a second.
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
MEMORY, LESS = "7MiB", "6800KiB"  # 4 MiB of it in reserve; weights, gradients and states are 4 MiB

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
    code = re.sub(r'"16GiB"', f'"{LESS}"', re.sub(r'"20GiB"', f'"{MEMORY}"', code))
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
    """What it did, or `error`."""
    names = names_of_the_reader()
    try:
        exec(compile(smaller(code), "docs", "exec"), names)
        if "compiled" in names and not teraio.stats().get("slots"):
            names["train"](names["compiled"])  # what is only compiled is called, too
        told: dict[str, Any] = dict(teraio.stats())
        teraio.reset()
    except Exception:  # noqa: BLE001
        told = {"error": traceback.format_exc()}
        with contextlib.suppress(Exception):  # it says once more what went wrong
            teraio.reset()
    torch._dynamo.reset()
    return told


def run_command(line: str) -> str:
    """Nothing, or what went wrong."""
    words = shlex.split(re.sub(r"\b(20|24)GiB\b", MEMORY, line), comments=True)[1:]
    words += ["--seconds", "0.05"] * (words[0] == "doctor")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(words)
    except (Exception, SystemExit):  # noqa: BLE001
        return f"{said.getvalue()}\n{traceback.format_exc()}"
    # A machine may have warnings.
    return "" if code == 0 or (words[0] == "doctor" and code == 1) else f"{said.getvalue()}\nexit code {code}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {k: v.contiguous() for k, v in MyModel(None).state_dict().items()},
            f"{folder}/weights.safetensors",
        )
        os.chdir(folder)
        asked = json.load(sys.stdin)
        told = {name: run(code) for name, code in asked["python"]}
        os.environ["TERAIO_PLAN_TIME"] = "100ms"
        for name, (model, parameters) in models.MODELS.items():
            models.MODELS[name] = replace(model, layers=2), parameters
        told["commands"] = {name: run_command(line) for name, line in asked["commands"]}
        told["files"] = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
        os.chdir("/")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
