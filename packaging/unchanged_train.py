"""A training script as users write it: it does not name the backend. `teraio run` starts it in clean
environments.

In: nothing. Out: one line, the digest of all losses and weights.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

WIDTH, LAYERS, STEPS, BATCH = 512, 8, 6, 16

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
digest = hashlib.sha256()
for _ in range(STEPS):
    loss = model(torch.randn(BATCH, WIDTH)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    digest.update(loss.detach().numpy().tobytes())
for weight in model.parameters():
    digest.update(weight.detach().numpy().tobytes())
print(digest.hexdigest())
