"""Random trainings of sharded models. A case has a model, a mesh, an optimizer, a loop and a budget. All of
them are drawn from a seed. Each rank runs the case.

    run_case(case, plain)     the training without a budget: the results to compare with
    run_case(case, ...)       the same training within the budget, with the disturbances of `Trouble`
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import counting_allocator
import torch
import torch.distributed as dist
from generated_plans import random_plan, working_set_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import teraio
from teraio.formats.schedule import Step
from teraio.passes.slots.lifetimes import profile_of_steps
from teraio.runtime.engine import engine
from teraio.session import session

STEPS = 7
COUNTING: list[counting_allocator.Counting] = []  # set by the script at its start
SHARES = (1.0, 0.6, 0.4, 0.25)  # the budget, as a share of the plain training's peak


@dataclass(frozen=True)
class Case:
    """A training, without the budget and the disturbances."""

    seed: int
    inner: str
    width: int
    hidden: int
    words: int
    layers: int
    mesh: tuple[int, ...]
    optimizer: str
    tied: bool
    frozen: bool
    half: bool  # modules compute in bfloat16, and gradients are averaged in float32
    clip: bool
    batches: int  # batches whose gradients one step sums
    short_last: bool  # the last batch of one rank is shorter, so this rank compiles again
    evaluates: bool  # a forward without gradients after each step, which is not compiled
    by_blocks: bool  # each block is compiled by itself, so that blocks share one program

    @staticmethod
    def draw(seed: int, ranks: int, inner: str) -> Case:
        """Draw a case for this number of ranks."""
        draw = Random(seed)
        by_blocks = draw.random() < 0.6
        width = draw.choice((384, 512, 514))
        meshes = [(ranks,)] if ranks < 4 else [(ranks,), (2, ranks // 2)]
        return Case(
            seed=seed,
            inner=inner,
            width=width,
            hidden=draw.choice((1024, 1530, 1536)),
            words=draw.choice((200, 256, 331)),
            layers=draw.randint(9, 12) if by_blocks else draw.randint(4, 6),
            mesh=draw.choice(meshes),
            optimizer=draw.choice(("AdamW", "AdamW", "SGD", "RMSprop")),
            tied=draw.random() < 0.3,
            frozen=draw.random() < 0.3,
            half=draw.random() < 0.25,
            clip=draw.random() < 0.4,
            batches=draw.choice((1, 1, 2)),
            short_last=draw.random() < 0.2,
            evaluates=draw.random() < 0.2,
            by_blocks=by_blocks,
        )


@dataclass
class Trouble:
    """Disturbances of one rank, drawn from a seed of its own."""

    seed: int = 0
    plan_at: int = STEPS  # the step from which on the rank follows a random plan
    again_at: int = STEPS  # the step before which the budget changes, so that the rank plans again
    delays: float = 0.0  # part of the slots at which the rank sleeps
    flushes: float = 0.0  # part of the slots at which every tensor leaves that may leave

    @staticmethod
    def draw(seed: int) -> Trouble:
        """Draw the disturbances of one rank."""
        draw = Random(seed)
        return Trouble(
            seed=seed,
            plan_at=draw.choice((2, 3, 4, STEPS)),
            again_at=draw.choice((3, 4, 5, STEPS)),
            delays=draw.choice((0.0, 0.02)),
            flushes=draw.choice((0.0, 0.0, 0.1, 0.5)),
        )


@dataclass
class Outcome:
    """The results of one rank: every number of the training that user code can see."""

    numbers: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    peak_bytes: int = 0
    late_peak_bytes: int = 0  # the peak from the third step on
    late_overrun_bytes: int = 0  # the largest overrun from the third step on
    stats: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)  # records of weights and states, and their bytes

    def difference(self, other: Outcome) -> str:
        """Return the first result that differs from `other`, or ""."""
        for number, (mine, its) in enumerate(zip(self.numbers, other.numbers)):
            if mine != its:
                return f"number {number}: {mine} is not {its}"
        if len(self.numbers) != len(other.numbers) or len(self.tensors) != len(other.tensors):
            return "another number of results"
        for number, (one, two) in enumerate(zip(self.tensors, other.tensors)):
            if one.dtype != two.dtype or not torch.equal(one, two):
                return f"tensor {number}"
        return ""


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(case.width)
        self.up = nn.Linear(case.width, case.hidden)
        self.down = nn.Linear(case.hidden, case.width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.linspace(0, 0.1, case.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x + self.offset.to(x.dtype))
        result: torch.Tensor = x + self.scale * self.down(torch.tanh(self.up(y)))
        return result


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.words, case.width)
        blocks = [Block(case) for _ in range(case.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(case.width, case.words, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen:
            blocks[0].up.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), wanted.flatten())


def batch_of(case: Case, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1_000_000 * case.seed + 100 * number + rank)
    short = case.short_last and rank == 1 and number >= (STEPS - 2) * case.batches
    tokens = torch.randint(case.words, (1 if short else 2, 97), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    mesh = init_device_mesh("cpu", case.mesh)
    types: dict[str, Any] = (
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.half else {}
    )
    return teraio.shard(Net(case), mesh, **types)


def compile_case(case: Case, model: Any, options: dict[str, Any]) -> Any:
    if not case.by_blocks:
        return torch.compile(model, backend="teraio", options=options, fullgraph=True)
    for block in model.blocks:
        block.compile(backend="teraio", options=options, fullgraph=True)
    return model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"momentum": 0.9} if case.optimizer == "SGD" else {}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(weights, lr=1e-3, **settings)
    return optimizer


def run_case(case: Case, memory_bytes: int | None, trouble: Trouble | None = None, **options: Any) -> Outcome:
    """Run a case on this rank. None switches teraio off. 0 is the smallest possible budget."""
    torch._dynamo.reset()
    if memory_bytes is None:
        os.environ["TERAIO_DISABLE"] = "1"
    else:
        os.environ.pop("TERAIO_DISABLE", None)
        memory = f"{memory_bytes}B" if memory_bytes else "min"
        options = {"planner": "greedy", "warmup": 1, "plan_time": "1s", "memory": memory, **options}
    try:
        with disturbed(trouble or Trouble()):
            return _train(case, options, trouble or Trouble())
    finally:
        teraio.reset()
        os.environ.pop("TERAIO_DISABLE", None)


def _train(case: Case, options: dict[str, Any], trouble: Trouble) -> Outcome:
    rank, outcome, counting = dist.get_rank(), Outcome(), COUNTING[0]
    gc.collect()
    before = counting.alive_bytes()
    counting.reset_peak()
    model = make_model(case)
    run = compile_case(case, model, {"inner": case.inner, **options})
    optimizer = make_optimizer(case, model)
    for step in range(STEPS):
        if step == 2:
            outcome.peak_bytes = counting.peak_bytes() - before
            counting.reset_peak()
        if step == trouble.plan_at:
            follow_random_plan(trouble.seed)
        if step == trouble.again_at and session.SESSION is not None:
            teraio.set_memory(engine_now().residency.budget_bytes + 4096)
        for number in range(step * case.batches, (step + 1) * case.batches):
            loss = run(*batch_of(case, number, rank)) / case.batches
            loss.backward()
            outcome.numbers.append(loss.item())
        if case.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            outcome.numbers.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            found = int(teraio.stats().get("step_overrun_bytes", 0))
            outcome.late_overrun_bytes = max(outcome.late_overrun_bytes, found)
        if case.evaluates:
            with torch.no_grad():
                outcome.numbers.append(model(*batch_of(case, step, rank)).item())
    outcome.late_peak_bytes = counting.peak_bytes() - before
    outcome.peak_bytes = max(outcome.peak_bytes, outcome.late_peak_bytes)
    outcome.stats = dict(teraio.stats())
    if session.SESSION is not None:
        for record in engine_now().residency.records.values():
            outcome.weights[record.name] = record.size_bytes
    outcome.tensors = [local_copy(parameter) for parameter in model.parameters()]
    for states in optimizer.state.values():
        outcome.tensors += [local_copy(v) for v in states.values() if isinstance(v, torch.Tensor)]
    return outcome


def local_copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


# ---- disturbances


def engine_now() -> engine.Engine:
    assert engine.ENGINE is not None
    return engine.ENGINE


MEASURED: list[Step] = []  # the steps that the engine has measured in this case


def follow_random_plan(seed: int) -> None:
    """Follow a random plan for the last measured step from now on."""
    if session.SESSION is None or not MEASURED:
        return
    profile, now = profile_of_steps(MEASURED[-1:], "sharded"), engine_now()
    budget = max(now.residency.budget_bytes - now.residency.reserve_bytes, *working_set_bytes(profile))
    now.follow_plan(random_plan(profile, budget, Random(seed).choice((0.3, 0.6, 1.0)), seed))


@contextmanager
def disturbed(trouble: Trouble) -> Iterator[None]:
    """Sleep and evict at slots of this rank, and collect its measured steps, in the `with` block."""
    draw, run_slot = Random(trouble.seed), engine.Engine.run_slot
    init = engine.Engine.__init__

    def disturb(self: engine.Engine, *arguments: Any) -> None:
        if trouble.delays and draw.random() < trouble.delays:
            time.sleep(0.01)
        run_slot(self, *arguments)
        if trouble.flushes and draw.random() < trouble.flushes:
            flush(self)

    def collect(self: engine.Engine, *arguments: Any, **settings: Any) -> None:
        init(self, *arguments, **settings)
        on_step = self.on_step

        def note(step: Step | None) -> None:
            if step is not None:
                MEASURED.append(step)
            if on_step is not None:
                on_step(step)

        self.on_step = note

    MEASURED.clear()
    with patch.object(engine.Engine, "run_slot", disturb), patch.object(engine.Engine, "__init__", collect):
        yield


def flush(now: engine.Engine) -> None:
    """Evict every tensor that this slot allows to leave."""
    residency = now.residency
    residency.refused.clear()
    for record in residency._eviction_candidates():
        if residency.try_evict(record):
            residency.try_end_evict(record)
