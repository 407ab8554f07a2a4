"""Training runs in a process of their own, where every byte of every tensor is counted from the start.

    train.py '[{"name": "plain"}, {"name": "half", "part": 0.5, "of": "plain", "options": {...}}, ...]'

where `part` is a part of the peak of the run `of` (or `budget` a number of bytes), prints one JSON line per
run: its name (`run`), its losses, a digest of its weights and optimizer states, the peak bytes of each step,
the engine's counts per step, and the error that ended it, if one did. `plant` names a bug to put into the
engine.

The model is compiled twice per inner program, plainly and with slots; the runs share these two and start from
the same weights: a budget, a plan, a store are no part of a compiled program.
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
from teraio.runtime.ledger import residency
from teraio.runtime.store import ticket
from teraio.runtime.store.store import Store
from teraio.session import session

SHAPE = Shape(vocabulary=512, hidden=128, intermediate=352, layers=3, heads=2, key_heads=1)
BATCH, LENGTH = 24, 96


# Each of these bugs must change the numbers, or end in an error.
PLANTS: dict[str, list[Any]] = {
    # kernels run before the bytes are there
    "drop_the_wait": [patch.object(ticket.StoreTicket, "wait", lambda self: None)],
    # dirty tensors are taken for clean: an old copy, or none, comes back
    "skip_the_write": [patch.object(Store, "write", lambda self, *rest, **named: unnoted.Done())],
    # what the optimizer wrote is taken for clean: the copy of before comes back
    "forget_the_update": [
        *unnoted.writes(),
        patch.object(residency.Residency, "mark_written", lambda self, bound, written: None),
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
    """Stores that are opened meanwhile have a shim around their I/O that goes wrong as the rule says."""

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
    """A plan of random moves of tensors that exist, at ticks that exist: valid to look at and nothing
    else."""
    choose = random.Random(seed)
    ticks = max(running.tracker.tick_count, 1)
    names = [*(r.name for r in running.residency.records.values()), *running.residency.uses, "no such tensor"]
    made: list[Evict | Fetch] = []
    for _ in range(choose.randrange(50, 400)):
        first, second = sorted(choose.randrange(2 * ticks) for _ in range(2))
        name = choose.choice(names)
        if choose.random() < 0.5:
            made.append(Evict(name, "ssd", second, choose.choice([first, None])))
        else:
            made.append(Fetch(name, "ssd", first, second))
    return Plan("", "hostile", running.residency.budget_bytes, (), tuple(made))


OUTSIDE = {name: os.environ[name] for name in ("TERAIO_PLANNER", "TERAIO_CACHE_DIR") if name in os.environ}


class Trainer:
    """The model in one inner program, compiled plainly and with slots."""

    def __init__(self, inner: str) -> None:
        torch.manual_seed(0)
        self.inner = inner
        self.model = Llama(SHAPE)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        # The two must differ in their options, or Dynamo gives both the program that was compiled first.
        self.plain = torch.compile(self.model, backend="teraio", options={"inner": inner})
        self.ours = torch.compile(
            self.model, backend="teraio", options={"inner": inner, "on_fallback": "warn"}
        )

    def run(
        self, asked: dict[str, Any], done: dict[str, Any], counting: counting_allocator.Counting
    ) -> dict[str, Any]:
        budget = (
            int(max(done[asked["of"]]["peaks"]) * asked["part"])
            if "part" in asked
            else asked.get("budget", 0)
        )
        result: dict[str, Any] = {"losses": [], "peaks": [], "counts": [], "budget": budget, "error": ""}
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        settings = {"memory": budget or None, "disable": None if budget else 1, **asked.get("options", {})}
        environment = {f"TERAIO_{name.upper()}": str(value) for name, value in settings.items() if value}
        for name in [name for name in os.environ if name.startswith("TERAIO_")]:
            del os.environ[name]
        os.environ.update(OUTSIDE | environment)
        try:
            if budget:
                with faulty_store(asked.get("fault")):
                    session.ensure_session(Settings.parse({"inner": self.inner}))
            with planted(asked.get("plant")):
                self._train(self.ours if budget else self.plain, optimizer, asked, result, counting)
                teraio.reset()
        except Exception as error:  # noqa: BLE001  the test looks at it
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
        asked: dict[str, Any],
        result: dict[str, Any],
        counting: counting_allocator.Counting,
    ) -> None:
        others = counting.alive_bytes() - sum(p.nbytes for p in self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        last: dict[str, int] = {}
        for step in range(asked.get("steps", 8)):
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
            if "hostile" in asked and engine.ENGINE is not None:
                engine.ENGINE.follow_plan(hostile(asked["hostile"] * 1000 + step, engine.ENGINE))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.parameters()]
    tensors += [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    return hashlib.sha256(b"".join(t.detach().clone().numpy().tobytes() for t in tensors)).hexdigest()


def main() -> None:
    counting = counting_allocator.install()
    torch.set_num_threads(1)
    steady.plans()
    trainers: dict[str, Trainer] = {}
    done: dict[str, dict[str, Any]] = {}
    for asked in json.loads(sys.argv[1]):
        inner = asked.get("inner", "eager")
        if inner not in trainers:
            trainers[inner] = Trainer(inner)
        done[asked["name"]] = trainers[inner].run(asked, done, counting)
        print(json.dumps({"run": asked["name"], **done[asked["name"]]}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
