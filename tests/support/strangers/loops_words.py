"""Training loops over texts, with recurrent layers, sparse gradients or varying shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from strangers.case import Compile
from strangers.loops_parts import Words, next_word, texts

Loop = Callable[[Compile], Iterable[Any]]


def dynamic(compile: Compile, how: bool | None) -> Iterable[Any]:
    """Train with a different batch size and length in each step."""
    model = compile(Words(), dynamic=how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(1)
    for batch, length in ((8, 16), (4, 24), (6, 9), (8, 31), (3, 16), (5, 12)):
        text = torch.randint(0, 512, (batch, length), generator=drawn)
        loss = next_word(model(text), text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def recurrent(compile: Compile, kind: type[nn.RNNBase], allowed: bool) -> Iterable[Any]:
    """Train recurrent layers. Dynamo traces recurrent layers only if `allow_rnn` is set."""
    torch._dynamo.config.allow_rnn = allowed
    model = compile(Words(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for text in texts():
        loss = next_word(model(text), text)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def sparse_embedding(compile: Compile, adam: bool) -> Iterable[Any]:
    """Train an embedding with sparse gradients. If `adam`, SparseAdam steps the embedding and AdamW steps the
    other parameters. Otherwise SGD steps all parameters.
    """
    model = compile(Words(sparse=True))
    dense = [p for name, p in model.named_parameters() if name != "embedding.weight"]
    sparse = [p for name, p in model.named_parameters() if name == "embedding.weight"]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1)]
    if adam:
        optimizers = [torch.optim.AdamW(dense, lr=1e-3), torch.optim.SparseAdam(sparse, lr=1e-3)]
    for text in texts():
        loss = next_word(model(text), text)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()
    yield from (model, *optimizers)


def truncated_backward(compile: Compile) -> Iterable[Any]:
    """Train an LSTM whose detached hidden state continues in the next batch. The update needs no optimizer,
    as in torch's word language model example.
    """

    class Carrying(Words):
        def forward(self, x: torch.Tensor, hidden: Any = None) -> Any:
            assert self.stack is not None
            x = self.embedding(x)
            out, hidden = self.stack(x, hidden)
            return self.head(torch.relu(self.inner(out))), hidden

    torch._dynamo.config.allow_rnn = True
    model = compile(Carrying(nn.LSTM))
    hidden = None
    for text in texts(6):
        model.zero_grad()
        hidden = None if hidden is None else tuple(each.detach() for each in hidden)
        logits, hidden = model(text, hidden)
        loss = next_word(logits, text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.5)
        yield loss.item()
    yield model


LOOPS: dict[str, Loop] = {
    "truncated_backward": truncated_backward,
    "dynamic_told": partial(dynamic, how=True),
    "dynamic_found": partial(dynamic, how=None),
    "lstm": partial(recurrent, kind=nn.LSTM, allowed=False),
    "lstm_allowed": partial(recurrent, kind=nn.LSTM, allowed=True),
    "gru_allowed": partial(recurrent, kind=nn.GRU, allowed=True),
    "sparse_sgd": partial(sparse_embedding, adam=False),
    "sparse_adam": partial(sparse_embedding, adam=True),
}
