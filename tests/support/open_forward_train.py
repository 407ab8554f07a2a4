"""A training in which two distant blocks use one weight. The blocks are compiled one by one, and autograd
adds the two gradients of the weight.

    open_forward_train.py

The script prints a JSON line per case: whether losses, gradients and weights equal the plain training's. The
process ends with an error if a gradient is evicted before autograd adds to it, or if a hook packs evicted
bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import torch
from fetched import fetched
from torch import nn

WIDTH, ROUNDS, STEPS_BETWEEN = 256, 2, 4
MEMORY = 5 * 2**20  # teraio reserves 4 MiB; the remaining memory has room for four of six weights
CASES = ("held over steps", "another between", "packed")


class Block(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + x


class Adds(Block):
    """A block that saves nothing for its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * 2)[: len(x)] + x


@contextlib.contextmanager
def packing(case: str) -> Iterator[None]:
    if case != "packed":
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        yield


def train(case: str, backend: str, **options: object) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 16) for _ in range(6)]
    kind = Block if case == "packed" else Adds
    first, last, saves = kind(weights[0]), kind(weights[0]), Block(weights[0])
    blocks = [Block(weight) for weight in weights[1:]]
    for block in (first, last, saves, *blocks):
        block.compile(backend=backend, **options)
    optimizer = torch.optim.SGD(weights[1:], lr=0.1, momentum=0.9)

    def through(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    seen = []
    for _ in range(ROUNDS):
        with packing(case):
            held = first(torch.randn(8, WIDTH))
        for _ in range(STEPS_BETWEEN if case == "held over steps" else 1):
            loss = through(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if case == "another between":  # this backward gives the same weight another gradient
            saves(torch.randn(8, WIDTH)).square().mean().backward()
        with packing(case):
            loss = (held + last(through(torch.randn(8, WIDTH)))).square().mean()
        loss.backward()
        seen += [loss.detach(), weights[0].grad.clone()]  # type: ignore[union-attr]
        weights[0].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(weight.detach().clone() for weight in weights)]


def main() -> None:
    torch.set_num_threads(1)
    for case in CASES:
        plain = train(case, "aot_eager")
        with fetched() as found:
            ours = train(case, "teraio", options={"memory": MEMORY, "inner": "eager", "planner": "none"})
        result = {"case": case, "same": all(map(torch.equal, plain, ours))}
        print(json.dumps({**result, "added": found["aten::add", "grad"]}), flush=True)


if __name__ == "__main__":
    main()
