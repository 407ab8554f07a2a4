"""Trainings in their own process. The engine assumes a very slow SSD, so that it recomputes activations
instead of fetching them.

    recompute_train.py '[{"name": "off", "model": "mlp", "budget": 14000000, "options": {...}}, ...]'

The script prints one JSON object. Per run, it holds the losses, a digest of the weights, the engine's counts
per step and the peak of all tensors. It also holds the number of compilations, the recomputed tensors, and
the last plan. The keys of a run are:

plain      without teraio
replay     with the plan of the named run
cut        with the recomputed tensors of the named run's plan, and an ample budget
offline    with the plan that `teraio plan` makes from the named run's profile
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import counting_allocator
import steady
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import teraio
from teraio.cli import main as cli
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import compiled_extension_folder
from teraio.runtime.step import eager_memory
from teraio.session import plan_reuse, session

# At this rate of the SSD link, recomputing a kernel's result is hundreds of times as fast as fetching the
# result.
SLOW_BYTES_PER_S = 10**6
WIDTH = 192


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if kind == "attention" else None
        self.dropout = nn.Dropout(0.2) if kind == "attention" else nn.Identity()

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        if self.qkv is not None:
            parts = self.qkv(x).view(4, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4).unbind(0)
            weights = (parts[0] @ parts[1].transpose(-1, -2)).softmax(-1)
            x = x + (weights @ parts[2]).transpose(1, 2).reshape(x.shape)
        h = self.dropout(nn.functional.gelu(self.into(x)))
        return x + self.out(nn.functional.silu(h) * h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpoint":
            made: torch.Tensor = checkpoint(self.inside, x, use_reentrant=False)
            return nn.functional.gelu(made) * made.sigmoid()
        return self.inside(x)


def model_of(kind: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for _ in range(layers)))


def cache_folder(folder: str) -> Path:
    """Return a cache folder with a copy of the compiled C++, because building it takes longer than these
    trainings.
    """
    made, built = Path(folder) / "cache", compiled_extension_folder()
    if built is not None and built.exists() and not made.exists():
        shutil.copytree(built, made / built.name)
    return made


def plan_offline(run: Path, budget: int, target: str) -> None:
    files = [f"{run}.profile.json", "--machine", f"{run}.machine.json", "-o", target]
    request = ["--memory", str(budget), "--planner", "greedy", "--recompute", "auto"]
    with redirect_stdout(sys.stderr):
        assert cli.main(["plan", *files, *request]) == 0


def run(
    request: dict[str, Any], plans: dict[str, str], counting: counting_allocator.Counting, folder: str
) -> dict[str, Any]:
    model = model_of(request["model"], request.get("layers", 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options: dict[str, Any] = {"inner": "eager", "memory": request.get("budget", 2**34), "planner": "greedy"}
    options |= {"plan_time": "20s", "warmup": 3, "planning": "inline", **request.get("options", {})}
    files = {name: str(Path(folder) / f"{request['name']}.{name}.json") for name in ("profile", "plan")}
    if request.get("profile"):
        options["profile"] = files["profile"]
    if "offline" in request:
        options["plan"] = files["plan"]
        plan_offline(Path(folder) / request["offline"], request["budget"], files["plan"])
    if "replay" in request or "cut" in request:
        plan = Plan.loads(plans[request.get("replay") or request["cut"]])
        if "cut" in request:
            plan = replace(plan, moves=(), homes=(), fingerprint="0" * 32)
        options["plan"] = files["plan"]
        plan.write(options["plan"])
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    if "plain" in request:
        compiled = torch.compile(model, backend="aot_eager")
    os.environ["TERAIO_CACHE_DIR"] = str(cache_folder(folder)) if request.get("cache") else "off"
    others = counting.alive_bytes() - sum(p.nbytes for p in model.parameters())
    result: dict[str, Any] = {"losses": [], "counts": [], "peaks": [], "programs": []}
    torch.manual_seed(1)
    last: dict[str, int] = {}
    for number in range(request.get("steps", 11)):
        x = torch.randn(request.get("rows", 512), WIDTH, generator=torch.Generator().manual_seed(number))
        counting.reset_peak()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item().hex())
        stats = {key: n for key, n in teraio.stats().items() if isinstance(n, int)}
        result["counts"].append({key: stats[key] - last.get(key, 0) for key in stats})
        result["peaks"].append(counting.peak_bytes() - others)
        last = stats
    result["compiles"] = counters["stats"]["unique_graphs"]
    if session.SESSION is not None:
        chosen = session.SESSION.recomputation.sets
        result["nodes"] = sorted(node for nodes in chosen.values() for node in nodes)
        if request.get("profile"):
            session.SESSION.planning.machine.write(f"{folder}/{request['name']}.machine.json")
    teraio.reset()
    torch._dynamo.reset()
    counters.clear()
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result["digest"] = hashlib.sha256(parameters).hexdigest()
    return result


def main(requests: str, folder: str) -> None:
    counting = counting_allocator.install()
    torch.set_num_threads(1)
    # The engine ignores measured memory below this number of bytes. For such small models, the system's
    # memory count is too noisy.
    eager_memory.NOISE_BYTES = 2**24
    steady.plans(SLOW_BYTES_PER_S)
    plans: dict[str, str] = {}
    done: dict[str, Any] = {}
    keep = plan_reuse.EarlierPlans.save_plan
    for request in json.loads(requests):

        def kept(self: plan_reuse.EarlierPlans, plan: Plan, name: str = request["name"]) -> None:
            plans[name] = plan.dumps()
            keep(self, plan)

        plan_reuse.EarlierPlans.save_plan = kept  # type: ignore[method-assign]
        done[request["name"]] = run(request, plans, counting, folder)
        done[request["name"]]["kept"] = json.loads(plans.get(request["name"], "{}"))
    print(json.dumps(done))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], made)
