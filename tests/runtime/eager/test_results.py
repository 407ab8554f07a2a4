"""What a program returns may leave once the next program has it, unless someone has its address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_beside import WIDTH, same, send_away
from torch import nn
from torch.nn import functional as F

from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State


class Block(nn.Module):
    """Compiled by itself: its result is what the next one saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Stack(nn.Module):
    """Blocks, of whose results user code may keep something."""

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
    """How many of what programs have returned are in this state."""
    assert engine.ENGINE is not None
    records = engine.ENGINE.user.handed_out.values()
    return sum(record.state is state for record in records if not record.is_dead())


def test_a_result_leaves_that_only_the_next_program_has_saved(nothing_left: None) -> None:
    stack = Stack().compiled()
    away: list[int] = []

    def between() -> None:
        send_away()
        away.append(results(State.AWAY))

    wanted = Stack().step()
    assert all(same(stack.step(between), wanted) for _ in range(3))
    assert away == [2, 2, 2], "the last one is user code's"


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda made: made.detach().numpy(),
    "an address": lambda made: (made, made.data_ptr()),
    "dlpack": lambda made: torch.from_dlpack(made.detach()),
    "shared with processes": lambda made: made.detach().share_memory_(),
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_result_stays_whose_address_is_kept(nothing_left: None, name: str) -> None:
    stack = Stack(KEEPS[name]).compiled()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.0)
    stack.step()
    optimizer.step()
    first, other = stack.kept[0], Stack(lambda made: made.detach().clone())
    stack.step()  # the step that has ended is another's: addresses are forgotten
    send_away()
    other.step()
    if isinstance(first, tuple):
        found = (ctypes.c_float * other.kept[0].numel()).from_address(first[1])
        first = torch.frombuffer(found, dtype=torch.float32).reshape(64, WIDTH)
    assert torch.equal(torch.as_tensor(first), other.kept[0])
    assert results(State.AWAY) == 0


def test_a_result_stays_whose_address_is_taken_when_it_may_leave(nothing_left: None) -> None:
    stack = Stack(lambda made: made).compiled()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.0)
    addresses: list[int] = []
    stack.step(lambda: addresses.append(stack.kept[0].data_ptr()))
    optimizer.step()
    stack.step()
    send_away()
    assert results(State.AWAY) >= 1, "others leave"
    assert stack.kept[0].data_ptr() == addresses[0]


RESIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "larger": lambda made: made.resize_(128, WIDTH)[64:].fill_(2.0),
    "its storage": lambda made: made.untyped_storage().resize_(2 * made.nbytes),
    "filled anew": lambda made: torch.cat([made.new_ones(96, WIDTH)], out=made.resize_(0)),
    "freed": lambda made: made.resize_(0).untyped_storage().resize_(0),
}


@pytest.mark.parametrize("name", RESIZES)
def test_a_result_that_gets_another_size_stays(nothing_left: None, name: str) -> None:
    """Its copy has too few bytes, or too many."""

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
        assert same(inference(stack, send_away), inference(Stack(), lambda: None))
