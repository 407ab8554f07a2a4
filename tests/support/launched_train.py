"""Scripts as users write them, without a word about teraio. Each function is one script.

    python launched_train.py plain|launched CASE... CASE=disabled

`launched` wraps torch as `teraio run` does. `CASE=disabled` runs a case with TERAIO_DISABLE. The script
prints one JSON object per case: the digest of the losses and weights, the classes that teraio compiled, and
the number of evictions.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

WIDTH, DEPTH, STEPS = 352, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, also those that `nn.Module` leaves out of a copy."""
        return dict(vars(self))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a loss without a call of the module itself."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Causal(nn.Module):
    """A model that Dynamo traces only in parts: `nn.TransformerDecoder` reads a value of its mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH // 2, 2, WIDTH, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, DEPTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(4, 8, WIDTH // 2)
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        result: torch.Tensor = self.decoder(x, x, tgt_mask=mask)
        return result


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


def digest(losses: Iterable[float], *modules: nn.Module) -> str:
    whole = hashlib.sha256(repr(list(losses)).encode())
    for module in modules:
        for value in module.state_dict().values():
            whole.update(value.detach().numpy().tobytes())
    return whole.hexdigest()


def train(
    call: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> list[float]:
    losses = []
    for step in range(steps):
        loss = call(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def net_and_adamw() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters())


def uncompiled() -> str:
    net, optimizer = net_and_adamw()
    return digest(train(net, optimizer), net)


def of_torch_modules() -> str:
    """Train a module of torch itself. Dynamo skips the file of its `forward`."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * DEPTH)])
    return digest(train(net, torch.optim.AdamW(net.parameters())), net)


def compiled_after_the_optimizer() -> str:
    net, optimizer = net_and_adamw()
    return digest(train(torch.compile(net, backend="aot_eager"), optimizer), net)


def compiled_in_blocks() -> str:
    """Compile each block, as trainers of large models do. The script does not compile the head."""
    net, optimizer = net_and_adamw()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return digest(train(net, optimizer), net)


def other_methods() -> str:
    """Call a method of the model, so that only its parts are called as modules."""
    net, optimizer = net_and_adamw()
    losses = []
    for step in range(STEPS):
        loss = net.loss(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return digest(losses, net)


def two_models() -> str:
    """Train two models in turns, each with an optimizer of its own, as a GAN does."""
    (one, first), (other, second) = net_and_adamw(), net_and_adamw()
    losses = []
    for _ in range(2):
        losses += train(one, first, 2) + train(lambda x: other(x) + one(x).detach(), second, 2)
    return digest(losses, one, other)


def frozen_part() -> str:
    """Train the head on top of frozen blocks."""
    torch.manual_seed(0)
    net = Net()
    net.blocks.requires_grad_(False)
    return digest(train(net, torch.optim.AdamW(net.head.parameters())), net)


def added_weights() -> str:
    """Train one model first. Add the weights of another model to the optimizer later."""
    one, optimizer = net_and_adamw()
    other = Net()
    losses = train(one, optimizer, 2)
    optimizer.add_param_group({"params": list(other.parameters())})
    return digest(losses + train(lambda x: one(x) + other(x), optimizer, 3), one, other)


def copies() -> str:
    """Copy and pickle the model before its first call, and train it after an evaluation."""
    net, optimizer = net_and_adamw()
    average, unpickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    with torch.no_grad():
        before = net(batch(9)).sum().item()
    losses = train(net, optimizer)
    with torch.no_grad():
        for mean, now in zip(average.parameters(), net.parameters()):
            mean.lerp_(now, 0.5)
    net.eval()
    # A copy of the compiled model has weights of its own, so its result changes with them.
    trained = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    with torch.no_grad():
        for model in trained:
            model.head.weight.zero_()
    models = net, average, unpickled, *trained
    after = [model(batch(9)).sum().item() for model in models]
    return digest([before, *losses, *after], *models)


def partly_traced() -> str:
    """Train a model whose layers are called from code that Dynamo does not trace."""
    torch.manual_seed(0)
    net = Causal()
    return digest(train(net, torch.optim.AdamW(net.parameters())), net)


def closures() -> str:
    """Call the model only in a closure that the optimizer calls, as Lightning does."""
    net, optimizer = net_and_adamw()
    losses = []
    for step in range(STEPS):

        def closure(x: torch.Tensor = batch(step)) -> torch.Tensor:  # noqa: B008
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(loss.item())
    return digest(losses, net)


def updated_by_script() -> str:
    """Update the weights of two models without an optimizer of torch, and evaluate the models at the end."""
    torch.manual_seed(0)
    nets = nn.ModuleList((Net(), Net()))
    losses = []
    for step in range(STEPS):
        nets.zero_grad()
        loss = (nets[0](batch(step)) + nets[1](batch(step))).square().mean()
        loss.backward()
        for parameter in nets.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
        losses.append(loss.item())
    with torch.no_grad():
        losses += [(nets[0](batch(at)) + nets[1](batch(at))).sum().item() for at in (8, 9)]
    return digest(losses, nets)


def foreign_backend() -> str:
    """Compile with a backend of the script's own."""
    net, optimizer = net_and_adamw()
    return digest(train(torch.compile(net, backend=lambda graph, inputs: graph.forward), optimizer), net)


CASES = (
    uncompiled,
    of_torch_modules,
    compiled_after_the_optimizer,
    compiled_in_blocks,
    other_methods,
    two_models,
    frozen_part,
    added_weights,
    copies,
    partly_traced,
    closures,
    updated_by_script,
    foreign_backend,
)


def row(case: Callable[[], str]) -> dict[str, Any]:
    found: dict[str, Any] = {"case": case.__name__, "digest": case()}
    if "teraio.launch.trained_models" in sys.modules:
        import teraio
        from teraio.launch.trained_models import MODELS

        stats = teraio.stats()
        found |= {
            "compiled": sorted(type(module).__name__ for module in MODELS.compiled),
            "steps": stats.get("step", 0),
            "evaluations": stats.get("evaluations", 0),
            "evictions": stats.get("evictions", 0),
            "peak_bytes": stats.get("peak_bytes", 0),
        }
        teraio.reset()
        MODELS.compiled.clear()
        MODELS.by_script.clear()
        MODELS.backwards_to_see = 1
        torch._dynamo.reset()
    gc.collect()
    return found


if __name__ == "__main__":
    if sys.argv[1] == "launched":
        from teraio.launch.torch_import import wrap_torch_when_imported

        wrap_torch_when_imported()
    for word in sys.argv[2:]:
        name, _, disabled = word.partition("=")
        os.environ["TERAIO_DISABLE"] = "1" if disabled else ""
        print(json.dumps({**row(next(case for case in CASES if case.__name__ == name)), "case": word}))
