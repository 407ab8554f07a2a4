"""Compilations through Inductor in their own process.

    compile_child.py '[{"task": "train", "name": "ours", "budget": 5000000}, {"task": "twins"}, ...]'

The script prints one JSON object: the results by the requests' names. The results are numbers, budgets,
generated programs and cache hits. Inductor's cache is in TORCHINDUCTOR_CACHE_DIR, so one process finds the
programs that an earlier process compiled.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import counting_allocator
import slots_child
import steady
import torch
import torch._functorch.config as functorch_config
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from train import digest

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.passes.inductor import codegen
from teraio.passes.inductor import options as inductor_options
from teraio.runtime.engine import engine

SHAPE = Shape(vocabulary=256, hidden=128, intermediate=352, layers=2, heads=2, key_heads=1)
BATCH, LENGTH, STEPS = 24, 64, 5


@contextmanager
def sources() -> Iterator[list[str]]:
    """Yield a list that receives the source of each program that Inductor generates."""
    printed: list[str] = []
    with patch.object(GraphLowering, "save_output_code", staticmethod(printed.append)):
        yield printed


def looked_up() -> dict[str, int]:
    found = counters["inductor"]
    return {
        "hits": found["fxgraph_cache_hit"],
        "misses": found["fxgraph_cache_miss"],
        "bypasses": found["fxgraph_cache_bypass"],
        "whole": counters["aot_autograd"]["autograd_cache_hit"],
    }


def interrupted(run: Callable[[], Any]) -> int:
    """Call `run`, and raise KeyboardInterrupt in the first slot of a compiled program. Return how often the
    engine's `abandon_call` was called.
    """
    with (
        patch.object(engine.Engine, "run_slot", side_effect=KeyboardInterrupt),
        patch.object(engine.Engine, "abandon_call") as abandon,
        suppress(KeyboardInterrupt),
    ):
        run()
    return abandon.call_count


def train(request: dict[str, Any], counting: counting_allocator.Counting) -> dict[str, Any]:
    """Train a small Llama, with a budget or plainly.

    The request's `version` replaces the version of the pass that inserts slots into Inductor's programs. With
    `whole`, torch searches AOTAutograd's cache before Inductor's cache.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    others = counting.alive_bytes()
    model = Llama(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = request.get("budget", 0)
    os.environ["TERAIO_DISABLE"] = "" if budget else "1"
    options = {"memory": budget, **request.get("options", {})} if budget else {}
    compiled = torch.compile(model, backend="teraio", options=options)
    losses, peaks = [], []
    counts: list[dict[str, Any]] = [{}]
    generator = torch.Generator().manual_seed(1)
    with sources() as printed, patch.object(codegen, "VERSION", request.get("version", codegen.VERSION)):
        for _ in range(STEPS):
            tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=generator)
            counting.reset_peak()
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peaks.append(counting.peak_bytes() - others)
            counts.append(dict(teraio.stats()))
            del loss
    stats, ran = teraio.stats(), engine.ENGINE.tracker.tick_count if engine.ENGINE is not None else 0
    abandoned = interrupted(lambda: compiled(tokens[:, :-1], tokens[:, 1:])) if budget else 0
    teraio.reset()
    return {
        **looked_up(),
        "losses": losses,
        "digest": digest(model, optimizer),
        "peak": max(peaks),
        "evictions": stats.get("evictions", 0),
        "slots": ran,
        "last": {key: counts[-1].get(key, 0) - counts[-2].get(key, 0) for key in ("misses", "fetches")},
        "abandoned": abandoned,
        "printed": printed,
    }


class Hides(torch.autograd.Function):
    """A function that saves a product for its backward, but does not return the product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x @ w)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (product,) = ctx.saved_tensors
        return gradients[0] * product, None


class Shows(torch.autograd.Function):
    """A function that computes the same forward as `Hides`, and also returns the product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        product = x @ w
        ctx.mark_non_differentiable(product)
        return x.sin(), product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2, None


def twins(request: dict[str, Any], counting: counting_allocator.Counting) -> dict[str, Any]:
    """Compile `Hides` and `Shows`, whose forwards do the same computation.

    Return (1) the roles of the forwards' outputs, (2) whether the returned product is correct, and (3) the
    cache hits of the second compilation.
    """
    roles, results = [], []
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    for twin in (Hides, Shows):
        torch._dynamo.reset()
        counters.clear()
        slots_child.WATCH.append(slots_child.Tightest(counting))
        compiled = torch.compile(
            lambda x, twin=twin: twin.apply(x, w), backend=slots_child.backend("inductor", slotted=True)
        )
        results.append(compiled(x))
        (schedule,) = slots_child.WATCH.pop().programs
        roles.append(sorted(buffer.role for buffer in schedule.buffers if buffer.role != "argument"))
    seen = results[1][1].detach()
    return {"roles": roles, "equal": torch.equal(seen, x.detach() @ w), **looked_up()}


def slotted(request: dict[str, Any], counting: counting_allocator.Counting) -> dict[str, Any]:
    """Run a model of slots_models.py under `Tightest`, which stands for an engine with the smallest possible
    budget. The request gives Inductor's settings.
    """
    settings = inductor_options.merge_checked_settings(request.get("mode"), request.get("inductor", {}))
    with sources() as printed:
        result = slots_child.run({**request, "inner": "inductor", "settings": settings}, counting)
    return {**result, "printed": printed}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "twins": twins, "slotted": slotted}


def main() -> None:
    counting = counting_allocator.install_over_ours()
    torch.set_num_threads(1)
    steady.plans()
    results = {}
    for request in json.loads(sys.argv[1]):
        with functorch_config.patch(enable_autograd_cache=request.get("whole", False)):
            results[request["name"]] = TASKS[request["task"]](request, counting)
        gc.collect()
    print(json.dumps({"optimized": not __debug__, **results}))


if __name__ == "__main__":
    main()
