"""Compiled optimizer steps. Weights and states are kept resident, because a compiled step writes to them when
it ends.

If weights and states do not fit, an error names the memory that the step needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import teraio
from teraio.errors import BudgetError

WIDTH, LAYERS, STEPS = 256, 3, 4
# The engine's reserve takes 4 MiB. Weights, gradients and states take 3 MiB, and the program's results 2.25
# MiB. The sum is between the two budgets.
FITS, TOO_LITTLE = "10MiB", "9MiB"


class Training:
    def __init__(self, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.compiled: Any = torch.compile(self.model, **how)
        self.update: Any = torch.compile(self.optimizer.step, **how)

    def step(self) -> float:
        loss = self.compiled(torch.ones(64, WIDTH)).square().mean()
        loss.backward()
        self.update()
        self.optimizer.zero_grad()
        return float(loss)


def within(memory: str) -> Training:
    return Training(backend="teraio", options={"inner": "eager", "memory": memory})


def test_compiled_step_that_just_fits_gives_the_plain_numbers(one_thread: None) -> None:
    plain = Training(backend="aot_eager")
    wanted = [plain.step() for _ in range(STEPS)]
    torch._dynamo.reset()
    ours = within(FITS)
    assert [ours.step() for _ in range(STEPS)] == wanted
    for one, other in zip(ours.model.parameters(), plain.model.parameters()):
        assert torch.equal(one, other)


def test_compiled_step_that_does_not_fit_raises_and_continues_with_more_memory(one_thread: None) -> None:
    ours = within(TOO_LITTLE)
    before = [parameter.detach().clone() for parameter in ours.model.parameters()]
    with pytest.raises(BudgetError, match="Give at least"):
        ours.step()
    assert all(torch.equal(*pair) for pair in zip(ours.model.parameters(), before))
    ours.optimizer.zero_grad()
    teraio.set_memory(FITS)
    losses = [ours.step() for _ in range(STEPS)]
    assert losses[-1] < losses[0]
