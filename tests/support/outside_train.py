"""Trains a Llama whose blocks alone are compiled, in a process that counts every byte of every tensor: its
head and its loss are user code, which takes more memory than a block.

    outside_train.py '[{"name": "half", "part": 0.6, "of": "plenty", "planner": "none", "steps": 4}, ...]'

(and `wide`: the embedding and the head are most of the model)
prints one JSON object: per run the losses, the peak bytes of each step, the largest overrun until then, what
was learnt of user code after each call, and the error that ended it. All runs share what the first compiles.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from typing import Any

import counting_allocator
import torch

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.errors import TeraioError
from teraio.options import Settings
from teraio.runtime.engine import engine
from teraio.session import session

SHAPE = Shape(vocabulary=2048, hidden=128, intermediate=352, layers=4, heads=2, key_heads=1)
BATCH, LENGTH = 16, 96
WIDE, WIDE_BATCH = replace(SHAPE, vocabulary=16384), 1


class Trainer:
    def __init__(self, counting: counting_allocator.Counting, wide: bool) -> None:
        self.counting = counting
        self.shape, self.batch = (WIDE, WIDE_BATCH) if wide else (SHAPE, BATCH)
        torch.manual_seed(0)
        self.model = Llama(self.shape)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        for block in self.model.layers:
            block.compile(backend="teraio", options={"inner": "eager"})

    def run(self, asked: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
        budget = int(max(done[asked["of"]]["peaks"][2:]) * asked["part"]) if "of" in asked else 2**30
        result: dict[str, Any] = {"budget": budget, "losses": [], "peaks": [], "error": "", "overruns": []}
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        os.environ.update(TERAIO_MEMORY=str(budget), TERAIO_WARMUP="2", TERAIO_PLANNER=asked["planner"])
        session.ensure_session(Settings.parse({"inner": "eager"}))
        try:
            self.train(optimizer, asked["steps"], result)
        except TeraioError as error:
            result["error"] = f"{type(error).__name__}: {error}"
        teraio.reset()
        return result

    def train(self, optimizer: torch.optim.Optimizer, steps: int, result: dict[str, Any]) -> None:
        gc.collect()
        others = self.counting.alive_bytes() - sum(p.nbytes for p in self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        assert engine.ENGINE is not None
        for _ in range(steps):
            tokens = torch.randint(0, self.shape.vocabulary, (self.batch, LENGTH + 1), generator=generator)
            self.counting.reset_peak()
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result["losses"].append(loss.item())
            del loss
            result["peaks"].append(self.counting.peak_bytes() - others)
            result["overruns"].append(teraio.stats()["overrun_bytes"])
        result["touches"] = teraio.stats()["touches"] + teraio.stats()["ahead"]
        result["evictions"] = teraio.stats()["evictions"]
        result["learnt"] = dict(engine.ENGINE.tracker.expected.outside)
        result["said"] = teraio.stats()["user_code_bytes"]


def main() -> None:
    counting = counting_allocator.install()
    torch.set_num_threads(1)
    trainer = Trainer(counting, "wide" in sys.argv[2:])
    done: dict[str, dict[str, Any]] = {}
    for asked in json.loads(sys.argv[1]):
        done[asked["name"]] = trainer.run(asked, done)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
