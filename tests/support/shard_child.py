"""Cases of `teraio.shard` on one rank. The script prints a JSON object with the result of each case: "ok", or
the text of the error.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import teraio
from teraio.errors import TeraioError
from teraio.runtime.engine import engine
from teraio.runtime.ledger import shards


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def twice() -> None:
    teraio.shard(teraio.shard(network(), mesh()), mesh())


def part_before() -> None:
    model: Any = network()
    teraio.shard(model[0], mesh())
    teraio.shard(model, mesh())


def optimizer_before() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    teraio.shard(model, mesh())
    assert optimizer.param_groups


def gradient_before() -> None:
    model = network()
    model(torch.ones(2, 8)).sum().backward()
    teraio.shard(model, mesh())


def other_device() -> None:
    with patch.object(DeviceMesh, "device_type", "meta"):
        teraio.shard(network(), mesh())


def recurrent() -> None:
    teraio.shard(nn.LSTM(4, 4), mesh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def with_fully_shard() -> None:
    model = Net()
    fully_shard(model, mesh=mesh())
    options: Any = {"memory": "64MiB", "inner": "eager"}
    torch.compile(model, backend="teraio", options=options)(torch.ones(2, 8))


# ---- a sharded model


def weight() -> None:
    model: Any = teraio.shard(network(), mesh())
    assert isinstance(model[0].weight, DTensor) and isinstance(model[0].weight, nn.Parameter)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    assert bool((model[0].weight.to_local() == 2).all())
    assert list(model.state_dict()) == list(network().state_dict())


def forward() -> None:
    x = torch.ones(2, 8)
    model = teraio.shard(network(), mesh())
    assert torch.equal(model(x), network()(x))
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), network()(x))


def gradient() -> None:
    plain, model = network(), teraio.shard(network(), mesh())
    for each in (plain, model):
        each(torch.ones(2, 8)).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters()):
        found: Any = other.grad
        assert one.grad is not None and torch.equal(one.grad, found.full_tensor())


def name() -> None:
    model: Any = teraio.shard(network(), mesh())
    assert type(model).__name__ == "Sequential" and isinstance(model[0], nn.Linear)


def copies() -> None:
    model = copy.deepcopy(teraio.shard(network(), mesh()))
    assert torch.equal(model(torch.ones(2, 8)), network()(torch.ones(2, 8)))


def signature() -> None:
    model: Any = teraio.shard(network(), mesh())
    assert list(inspect.signature(model[0].forward).parameters) == ["input"]


def frozen_weight() -> None:
    """Check that a backward knows the weight of each gradient, although one weight gets no gradient."""
    model: Any = network()
    model[0].weight.requires_grad_(False)
    teraio.shard(model, mesh())
    options: Any = {"memory": "64MiB", "inner": "eager"}
    torch.compile(model, backend="teraio", options=options)(torch.ones(2, 8)).sum().backward()
    assert engine.ENGINE is not None
    backward = engine.ENGINE.tracker.programs[-1].schedule
    trained = [each for each in model.parameters() if each.requires_grad]
    known = [about.edge for about in backward.buffers if about.edge >= 0]
    assert backward.edges == len(trained) and sorted(known) == list(range(len(trained)))
    teraio.reset()


@contextlib.contextmanager
def warnings_of_two_ranks() -> Iterator[list[tuple[Any, ...]]]:
    """Simulate one of two ranks. Yield the arguments of warnings about weights that are not sharded."""
    said: list[tuple[Any, ...]] = []
    with patch.object(shards.log, "warning") as warn, patch.object(shards, "count_ranks", lambda: 2):
        yield said
    said += [call.args[1:] for call in warn.call_args_list if "not sharded" in call.args[0]]


def train(*blocks: nn.Module) -> None:
    """Train some steps. The blocks run one after another, and each is compiled by itself."""
    options: Any = {"memory": "64MiB", "inner": "eager"}
    compiled = [torch.compile(block, backend="teraio", options=options) for block in blocks]
    optimizer = torch.optim.SGD(nn.ModuleList(blocks).parameters(), lr=0.1)
    for _ in range(3):
        x = torch.ones(2, 8)
        for block in compiled:
            x = block(x)
        x.sum().backward()
        optimizer.step()
    teraio.reset()


def module_added_later() -> None:
    model = nn.Sequential(teraio.shard(network(), mesh()), nn.Linear(3, 5))
    with warnings_of_two_ranks() as said:
        train(model)
    assert said == [("2 weights", "a model", [5, 3])], said


def weight_in_closure() -> None:
    """Check that a warning reports a weight that a function has kept since before the model was sharded."""
    model: Any = network()
    kept = model[2].weight
    teraio.shard(model, mesh())

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + kept.sum()

    with warnings_of_two_ranks() as said:
        train(Doubled())
    ((count, owner, shape),) = said
    assert (count, shape) == ("1 weight", [3, 6]) and "Doubled.forward" in owner, said


def block_added_later() -> None:
    """Check that the optimizer warns, if sharded and unsharded weights are in different programs."""
    with warnings_of_two_ranks() as said:
        train(teraio.shard(network(), mesh()), nn.Linear(3, 5))
    assert said == [("2 weights", "SGD", [5, 3])], said


def nothing_added() -> None:
    model: Any = network()
    model.append(nn.Linear(3, 5).requires_grad_(False))
    with warnings_of_two_ranks() as said:
        train(network())
        train(teraio.shard(model, mesh()))
    assert not said, said


CASES: dict[str, Callable[[], None]] = {
    "twice": twice,
    "part before": part_before,
    "optimizer before": optimizer_before,
    "gradient before": gradient_before,
    "other device": other_device,
    "recurrent": recurrent,
    "fully_shard": with_fully_shard,
    "weight": weight,
    "forward": forward,
    "gradient": gradient,
    "name": name,
    "copy": copies,
    "signature": signature,
    "frozen weight": frozen_weight,
    "module added later": module_added_later,
    "weight in a closure": weight_in_closure,
    "block added later": block_added_later,
    "nothing added": nothing_added,
}


def void(result: object) -> None:
    assert result is not None


def result_of(case: Callable[[], None]) -> str:
    try:
        case()
    except (TeraioError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def main() -> None:
    fake: Any = object.__new__(DeviceMesh)
    found = {"no group": result_of(lambda: void(teraio.shard(network(), fake)))}
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found |= {name: result_of(case) for name, case in CASES.items()}
    teraio.reset()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
