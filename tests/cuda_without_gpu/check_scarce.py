"""The device has less memory than the budget: others took it. Nothing is lost, and nothing is read unseen."""

from __future__ import annotations

from typing import Any

import torch
from check_loops import same, within
from check_streams import batch

import teraio
from teraio.runtime.device import Ordered

STEPS, FULL_STEP = 8, 5
TIGHT = "4.6MiB"


class Full:
    """Makes fetches fail as torch's allocator does: all, or those in `which`, by the number of the fetch."""

    def __init__(self) -> None:
        self.now, self.after, self.once = False, 0, False
        self.refused = self.seen = 0
        begin = Ordered.begin_fetch

        def begin_fetch(device: Any, storage: Any, size_bytes: int, start: Any) -> Any:
            self.seen += self.now
            if self.now and self.seen > self.after:
                self.refused += 1
                self.now = not self.once
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
            return begin(device, storage, size_bytes, start)

        setattr(Ordered, "begin_fetch", begin_fetch)  # noqa: B010


def check_one_fetch_without_memory_changes_nothing() -> dict[str, Any]:
    """Ahead of its use it is put off; a demanded one evicts what may leave, and succeeds."""
    full = Full()
    full.once = True

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(STEPS):
            full.now, full.seen = True, 0
            full.after = step
            loss = called(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    same(loop, memory=TIGHT)
    assert full.refused >= STEPS // 2, full.refused
    return {"refused": full.refused}


def check_a_batch_that_finds_no_memory_is_left_out_as_loops_do() -> dict[str, Any]:
    """The weights are those of before, and whoever reads them gets them, whatever is evicted."""
    full = Full()
    refused = {}
    for after in (0, 1, 3, 6):
        with within(True, memory=TIGHT) as (called, model):
            weights = list(model.parameters())
            views = [weight.detach() for weight in weights[:6]]
            optimizer = torch.optim.SGD(weights, lr=0.1)
            full.refused = 0
            for step in range(STEPS):
                before = [weight.detach().cpu() for weight in weights] if step == FULL_STEP else []
                full.now, full.seen, full.after = step == FULL_STEP, 0, after
                try:
                    loss = called(batch(step)).square().mean()
                    loss.backward()
                    optimizer.step()
                except torch.OutOfMemoryError:
                    full.now = False
                    assert all(torch.equal(w.detach().cpu(), old) for w, old in zip(weights, before))
                    assert all(torch.equal(v.cpu(), old) for v, old in zip(views, before))
                full.now = False
                optimizer.zero_grad()
            refused[after] = full.refused
            assert torch.isfinite(loss), loss
            assert teraio.stats()["evictions"]
    assert sum(refused.values()), refused
    return {"refused": refused}
