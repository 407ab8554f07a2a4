"""Trainings of the model classes in zoo_models.py, in a process that counts every byte of every tensor.

    zoo_child.py '{"rows": ["Llama", "T5"], "steps": 4, "inner": "eager"}'

Each class first trains plainly. This training also measures the floor, the least memory with which a step can
run. The script then searches for the smallest working budget. The class trains again under three budgets: the
smallest one, nine tenths of the plain training's peak, and the budget halfway between these two. The script
prints one JSON object per row.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import re
import sys
import time
from typing import Any

import counting_allocator
import torch
import zoo_models
from floor import ENGINES_OWN_BYTES, Floor

import teraio
from teraio.errors import BudgetError
from teraio.options import Settings
from teraio.runtime.engine import engine
from teraio.session import session
from teraio.units import parse_bytes

PROBES_MAX = 30
PROBE_STEPS = 2  # steps; optimizer states exist from the second step on


class Trainer:
    """A model that is compiled plainly and with slots. All runs share the two compiled models and start from
    the same weights.
    """

    def __init__(self, row: zoo_models.Row, inner: str, counting: counting_allocator.Counting) -> None:
        self.row, self.inner, self.counting = row, inner, counting
        torch.manual_seed(0)
        self.model = row.make().train()
        state = io.BytesIO()
        torch.save(self.model.state_dict(), state)
        self.start = state.getvalue()  # serialized, because the bytes of tensors would be counted
        self.floor = Floor(counting)
        if inner == "eager":
            self.plain = torch.compile(self.model, backend=self.floor.backend)
        else:
            # The options must differ from the options of `ours`. With equal options, Dynamo would use the
            # first compiled program for both.
            self.plain = torch.compile(self.model, backend="teraio", options={"inner": inner, "warmup": 1})
        self.ours = torch.compile(self.model, backend="teraio", options={"inner": inner})

    def optimizer(self) -> torch.optim.Optimizer:
        if self.row.optimizer == "sgd":
            return torch.optim.SGD(self.model.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def run(self, steps: int, budget: int = 0, **options: str | int) -> dict[str, Any]:
        """Train. Return losses, the peak of each step, and a digest of weights, buffers and states. If the
        budget is too small, return the error.
        """
        self.model.load_state_dict(torch.load(io.BytesIO(self.start)))
        optimizer = self.optimizer()
        result: dict[str, Any] = {"losses": [], "peaks": [], "misses": [], "budget": budget, "error": ""}
        settings = (
            {"MEMORY": budget, "WARMUP": 1, "PLANNING": "inline", **options} if budget else {"DISABLE": 1}
        )
        for name in [name for name in os.environ if name.startswith("TERAIO_")]:
            del os.environ[name]
        os.environ.update({f"TERAIO_{name}": str(value) for name, value in settings.items()})
        try:
            if budget:
                session.ensure_session(Settings.parse({"inner": self.inner}))
            self._train(steps, optimizer, result)
        except BudgetError as error:
            result["error"] = str(error)
        teraio.reset()
        self.model.zero_grad()
        result["digest"] = self._digest(optimizer)
        return result

    def _train(self, steps: int, optimizer: torch.optim.Optimizer, result: dict[str, Any]) -> None:
        tensors = (*self.model.parameters(), *self.model.buffers())
        own = {storage._cdata: storage.nbytes() for t in tensors for storage in [t.untyped_storage()]}
        gc.collect()
        others = self.counting.alive_bytes() - sum(own.values())
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        budget, missed = result["budget"], 0
        result["own"] = sum(own.values())
        for step in range(steps):
            batch = self.row.batch(generator)
            measured = step == steps - 1 and not budget and self.inner == "eager"
            self.counting.reset_peak()
            if measured:
                self.floor.start(self.model, optimizer, others)
            loss = (self.ours if budget else self.plain)(**batch).loss
            if budget and step == steps - 1:
                result["managed"] = self._managed()
            loss.backward()
            if measured:
                self.floor.stop(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
            result["losses"].append(loss.item())
            del loss, batch
            if not measured:
                result["peaks"].append(self.counting.peak_bytes() - others)
            misses = teraio.stats().get("misses", 0)
            result["misses"].append(misses - missed)
            missed = misses

    def _managed(self) -> dict[str, Any]:
        """Return the number of bytes of evictable weights and saved activations. Also return the names of
        unevictable weights and activations. The training calls this function between forward and backward.
        """
        assert engine.ENGINE is not None
        records = engine.ENGINE.residency.records
        free = {key: record for key, record in records.items() if record.evictable and not record.is_dead()}
        managed = sum(r.size_bytes for r in free.values() if r.kind in {"weight", "activation"})
        names = {record.name for record in free.values()}
        named = [(n, p.nbytes, p.untyped_storage()._cdata) for n, p in self.model.named_parameters()]
        stuck = {name: size_bytes for name, size_bytes, key in named if key not in free}
        # An element of a tuple has the name of its node as prefix: `0.split.1` belongs to the node `split` in
        # call 0.
        nodes = {".".join(name.split(".")[:2]) for name in names}
        stuck |= {n: size for n, size in self.floor.saved_names.items() if n not in nodes}
        return {"bytes": managed, "stuck": sorted(stuck.items(), key=lambda item: -item[1])[:10]}

    def smallest(self, start: int) -> int:
        """Return the smallest budget that works. If a budget is too small, the engine's error names the next
        budget to try.
        """
        budget = start
        for _ in range(PROBES_MAX):
            error = self.run(PROBE_STEPS, budget, PLANNER="none")["error"]
            if not error:
                return budget
            named = re.search(r"Give at least ([\d.]+ \w+)", error)
            assert named, error
            print(f"{self.row.name}: {budget / 1e6:.1f} MB: {error}", file=sys.stderr)
            budget = parse_bytes(named[1].removesuffix(" bytes"))
        raise AssertionError(f"no budget that works was found from {start} to {budget}")

    def _digest(self, optimizer: torch.optim.Optimizer) -> str:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [v for p in self.model.parameters() for v in optimizer.state.get(p, {}).values()]
        digest = hashlib.sha256()
        for tensor in tensors:
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            digest.update(own.view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def train(
    row: zoo_models.Row, inner: str, steps: int, counting: counting_allocator.Counting
) -> dict[str, Any]:
    began = time.perf_counter()
    trainer = Trainer(row, inner, counting)
    plain = trainer.run(steps)
    peak, floor = max(plain["peaks"]), trainer.floor
    smallest = trainer.smallest(floor.floor_bytes or peak // 4)
    large = max(int(peak * 0.9), smallest)
    budgets = sorted({large, (large + smallest) // 2, smallest}, reverse=True)
    return {
        "name": row.name,
        "plain": plain,
        "floor": floor.floor_bytes,
        "floor_kernel": floor.kernel,
        "floor_tensors": floor.floor_bytes - ENGINES_OWN_BYTES,
        "calls": floor.calls,
        "smallest": smallest,
        "total": sum(floor.weights.values()) + sum(floor.saved_names.values()),
        "runs": [trainer.run(steps, budget) for budget in budgets],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    counting = counting_allocator.install_over_ours()
    torch.set_num_threads(1)
    # Dynamo's recompile limit must be high, because all layers share their code and each layer is compiled
    # twice. At the limit, Dynamo would run layers uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    request = json.loads(sys.argv[1])
    rows = {row.name: row for row in zoo_models.ROWS}
    for name in request["rows"]:
        torch._dynamo.reset()
        result = train(rows[name], request.get("inner", "eager"), request["steps"], counting)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
