"""Results of compiled programs, which user code receives.

When the next program saves a result for the backward, the result becomes evictable. A result whose address
user code has taken is not evictable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_beside import WIDTH, evict_all, same
from torch import nn
from torch.nn import functional as F

from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State


class Block(nn.Module):
    """A block that is compiled alone. The following block saves the result of this block for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Stack(nn.Module):
    """A stack of blocks. User code may keep a part of each block's result."""

    def __init__(self, keeps: Callable[[torch.Tensor], Any] = lambda made: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.keeps, self.kept = keeps, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.kept.append(self.keeps(x))
        return x

    def compiled(self) -> Stack:
        for block in self.blocks:
            block.compile(backend="teraio", options={"inner": "eager", "memory": "64MiB"})
        return self

    def step(self, between: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
        made = self(torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH))
        between()
        made.square().sum().backward()
        found = [p.grad for p in self.parameters() if p.grad is not None]
        self.zero_grad()
        return found


def results(state: State) -> int:
    """Return the number of programs' results that are in this state."""
    assert engine.ENGINE is not None
    records = engine.ENGINE.user.handed_out.values()
    return sum(record.state is state for record in records if not record.is_dead())


def test_result_that_only_the_next_program_has_saved_is_evictable(nothing_left: None) -> None:
    stack = Stack().compiled()
    evicted: list[int] = []

    def between() -> None:
        evict_all()
        evicted.append(results(State.EVICTED))

    wanted = Stack().step()
    assert all(same(stack.step(between), wanted) for _ in range(3))
    assert evicted == [2, 2, 2], "user code holds the last result"


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda made: made.detach().numpy(),
    "an address": lambda made: (made, made.data_ptr()),
    "dlpack": lambda made: torch.from_dlpack(made.detach()),
    "shared with processes": lambda made: made.detach().share_memory_(),
}


@pytest.mark.parametrize("name", KEEPS)
def test_result_is_resident_while_user_code_keeps_its_address(nothing_left: None, name: str) -> None:
    stack = Stack(KEEPS[name]).compiled()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.0)
    stack.step()
    optimizer.step()
    first, other = stack.kept[0], Stack(lambda made: made.detach().clone())
    stack.step()  # the end of a step ends the record of addresses that user code took
    evict_all()
    other.step()
    if isinstance(first, tuple):
        found = (ctypes.c_float * other.kept[0].numel()).from_address(first[1])
        first = torch.frombuffer(found, dtype=torch.float32).reshape(64, WIDTH)
    assert torch.equal(torch.as_tensor(first), other.kept[0])
    assert results(State.EVICTED) == 0


def test_result_with_an_address_taken_while_evictable_is_resident(nothing_left: None) -> None:
    stack = Stack(lambda made: made).compiled()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.0)
    addresses: list[int] = []
    stack.step(lambda: addresses.append(stack.kept[0].data_ptr()))
    optimizer.step()
    stack.step()
    evict_all()
    assert results(State.EVICTED) >= 1, "no other result was evicted"
    assert stack.kept[0].data_ptr() == addresses[0]


RESIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "larger": lambda made: made.resize_(128, WIDTH)[64:].fill_(2.0),
    "its storage": lambda made: made.untyped_storage().resize_(2 * made.nbytes),
    "filled anew": lambda made: torch.cat([made.new_ones(96, WIDTH)], out=made.resize_(0)),
    "freed": lambda made: made.resize_(0).untyped_storage().resize_(0),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resized_result_has_the_right_bytes(nothing_left: None, name: str) -> None:
    """Resize an evicted result. The copy of the result then has too few or too many bytes."""

    def inference(stack: Stack, between: Callable[[], object]) -> list[torch.Tensor]:
        with torch.no_grad():
            first = stack.blocks[0](torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH))
            second = stack.blocks[1](first)
            between()
            RESIZES[name](first)
            between()
            return [stack.blocks[2](second), first.clone(), second.clone()]

    stack = Stack().compiled()
    for _ in range(3):
        assert same(inference(stack, evict_all), inference(Stack(), lambda: None))
