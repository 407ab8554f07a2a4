"""One training in a process of its own, on the GPU or, as a rehearsal, on the CPU.

    trainee.py '{"way": "teraio", "device": "cuda", "part": 0.4, "peak": 12000000000, "shape": {...}, ...}'

prints one JSON object: losses, seconds of each step, the most that was allocated and reserved, and what
teraio counted. `way` is one of WAYS; `part` is a part of `peak`, the peak of the plain run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint

import teraio
from teraio.demo_model import Llama, Shape

SETTLED_MOST = 12  # steps until the plan is there; then those that count
# And those of zero.py.
WAYS = ("plain", "teraio", "save_on_cpu", "checkpoint", "offloading", "offloading_stream")
OFFLOADED_LEAST = 2**16  # bytes; smaller activations stay


class Trainee:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.device = asked, asked["device"]
        self.on_gpu = self.device == "cuda"
        self.budget = int(asked.get("peak", 0) * asked.get("part", 0))
        torch.manual_seed(0)
        torch.set_num_threads(asked.get("threads", 1))
        self._order(asked.get("deterministic", True))
        if asked.get("sanitize"):
            watch_streams()
        self.offloaded_bytes = 0
        if "fraction" in asked:
            torch.cuda.set_per_process_memory_fraction(asked["fraction"])
        self.model = self._model()
        self.optimizer = self._optimizer()
        self.run = self._compiled()
        self.random = torch.Generator().manual_seed(1)

    def _order(self, kept: bool | str) -> None:
        """Sums in the same order each time, or else a warning; `strict`: or else an error. Of the kernels for
        attention flash keeps an order under `strict` alone, others never: without it the plain ones run."""
        strict = kept == "strict"
        torch.use_deterministic_algorithms(bool(kept), warn_only=not strict)
        if kept and self.on_gpu:
            torch.backends.cuda.enable_flash_sdp(strict)
            torch.backends.cuda.enable_math_sdp(not strict)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)

    def _model(self) -> nn.Module:
        """The device first: it is that of the session which teraio.init opens."""
        dtype = getattr(torch, self.asked.get("dtype", "float32"))
        made = teraio.init(**self._options()) if self.asked.get("init") else contextlib.nullcontext()
        with torch.device(self.device), made:
            model = Llama(Shape(**self.asked["shape"])).to(dtype)
        if self.asked["way"] == "checkpoint":
            model.layers = nn.ModuleList(Again(layer) for layer in model.layers)
        return model

    def _optimizer(self) -> torch.optim.Optimizer:
        fused = self.asked.get("fused", False) or None
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

    def _options(self) -> dict[str, Any]:
        return {"memory": self.budget, **self.asked.get("options", {})}

    def _compiled(self) -> Callable[..., torch.Tensor]:
        if self.asked["way"].startswith("offloading"):
            self._offload()
        inner = {"inner": self.asked.get("inner", "inductor")}
        options = self._options() if self.asked["way"] == "teraio" else {}
        compiled: Any = torch.compile(self.model, backend="teraio", options={**inner, **options})
        return self._saving(compiled) if self.asked["way"] == "save_on_cpu" else compiled

    def _offload(self) -> None:
        """The compiler moves activations that are marked, and marks none itself: here all that it saves and
        that are of some size. It then leaves out what it cannot move."""
        functorch_config.enable_activation_offloading = True
        functorch_config.activation_offload_separate_stream = self.asked["way"] == "offloading_stream"
        functorch_config.enable_autograd_cache = False  # a program from there was not marked here
        cut: Any = importlib.import_module("torch._functorch._activation_offloading.activation_offloading")
        choose = cut.choose_offload_sets

        def marked(forward: torch.fx.GraphModule, *rest: Any) -> bool:
            saved: Any = forward.graph.output_node().args[0]
            sizes = {node: bytes_of(node) for node in saved if isinstance(node, torch.fx.Node)}
            for node, size in sizes.items():
                node.meta["should_offload"] = node.op == "call_function" and size >= OFFLOADED_LEAST
            chosen = bool(choose(forward, *rest))
            self.offloaded_bytes += sum(
                size for node, size in sizes.items() if node.meta.get("saved_for_offloading")
            )
            return chosen

        cut.choose_offload_sets = marked

    def _saving(self, compiled: Any) -> Callable[..., torch.Tensor]:
        def run(*batch: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=self.on_gpu):
                loss: torch.Tensor = compiled(*batch)
            return loss

        return run

    def step(self) -> tuple[float, str]:
        """Seconds, and the loss to the bit."""
        batch, length = self.asked["batch"], self.asked["length"]
        tokens = torch.randint(
            0, self.asked["shape"]["vocabulary"], (batch, length + 1), generator=self.random
        ).to(self.device)
        self.wait()
        began = time.perf_counter()
        loss = self.learn(tokens[:, :-1], tokens[:, 1:])
        self.wait()
        return time.perf_counter() - began, float(loss.item()).hex()

    def learn(self, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.asked.get("autocast", False)):
            loss = self.run(*batch)
        loss.backward()
        if clip := self.asked.get("clip"):
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def peaks(self) -> dict[str, int]:
        if not self.on_gpu:
            return {"allocated_bytes": 0, "reserved_bytes": 0}
        seen = teraio.stats()  # the engine resets torch's counts while it measures
        return {
            "allocated_bytes": max(torch.cuda.max_memory_allocated(), seen.get("device_peak_bytes", 0)),
            "reserved_bytes": max(
                torch.cuda.max_memory_reserved(), seen.get("device_reserved_peak_bytes", 0)
            ),
        }

    def train(self) -> dict[str, Any]:
        steps: list[tuple[float, str]] = []
        while len(steps) < self.asked.get("warmup", 3) or not self._settled(len(steps)):
            steps.append(self.step())
        began = len(steps)
        steps += [self.step() for _ in range(self.asked["steps"])]
        return {
            **self.peaks(),
            "budget_bytes": self.budget,
            "offloaded_bytes": self.offloaded_bytes,
            "first_measured": began,
            "seconds": [seconds for seconds, _ in steps],
            "losses": [loss for _, loss in steps],
            "stats": dict(teraio.stats()),
        }

    def _settled(self, steps: int) -> bool:
        planned = teraio.stats().get("phase") == "planned"
        return self.asked["way"] != "teraio" or steps >= SETTLED_MOST or planned


def bytes_of(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def watch_streams() -> None:
    """What TORCH_CUDA_SANITIZER turns on, but compiled programs stay compiled: under a mode that does not
    say that it ignores their compilation, Dynamo leaves every frame as it is."""
    sanitizer: Any = importlib.import_module("torch.cuda._sanitizer")
    sanitizer.CUDASanitizerDispatchMode.ignore_compile_internals = classmethod(lambda cls: True)
    sanitizer.enable_cuda_sanitizer()


class Again(nn.Module):
    """Activation checkpointing around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: torch.Tensor) -> Any:
        return checkpoint(self.block, *inputs, use_reentrant=False)


if __name__ == "__main__":
    print(json.dumps(Trainee(json.loads(sys.argv[1])).train()))
