"""A training script as users write it: it does not name the backend. `teraio run` starts it in clean
environments, and check_installed.py trains its model with the backend.

In: nothing. Out: one line, the digest of all losses and weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS, STEPS, BATCH = 512, 8, 6, 16


def train(prepare: Callable[[nn.Module], Any] = lambda model: model) -> str:
    """Train a small model in the form that `prepare` returns. Return the digest."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared = prepare(model)
    digest = hashlib.sha256()
    for _ in range(STEPS):
        loss = prepared(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
    for weight in model.parameters():
        digest.update(weight.detach().clone().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(train())
