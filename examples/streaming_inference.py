"""A text generation with a model that is larger than the memory budget.

For every token, teraio fetches the weights from a safetensors file.

python examples/streaming_inference.py --memory 200MiB --hidden 1024 --layers 16
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import teraio
from teraio.cli.demo_model import Llama, Shape


class Generator(Llama):
    """A Llama that takes tokens and returns the most probable next token."""

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        width = self.shape.hidden // self.shape.heads
        rate = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(tokens.shape[1]), rate).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x.index_select(1, position))).argmax(-1)


def write(model: nn.Module, file: Path) -> None:
    """Write the weights to a safetensors file. Write one tensor after the other, so that only one must be
    resident.
    """
    header, at = {}, 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in model.state_dict(keep_vars=True).values():
            stream.write(tensor.detach().clone().numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="200MiB", help="the budget: 200MiB, 80%%")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--weights", type=Path, help="a safetensors file or folder; default: random")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate")
    for name, default in {"vocabulary": 4096, "hidden": 1024, "layers": 16, "heads": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    shape = Shape(args.vocabulary, args.hidden, args.hidden * 11 // 4, args.layers, args.heads, args.heads)

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        options = {"memory": args.memory, "inner": args.inner}
        weights = args.weights
        if weights is None:
            weights = Path(folder, "model.safetensors")
            torch.manual_seed(0)
            with teraio.init(**options):
                write(Generator(shape), weights)
        with torch.device("meta"):
            model = Generator(shape).requires_grad_(False)
        teraio.load(model, weights, **options)
        compiled = torch.compile(model, backend="teraio")
        tokens = torch.zeros(1, 8 + args.tokens, dtype=torch.long)
        for at in range(args.tokens):
            began = time.perf_counter()
            tokens[:, 8 + at] = compiled(tokens, torch.tensor([7 + at]))
            print(f"token {at}: {tokens[0, 8 + at].item()}, {time.perf_counter() - began:.2f} s")
        counts = teraio.stats()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    peak_bytes = counts["peak_bytes"] - counts["reserve_bytes"]
    print(f"weights {size_bytes / 2**20:.1f} MiB, peak {peak_bytes / 2**20:.1f} MiB of tensors")


if __name__ == "__main__":
    main()
