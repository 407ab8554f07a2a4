"""A training of models whose weights come from files, in a process that counts every byte of every tensor.

    adopt_train.py '["plain", "safetensors", ...]'

The script prints one JSON object. Per source of the weights, it holds the losses, a digest, the peaks, and
the numbers of adopted and evicted tensors. The source `plain` trains without a budget. The budget of each
later source is a fraction of the last plain peak.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
from typing import Any
from unittest.mock import patch

import counting_allocator
import steady
import torch
from adopt_cases import path

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.options import Settings
from teraio.runtime.engine import engine
from teraio.runtime.ledger import adoption
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import State
from teraio.session import session

SHAPE = Shape(vocabulary=512, hidden=128, intermediate=352, layers=3, heads=2, key_heads=1)
# For the source "held", a numpy array shares the bytes of this weight during the training.
HELD = "layers.1.up_proj.weight"


class Watch:
    """A context manager that counts evictions of weights, and measures memory, while a model trains."""

    def __init__(self, counting: counting_allocator.Counting) -> None:
        self.counting = counting
        self.evictions = self.late = self.adopting_peak = self.kept = self.peak = 0
        self.others = counting.alive_bytes()

    def __enter__(self) -> None:
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(patch.object(Mover, "end_evict", self._end_evict(Mover.end_evict)))
        self.patches.enter_context(
            patch.object(adoption, "copy_to_torch_allocator", self._own(adoption.copy_to_torch_allocator))
        )

    def __exit__(self, *_: Any) -> None:
        self.patches.close()

    def look(self) -> int:
        """Update the peak. Return the peak without the bytes that existed when the watch was made."""
        self.peak = max(self.peak, self.counting.peak_bytes())
        return self.peak - self.others

    def _end_evict(self, real: Any) -> Any:
        def end_evict(mover: Mover, record: Any) -> None:
            before = record.state
            real(mover, record)
            evicted = before is not State.EVICTED and record.state is State.EVICTED
            self.evictions += evicted and record.kind == "weight"

        return end_evict

    def _own(self, real: Any) -> Any:
        def own(candidate: Any) -> None:
            assert engine.ENGINE is not None
            self.late += engine.ENGINE.mover.counts.slots > 0
            self.look()
            before = self.counting.alive_bytes()
            self.counting.reset_peak()
            real(candidate)
            self.adopting_peak = max(self.adopting_peak, self.counting.peak_bytes() - before)
            self.kept += self.counting.alive_bytes() - before

        return own


def load(source: str) -> dict[str, torch.Tensor]:
    if source in {"safetensors", "later", "torch 2.11", "blocks"}:
        from safetensors.torch import load_file

        return load_file(path("model.safetensors"))
    state: dict[str, torch.Tensor] = torch.load(path("model.pt"), mmap=source == "mapped")
    if source == "numpy":
        state = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.numpy()
    return state


def model_of(state: dict[str, torch.Tensor]) -> Llama:
    with torch.device("meta"):
        model = Llama(SHAPE)
    take(model, state)
    return model


def take(model: Llama, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state, assign=True)
    model.head.weight = model.embedding.weight
    for layer in model.layers:  # in all layers, because layers that differ would not share a compiled program
        layer.attention.q_proj.weight.requires_grad_(False)  # type: ignore[union-attr]


def train(source: str, model: Llama, compiled: Any, watch: Watch, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses, peaks = [], []
    for _ in range(steps):
        tokens = torch.randint(0, SHAPE.vocabulary, (24, 97), generator=generator)
        watch.peak = 0
        watch.counting.reset_peak()
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if source == "looked at" and len(losses) in (2, 4):
            sum(float(p.detach().numpy()[0].sum()) for p in model.parameters())
        del loss
        peaks.append(watch.look())
    stuck = (
        []
        if engine.ENGINE is None
        else [record.name for record in engine.ENGINE.unresizable.records.values()]
    )
    teraio.reset()
    bits = b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters())
    return {
        "losses": losses,
        "peaks": peaks,
        "stuck": stuck,
        "digest": hashlib.sha256(bits).hexdigest(),
        "largest": max(p.untyped_storage().nbytes() for p in model.parameters()),
    }


def run(source: str, budget: int, counting: counting_allocator.Counting) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()
    for name in ("TERAIO_MEMORY", "TERAIO_DISABLE"):
        os.environ.pop(name, None)
    os.environ.update({"TERAIO_MEMORY": str(budget)} if budget else {"TERAIO_DISABLE": "1"})
    watch = Watch(counting)
    model = model_of(load(source))
    arrays = [model.get_parameter(HELD).detach().numpy()] if source == "held" else []
    settings: dict[str, Any] = {"backend": "teraio", "options": {"inner": "eager"}}
    compiled: Any = model
    if "blocks" in source:
        for layer in model.layers:
            layer.compile(**settings)
    else:
        compiled = torch.compile(model, **settings)
    if source == "later":  # compile the model for other weights, close the engine, then load the weights
        take(model, {name: tensor.clone() for name, tensor in load(source).items()})
        train(source, model, compiled, watch, 1)
        take(model, load(source))
        session.ensure_session(Settings.parse(settings["options"]))
    with watch, patch.object(adoption, "EXCHANGES", adoption.EXCHANGES and source != "torch 2.11"):
        result = train(source, model, compiled, watch, 6)
    del arrays
    names = ("evictions", "late", "adopting_peak", "kept")
    return {"budget": budget, **result, **{name: getattr(watch, name) for name in names}}


def main() -> None:
    from safetensors.torch import save_file

    counting = counting_allocator.install()
    torch.set_num_threads(1)
    steady.plans()
    torch._dynamo.config.error_on_recompile = True
    torch.manual_seed(0)
    state = Llama(SHAPE).state_dict()
    torch.save(state, path("model.pt"))
    save_file(state, path("model.safetensors"))
    del state
    done: dict[str, Any] = {}
    budget = 0
    for source in json.loads(sys.argv[1]):
        plain = source.startswith("plain")
        part = 0.6 if "blocks" in source else 0.36
        done[source] = run(source, 0 if plain else budget, counting)
        budget = int(max(done[source]["peaks"]) * part) if plain else budget
    print(json.dumps(done))


if __name__ == "__main__":
    main()
