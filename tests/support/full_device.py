"""A device without free memory, for tests on the CPU and on the stand-in for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from teraio.runtime.device.device import OrderedDevice

STEPS, FULL_STEP = 8, 5
Batch = Callable[[int], torch.Tensor]


class Full:
    """A patch that makes fetches fail with torch's OutOfMemoryError, after a given number of successful
    fetches. If `once` is True, only one fetch fails.
    """

    def __init__(self, patch: Callable[[Any, str, Any], None]) -> None:
        self.now, self.after, self.once = False, 0, False
        self.refused = self.seen = 0
        begin = OrderedDevice.begin_copy_in

        def begin_copy_in(device: Any, storage: Any, size_bytes: int, start: Any) -> Any:
            self.seen += self.now
            if self.now and self.seen > self.after:
                self.refused += 1
                self.now = not self.once
                raise torch.OutOfMemoryError("out of memory. Tried to allocate ...")
            return begin(device, storage, size_bytes, start)

        patch(OrderedDevice, "begin_copy_in", begin_copy_in)

    def begins(self, after: int) -> None:
        """Make fetches fail from now on, after `after` successful fetches."""
        self.now, self.seen, self.after = True, 0, after


def trained(called: Any, model: torch.nn.Module, batch: Batch, full: Full | None) -> list[float]:
    """Train, and return the losses. With `full`, fetches fail in every step. In each step, the first failing
    fetch comes one fetch later than in the step before.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        if full is not None:
            full.begins(after=step)
        loss = called(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_without_one_batch(
    called: Any, model: torch.nn.Module, batch: Batch, full: Full, after: int, views: int
) -> int:
    """Train, and skip a batch whose fetches find no memory, as user loops do. Return the number of skipped
    batches.

    After a skipped batch, the weights must have the values from before the step. Views of the first `views`
    weights must show these values too.
    """
    weights = list(model.parameters())
    held = [weight.detach() for weight in weights[:views]]
    optimizer, left_out = torch.optim.SGD(weights, lr=0.1), 0
    for step in range(STEPS):
        before = [weight.detach().clone() for weight in weights]
        if step == FULL_STEP:
            full.begins(after)
        try:
            loss = called(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            full.now, left_out = False, left_out + 1
            assert all(torch.equal(weight, old) for weight, old in zip(weights, before))
            assert all(torch.equal(view, old) for view, old in zip(held, before))
        full.now = False
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    return left_out
