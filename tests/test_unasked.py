"""Layers of torch that take a faster way in evaluation if no class wants to be asked: they still do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_beside import send_away
from torch import nn

from teraio.runtime import unasked

WIDTH = 128


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 4, batch_first=True)


def called(model: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else model(x)
    return made


@pytest.mark.parametrize("make", [encoder, attention])
def test_evaluation_beside_a_training_gives_the_same_bits(
    make: Callable[[], nn.Module], one_thread: None
) -> None:
    torch.manual_seed(0)
    model = make()
    compiled: Any = torch.compile(
        called, backend="teraio", options={"inner": "eager", "memory": "64MiB", "warmup": 1}
    )
    batch = torch.randn(2, 8, WIDTH)
    for _ in range(2):
        compiled(model, batch).sum().backward()
    twin = make()
    twin.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.eval()
    twin.eval()
    with torch.no_grad():
        assert send_away() >= 4
        faster = called(model, batch)
        assert torch.equal(faster, called(twin, batch))
        assert make is attention or not torch.equal(faster, called(twin.train(), batch)), "the ways differ"


@pytest.mark.parametrize("make", [encoder, attention])
def test_dynamo_and_scripts_know_what_was_wrapped(make: Callable[[], nn.Module], nothing_left: None) -> None:
    unasked.install()
    model, batch = make().eval(), torch.randn(2, 8, WIDTH)
    with torch.no_grad():
        expected = called(model, batch)
        whole: Any = torch.compile(called, backend="eager", fullgraph=True)
        assert torch.equal(whole(model, batch), expected)
        script: Any = torch.jit.script(model)
        scripted = script(batch, batch, batch)[0] if make is attention else script(batch)
        assert torch.equal(scripted, expected)
