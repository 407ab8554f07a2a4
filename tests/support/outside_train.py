"""A training of a Llama in which only the blocks are compiled. The process counts every byte of every tensor.

The Llama's head and loss run as user code, and take more memory than a block.

    outside_train.py '[{"name": "half", "part": 0.6, "of": "plenty", "planner": "none", "steps": 4}, ...]'

With a second argument `wide`, the embedding and the head are most of the model. The script prints one JSON
object. Per run, it holds (1) the losses, (2) each step's peak in bytes, and (3) the largest overrun until the
end of each step. It also holds (4) the error that ended the run, and (5) the number of bytes that the engine
assumes for user code after each call. All runs share the programs that the first run compiles.
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

    def run(self, request: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
        budget = int(max(done[request["of"]]["peaks"][2:]) * request["part"]) if "of" in request else 2**30
        result: dict[str, Any] = {"budget": budget, "losses": [], "peaks": [], "error": "", "overruns": []}
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        os.environ.update(
            TERAIO_MEMORY=str(budget),
            TERAIO_WARMUP="2",
            TERAIO_PLANNER=request["planner"],
            TERAIO_PLANNING="inline",
        )
        session.ensure_session(Settings.parse({"inner": "eager"}))
        try:
            self.train(optimizer, request["steps"], result)
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
    for request in json.loads(sys.argv[1]):
        done[request["name"]] = trainer.run(request, done)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
