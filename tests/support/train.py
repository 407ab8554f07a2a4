"""Training runs in their own process, which counts every byte of every tensor from the start.

    train.py '[{"name": "plain"}, {"name": "half", "part": 0.5, "of": "plain", "options": {...}}, ...]'

The budget of a run is `budget` bytes, or `part` times the peak of the run that `of` names. `plant` names a
bug to plant in the engine. The script prints one JSON line per run: its name (`run`), its losses, a digest of
its weights and optimizer states, and the peak bytes of each step. The line also holds the engine's counts per
step, and the error that ended the run, if any.

For each inner backend, the model is compiled twice, plainly and with slots. All runs share these compiled
models and start from the same weights. Runs can share a compiled program, because a compiled program does not
depend on budget, plan or store.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import counting_allocator
import steady
import torch
import unnoted

import teraio
from teraio import _native
from teraio.cli.demo_model import Llama, Shape
from teraio.errors import StoreError
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.options import Settings
from teraio.runtime.engine import engine
from teraio.runtime.store import ticket
from teraio.runtime.store.store import Store
from teraio.session import session

SHAPE = Shape(vocabulary=512, hidden=128, intermediate=352, layers=3, heads=2, key_heads=1)
BATCH, LENGTH = 24, 96


# Each of these bugs must change the numbers, or end in an error.
PLANTS: dict[str, list[Any]] = {
    # With this bug, kernels run before their bytes have arrived.
    "drop_the_wait": [patch.object(ticket.StoreTicket, "wait", lambda self: None)],
    # With this bug, dirty tensors count as clean, so the engine fetches an old copy or none.
    "skip_the_write": [patch.object(Store, "write", lambda self, *rest, **named: unnoted.Done())],
    # With this bug, the optimizer's writes do not count, so the engine fetches the copy from before the
    # update.
    "forget_the_update": [
        *unnoted.writes(),
        patch("teraio.runtime.engine.engine.wrote_bound", lambda bound, written: None),
        patch("teraio.runtime.step.quiet_call.wrote_bound", lambda bound, written: None),
    ],
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for bug in PLANTS[name] if name else []:
            stack.enter_context(bug)
        yield


@contextlib.contextmanager
def faulty_store(rule: dict[str, Any] | None) -> Iterator[None]:
    """Put a fault shim around the I/O of stores that are opened in this block. Operations fail by the
    rule.
    """

    def wrap(inner: _native.Io) -> _native.Io:
        shim = _native.FaultIo(inner)
        if rule:
            shim.add(**rule)
        return shim

    def opened(*places: Any, **settings: Any) -> Store:
        return Store(*places, wrap=wrap, **settings)

    with patch.object(Store, "open", opened):
        yield


def hostile(seed: int, running: engine.Engine) -> Plan:
    """Return a plan of random moves at existing ticks, mostly of existing tensors. The plan is well-formed
    but senseless.
    """
    choose = random.Random(seed)
    ticks = max(running.tracker.tick_count, 1)
    names = [
        *(r.name for r in running.residency.records.values()),
        *running.residency.expected_uses.uses,
        "no such tensor",
    ]
    made: list[Evict | Fetch] = []
    for _ in range(choose.randrange(50, 400)):
        first, second = sorted(choose.randrange(2 * ticks) for _ in range(2))
        name = choose.choice(names)
        if choose.random() < 0.5:
            made.append(Evict(name, "ssd", second, choose.choice([first, None])))
        else:
            made.append(Fetch(name, "ssd", first, second))
    return Plan("", "hostile", running.residency.budget_bytes, (), tuple(made))


NAMES = ("TERAIO_PLANNER", "TERAIO_PLANNING", "TERAIO_CACHE_DIR")
OUTSIDE = {name: os.environ[name] for name in NAMES if name in os.environ}


class Trainer:
    """The model for one inner backend, compiled plainly and with slots."""

    def __init__(self, inner: str) -> None:
        torch.manual_seed(0)
        self.inner = inner
        self.model = Llama(SHAPE)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        # The options of the two compilations must differ. With equal options, Dynamo would use the first
        # compiled program for both.
        self.plain = torch.compile(self.model, backend="teraio", options={"inner": inner})
        self.ours = torch.compile(
            self.model, backend="teraio", options={"inner": inner, "on_fallback": "warn"}
        )

    def run(
        self, request: dict[str, Any], done: dict[str, Any], counting: counting_allocator.Counting
    ) -> dict[str, Any]:
        budget = (
            int(max(done[request["of"]]["peaks"]) * request["part"])
            if "part" in request
            else request.get("budget", 0)
        )
        result: dict[str, Any] = {"losses": [], "peaks": [], "counts": [], "budget": budget, "error": ""}
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        settings = {"memory": budget or None, "disable": None if budget else 1, **request.get("options", {})}
        environment = {f"TERAIO_{name.upper()}": str(value) for name, value in settings.items() if value}
        for name in [name for name in os.environ if name.startswith("TERAIO_")]:
            del os.environ[name]
        os.environ.update(OUTSIDE | environment)
        try:
            if budget:
                with faulty_store(request.get("fault")):
                    session.ensure_session(Settings.parse({"inner": self.inner}))
            with planted(request.get("plant")):
                self._train(self.ours if budget else self.plain, optimizer, request, result, counting)
                teraio.reset()
        except Exception as error:  # noqa: BLE001  the test checks the error
            result["error"] = f"{type(error).__name__}: {error}"
            with contextlib.suppress(StoreError):
                teraio.reset()
        self.model.zero_grad()
        result["digest"] = digest(self.model, optimizer)
        return result

    def _train(
        self,
        compiled: Any,
        optimizer: Any,
        request: dict[str, Any],
        result: dict[str, Any],
        counting: counting_allocator.Counting,
    ) -> None:
        others = counting.alive_bytes() - sum(p.nbytes for p in self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        last: dict[str, int] = {}
        for step in range(request.get("steps", 8)):
            tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=generator)
            counting.reset_peak()
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result["losses"].append(loss.item())
            del loss
            result["peaks"].append(counting.peak_bytes() - others)
            stats = {name: count for name, count in teraio.stats().items() if isinstance(count, int)}
            result["counts"].append({key: stats[key] - last.get(key, 0) for key in stats})
            last = stats
            if "hostile" in request and engine.ENGINE is not None:
                engine.ENGINE.follow_plan(hostile(request["hostile"] * 1000 + step, engine.ENGINE))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.parameters()]
    tensors += [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    return hashlib.sha256(b"".join(t.detach().clone().numpy().tobytes() for t in tensors)).hexdigest()


def main() -> None:
    counting = counting_allocator.install_over_ours()
    torch.set_num_threads(1)
    steady.plans()
    trainers: dict[str, Trainer] = {}
    done: dict[str, dict[str, Any]] = {}
    for request in json.loads(sys.argv[1]):
        inner = request.get("inner", "eager")
        if inner not in trainers:
            trainers[inner] = Trainer(inner)
        done[request["name"]] = trainers[inner].run(request, done, counting)
        print(json.dumps({"run": request["name"], **done[request["name"]]}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
