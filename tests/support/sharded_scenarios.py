"""Things that people do with a sharded model besides a plain loop. Each scenario trains on several ranks, and
records values. The values within a budget must equal the values without one.

    scenario(run)      trains models that `run.compile` compiles, and calls `run.see` with each value
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import teraio

WIDTH, INNER, ROWS = 256, 1026, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    def __init__(self, blocks: int = 4, checkpointed: bool = False, unused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 40)
        self.unused = nn.Parameter(torch.ones(WIDTH, WIDTH)) if unused else None
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        result: torch.Tensor = self.head(x)
        return result


class Run:
    """One run of a scenario: the options of its compilations, and the values that it has recorded."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self.options, self.folder = options, folder
        self.seen: list[Any] = []
        self.fetches = 0
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.draw = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(0)

    def shard(self, model: nn.Module, **types: Any) -> nn.Module:
        return teraio.shard(model, self.mesh, **types)

    def compile(self, model: Any, **more: Any) -> Any:
        return torch.compile(model, backend="teraio", options=self.options, **more)

    def batch(self, rows: int = ROWS) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=self.draw)

    def see(self, *values: Any) -> None:
        for value in values:
            with torch.no_grad():
                local = value.to_local() if isinstance(value, DTensor) else value
            self.seen.append(local.detach().clone() if isinstance(local, torch.Tensor) else local)

    def start_again(self) -> None:
        """Forget all compiled models, and so end the engine."""
        self.fetches += teraio.stats().get("fetches", 0)
        torch._dynamo.reset()

    def step(self, run: Any, optimizer: torch.optim.Optimizer, rows: int = ROWS) -> None:
        loss = run(self.batch(rows)).square().mean()
        loss.backward()
        self.see(loss)
        optimizer.step()
        optimizer.zero_grad()


Scenario = Callable[[Run], None]


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)


def optimizers(run: Run) -> None:
    for settings in ({"foreach": True}, {"fused": True}, {"amsgrad": True}):
        model = run.shard(Net(2))
        optimizer, compiled = adam(model, **settings), run.compile(model)
        for _ in range(4):
            run.step(compiled, optimizer)
        run.see(*model.parameters())
        run.start_again()


def blocks_one_by_one(run: Run) -> None:
    model: Any = run.shard(Net())
    for block in model.blocks:
        block.compile(backend="teraio", options=run.options)
    optimizer = adam(model)
    for _ in range(4):
        run.step(model, optimizer)
    run.see(*model.parameters())


def activation_checkpoints(run: Run) -> None:
    model = run.shard(Net(checkpointed=True))
    optimizer, compiled = adam(model), run.compile(model)
    for _ in range(4):
        run.step(compiled, optimizer)
    run.see(*model.parameters())


def gradients_by_hand(run: Run) -> None:
    """Sum gradients of several batches, look at them, scale them, and keep them across steps."""
    model = run.shard(Net())
    optimizer, compiled = adam(model), run.compile(model)
    for step in range(4):
        for rows in (ROWS, 7):
            compiled(run.batch(rows)).square().mean().backward()
        grads: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        for grad in grads:
            grad.mul_(0.5)
            run.see(grad.full_tensor().sum() if step % 2 else grad)
        run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step < 2)
    run.see(*model.parameters())


def averages_and_evaluation(run: Run) -> None:
    """Keep moving averages of the weights, and evaluate both models, compiled and as plain code."""
    model = run.shard(Net())
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer, compiled = adam(model), run.compile(model)
    for _ in range(4):
        run.step(compiled, optimizer)
        averaged.update_parameters(model)
        with torch.no_grad():
            run.see(averaged(run.batch(5)), compiled(run.batch(6)), model(run.batch(7)))
    run.see(*averaged.parameters())


def state_dicts(run: Run) -> None:
    model = run.shard(Net())
    optimizer, compiled = adam(model), run.compile(model)
    for _ in range(2):
        run.step(compiled, optimizer)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run.step(compiled, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    for _ in range(2):
        run.step(compiled, optimizer)
    run.see(*model.state_dict().values())


def distributed_checkpoints(run: Run) -> None:
    """Save by DCP, also while the training goes on, and load into a new model."""
    folder = run.folder / f"dcp {len(run.options)}"
    model = run.shard(Net(unused=False))
    optimizer, compiled = adam(model), run.compile(model)
    for step in range(3):
        run.step(compiled, optimizer)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        if step == 1:
            dcp.save(state, checkpoint_id=folder / "1")
        if step == 2:
            own: Any = dist.new_group(backend="gloo")  # for collectives beside the training
            pending: Any = dcp.async_save(state, checkpoint_id=folder / "2", process_group=own)
            run.step(compiled, optimizer)
            pending.result()
    for name in ("1", "2"):
        run.start_again()
        other = run.shard(Net(unused=False))
        again = adam(other)
        weights, states = get_state_dict(other, again)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / name)
        set_state_dict(other, again, model_state_dict=weights, optim_state_dict=states)
        run.see(*other.parameters())
        compiled = run.compile(other)
        for _ in range(2):
            run.step(compiled, again)
        run.see(*other.parameters())


def types_and_shapes(run: Run) -> None:
    """Compute in bfloat16, with batches of changing sizes."""
    model = run.shard(Net(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    optimizer, compiled = adam(model), run.compile(model, dynamic=True)
    for rows in (ROWS, 9, 30, 9):
        loss = compiled(run.batch(rows).bfloat16()).float().square().mean()
        loss.backward()
        run.see(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.see(*model.parameters())


def collectives_of_user_code(run: Run) -> None:
    """Call collectives on weights, gradients and states, also while other code runs."""
    model = run.shard(Net())
    optimizer, compiled = adam(model), run.compile(model)
    for step in range(4):
        compiled(run.batch()).square().mean().backward()
        whole: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        grads = [grad.to_local() for grad in whole]
        works = [dist.all_reduce(grad, async_op=True) for grad in grads]
        if step % 2:
            with torch.no_grad():
                run.see(compiled(run.batch(3)))
        for work in works:
            work.wait()
        run.see(*grads)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            weights: list[Any] = [*model.parameters()]
            run.see(*(weight.full_tensor() for weight in weights))
    run.see(*model.parameters())


SCENARIOS: tuple[Scenario, ...] = (
    optimizers,
    blocks_one_by_one,
    activation_checkpoints,
    gradients_by_hand,
    averages_and_evaluation,
    state_dicts,
    distributed_checkpoints,
    types_and_shapes,
    collectives_of_user_code,
)


def seen_in(scenario: Scenario, memory: str | None, inner: str, folder: Path) -> list[Any]:
    """Run a scenario on this rank, within `memory` or without teraio. Return the recorded values."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"inner": inner}
    with contextlib.ExitStack() as stack:
        if memory is None:
            os.environ["TERAIO_DISABLE"] = "1"
            stack.callback(os.environ.pop, "TERAIO_DISABLE")
        else:
            options |= {"planner": "greedy", "warmup": 1, "memory": memory}
        stack.callback(teraio.reset)
        run = Run(options, folder)
        scenario(run)
        if memory is not None:
            fetches = run.fetches + teraio.stats().get("fetches", 0)
            assert fetches > 10, "nothing moves: the scenario shows nothing"
        return run.seen


def difference(ours: list[Any], plain: list[Any]) -> str:
    """Return the first value that differs, or ""."""
    if len(ours) != len(plain):
        return f"{len(ours)} values, not {len(plain)}"
    for number, (one, two) in enumerate(zip(ours, plain)):
        tensors = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
        if not (one.dtype == two.dtype and torch.equal(one, two) if tensors else one == two):
            return f"value {number}: {one} is not {two}"
    return ""
