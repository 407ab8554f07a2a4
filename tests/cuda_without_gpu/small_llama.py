"""A training of the demo's small Llama on a device, and the results of such a training without a budget.

python small_llama.py '{"inner": "eager"}'        runs a training; prints its results as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import teraio
from teraio.cli.demo_model import Llama, Shape

SHAPE = {"vocabulary": 512, "hidden": 256, "intermediate": 704, "layers": 8}
STEPS = 10


@dataclass
class Training:
    """A training that records, for each step, the loss, torch's peak of allocated memory, and the phase of
    the session.
    """

    options: dict[str, Any] = field(default_factory=dict)
    inner: str = "eager"
    device: str = "cuda"
    shape: dict[str, int] = field(default_factory=SHAPE.copy)
    rows: int = 2
    length: int = 64
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"fused": True})
    losses: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        with torch.device(self.device):
            self.model = Llama(Shape(**self.shape))
        self.run = torch.compile(self.model, backend="teraio", options={"inner": self.inner, **self.options})
        self.adam = self.optimizer(self.model.parameters(), lr=1e-3, **self.settings)
        self.random = torch.Generator().manual_seed(1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.rows, self.length + 1)
        tokens = torch.randint(0, self.shape["vocabulary"], shape, generator=self.random).to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def step(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        loss = self.run(*self.batch())
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        self.losses.append(float(loss.item()).hex())
        self.peaks.append(torch.cuda.max_memory_allocated(self.device))
        self.phases.append(str(teraio.stats().get("phase")))

    def train(self, steps: int = STEPS) -> Training:
        for _ in range(steps):
            self.step()
        return self

    def results(self) -> dict[str, Any]:
        return {"losses": self.losses, "peaks": self.peaks, "digest": self.digest()}

    def digest(self) -> str:
        """Return, for each parameter, the sum of its numbers, whose bits are read as integers.

        It reads all parameters. A user's program may do so at any time.
        """
        sums = [
            parameter.detach().cpu().view(torch.int32).long().sum() for parameter in self.model.parameters()
        ]
        return str([int(total) for total in sums])


def plain(**request: Any) -> dict[str, Any]:
    """Return the results of this training without a budget. The first call computes them in a new process.

    They are kept in a file for all checks of this run of prove.py.
    """
    text = json.dumps(request, sort_keys=True)
    kept = Path(os.environ["STANDIN_CACHE"]) / f"plain-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        done = subprocess.run(
            [sys.executable, __file__, text],
            env={**os.environ, "TERAIO_DISABLE": "1", "STANDIN_REPORT": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"the run without a budget failed: {done.stderr[-4000:]}")
        # Write to a temporary file first, because other checks may read the file at the same time.
        written = kept.with_name(f"{kept.name}.{os.getpid()}")
        written.write_text(done.stdout.splitlines()[-1])
        written.replace(kept)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


if __name__ == "__main__":
    import standin  # noqa: F401

    print(json.dumps(Training(**json.loads(sys.argv[1])).train().results()))
