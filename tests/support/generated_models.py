"""Models that a seed defines: random blocks, embeddings, heads, tied weights, outputs, and ways to call the
model in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from generated_blocks import BLOCKS
from generated_layers import Size
from torch import nn

VOCABULARY = 160

# STYLES are the ways to compile a model. MANNERS are the ways in which a step uses the model.
STYLES = ("whole",) * 8 + ("blocks", "break", "dynamic")
MANNERS = (
    *("once",) * 5,
    *("accumulate", "two forwards", "queue", "hold", "penalty", "evaluate", "clip", "not none"),
    *("look", "write", "write data"),
)
OPTIMIZERS = ("sgd", "sgd", "momentum", "adamw")


class Generated(nn.Module):
    """A random model. `run` holds the compiled calls of the blocks if the style compiles blocks one by
    one.
    """

    def __init__(self, seed: int, most_blocks: int) -> None:
        super().__init__()
        draw = Random(seed)
        size = Size(3, draw.choice([8, 12]), draw.choice([64, 64, 96]))
        self.size = size
        self.style = draw.choice(STYLES)
        self.manner = MANNERS[seed % len(MANNERS)]
        self.optimizer = draw.choice(OPTIMIZERS)
        kinds = draw.sample(BLOCKS, draw.randint(2, most_blocks))
        if draw.random() < 0.3 and most_blocks > 2:
            kinds.append(kinds[0])
        self.blocks = nn.ModuleList([kind(size, draw) for kind in kinds])
        if draw.random() < 0.2:
            self.blocks.append(self.blocks[0])  # the model uses the first block a second time
        self.run: list[Callable[..., Any]] = []
        self.tokens = draw.random() < 0.5
        self.embedding: nn.Embedding | None = nn.Embedding(VOCABULARY, size.width) if self.tokens else None
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        if self.embedding is not None and draw.random() < 0.5:
            self.head.weight = self.embedding.weight
        self.extra = draw.choice(["nothing", "nothing", "unused", "used", "weight view", "weight", "input"])
        self.unused = nn.Linear(size.width, size.width) if draw.random() < 0.1 else None
        self.mutates = not self.tokens and draw.random() < 0.15
        self.input_grad = not self.tokens and not self.mutates and draw.random() < 0.3
        self.held: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = x
        if self.mutates:
            x.mul_(0.5)
        if self.embedding is not None:
            x = self.embedding(x)
        middle = None
        blocks: Iterable[Callable[..., Any]] = self.run or self.blocks
        for number, block in enumerate(blocks):
            x = block(x)
            if number == 0:
                middle = x
                if self.style == "break":
                    torch._dynamo.graph_break()
        assert middle is not None
        x = F.layer_norm(x, x.shape[-1:])
        loss = F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())
        match self.extra:
            case "unused":
                return loss, x * 2
            case "used":
                return loss, middle.square().mean()
            case "weight view":
                return loss, self.head.weight.t()[:4]
            case "weight":
                return loss, self.head.weight
            case "input":
                return loss, given
        return (loss,)

    @property
    def what(self) -> str:
        parts = [type(block).__name__ + _way(block) for block in self.blocks]
        signs = [
            self.style,
            self.manner,
            self.optimizer,
            self.extra,
            *(name for name in ("tokens", "mutates", "input_grad", "unused") if getattr(self, name)),
        ]
        return f"{' '.join(parts)} | {', '.join(signs)}"


def _way(block: nn.Module) -> str:
    way = getattr(block, "way", getattr(block, "inner", None))
    if isinstance(way, nn.Module):
        return f"({type(way).__name__}{_way(way)})"
    return "" if way is None else f"({way})"


def make(seed: int, most_blocks: int = 4) -> Generated:
    torch.manual_seed(seed)
    return Generated(seed, most_blocks)


Batch = tuple[torch.Tensor, torch.Tensor]


def batch(model: Generated, number: int) -> Batch:
    """Return the batch with this number. A number always gives the same batch. With dynamic sizes, the
    batches of the first step are smaller.
    """
    generator = torch.Generator().manual_seed(1000 + number)
    short = model.style == "dynamic" and number < 2
    size = (model.size.batch - short, model.size.length)
    target = torch.randint(0, VOCABULARY, size, generator=generator)
    if model.tokens:
        return torch.randint(0, VOCABULARY, size, generator=generator), target
    x = torch.randn(*size, model.size.width, generator=generator)
    return x.requires_grad_(model.input_grad), target


def optimizer_of(model: Generated) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    match model.optimizer:
        case "sgd":
            return torch.optim.SGD(trained, lr=0.01)
        case "momentum":
            return torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(trained, lr=1e-3)


Seen = dict[str, torch.Tensor]  # results that the run shows to user code, by name
Watch = Callable[[str, torch.optim.Optimizer], None]


def train(model: Generated, call: Callable[..., Any], steps: int, watch: Watch) -> Seen:
    """Train some steps from the model's current state.

    `watch` is called when a step begins and when its backward has ended. Weights and buffers are read only at
    the end of the training, because reading an evicted weight fetches it.
    """
    torch.manual_seed(7)
    optimizer = optimizer_of(model)
    seen: Seen = {}
    for step in range(steps):
        watch("begin", optimizer)
        shown = _backward(model, call, step)
        watch("end", optimizer)
        shown |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        seen |= {f"step {step}: {name}": value.detach().clone() for name, value in shown.items()}
        del shown
        if model.manner == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if model.manner == "write":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
        optimizer.step()
        if model.manner == "write data":
            for parameter in model.parameters():
                parameter.data.mul_(0.999)
        optimizer.zero_grad(set_to_none=model.manner != "not none")
    seen |= {f"the end: {name}": value.clone() for name, value in model.state_dict().items()}
    seen["the end: random numbers"] = torch.get_rng_state()
    model.zero_grad()
    model.held = None
    optimizer.state.clear()  # the optimizer is part of a reference cycle, so its states would be freed late
    return seen


def _backward(model: Generated, call: Callable[..., Any], step: int) -> Seen:
    """Run the forwards and backwards of one step, in the way that the model's manner names. Return the
    results without copying them.
    """
    shown: Seen = {}

    def forward(part: int) -> torch.Tensor:
        x, target = batch(model, 2 * step + part)
        loss, *rest = call(x, target)
        shown[f"loss {part}"] = loss
        for extra in rest:
            shown[f"{model.extra} {part}"] = extra
        if model.mutates:
            shown[f"input {part}"] = x
        if model.input_grad and loss.requires_grad and not (model.manner == "hold" and part):
            shown[f"input's {part}"] = x
        return loss + rest[0] if model.extra == "used" else loss

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    match model.manner:
        case "accumulate":
            backward(forward(0))
            backward(forward(1))
        case "two forwards":
            backward(forward(0) + forward(1))
        case "penalty":
            some = [p for p in model.parameters() if p.requires_grad][:3]
            backward(forward(0) + sum(p.abs().square().mean() for p in some))
        case "queue":
            losses = [forward(0), forward(1)]
            backward(losses[0])
            backward(losses[1])
        case "hold":  # the second forward has no backward, and its loss lives on into the next step
            backward(forward(0))
            model.held = forward(1)
        case "evaluate":
            backward(forward(0))
            with torch.no_grad():
                forward(1)
        case "look":
            loss = forward(0)
            shown["norms"] = torch.stack([p.detach().norm().real for p in model.parameters()])
            backward(loss)
        case _:
            backward(forward(0))
    for name, value in shown.items():
        # Replace the input by its gradient now. A hook that keeps the gradient would be part of a reference
        # cycle.
        if name.startswith("input's"):
            assert value.grad is not None
            shown[name] = value.grad
    return shown
