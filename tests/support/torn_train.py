"""An optimizer step that ends in the middle, because a state cannot be fetched (`lost`) or because of Ctrl-C
(`pressed`).

    torn_train.py lost pressed

The script prints one JSON line for each argument: the errors at the optimizer's step and at the next forward,
and the number of updated weights. The line also tells whether all weights are resident at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any
from unittest.mock import patch

import torch
from optimizer_train import BUDGET, ROWS, WIDTH, Chain

import teraio
from teraio.errors import StoreReadError, TeraioError
from teraio.runtime.ledger import mover
from teraio.runtime.optimizer import step_call

LOST = "layers.4.weight.exp_avg"
REAL = mover.Mover.end_fetch
OPEN = step_call.OptimizerCall.open_bucket


def lose(self: Any, record: Any) -> None:
    """End the fetch of the state `LOST` with an error, as if its bytes were corrupt."""
    if record.name != LOST:
        REAL(self, record)
        return
    record.pending.ticket.wait()
    self.device.resize_storage(record.pending.block, 0)
    record.fetch_failed()
    self.resident_bytes -= record.size_bytes
    raise StoreReadError(f"{LOST} did not come back", tensor=LOST)


def press(call: Any, at: int) -> None:
    OPEN(call, at)
    if at == 7:
        os.kill(os.getpid(), signal.SIGINT)


PLANTS: dict[str, Any] = {
    "lost": patch.object(mover.Mover, "end_fetch", lose),
    "pressed": patch.object(step_call.OptimizerCall, "open_bucket", press),
}


def torn(how: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: Any = {"inner": "eager", "memory": BUDGET, "warmup": 1, "planning": "inline"}
    compiled: Any = torch.compile(model, backend="teraio", options=options, dynamic=False)
    x = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    compiled(x).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    raised: list[str] = []
    for attempt in (optimizer.step, lambda: compiled(x)):
        with PLANTS[how]:
            try:
                attempt()
            except (TeraioError, KeyboardInterrupt) as error:
                raised.append(f"{type(error).__name__}: {error}")
    updated = [not torch.equal(old, p.detach()) for old, p in zip(before, model.parameters())]
    teraio.reset()  # reset does not raise an error that was already raised
    resident = all(parameter.data_ptr() for parameter in model.parameters())
    return {"raised": raised, "updated": sum(updated), "of": len(updated), "here": resident}


def main() -> None:
    torch.set_num_threads(1)
    for how in sys.argv[1:]:
        print(json.dumps(torn(how)), flush=True)


if __name__ == "__main__":
    main()
