"""One training of a small Llama in its own process.

    RESULT=out.json trainee.py '{"way": "teraio", "memory": 1200000000, "shape": {...}, "batch": 4, ...}'

After every step the script writes all results so far to the file RESULT: losses to the bit, seconds, the most
allocated and reserved bytes, and teraio's counts. The script sets `ended` when the training ends without an
error. `way` is `plain` or `teraio`. Plain training is the same compiled model without a budget. If
`optimizer` is `host`, plain training steps its optimizer on copies in RAM, as teraio does with the option
`optimizer_step="host"`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import beginning
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.session import session

PLANNED_MOST = 24  # largest number of steps to wait for a plan; after them the timed steps begin
END_S = 6.0  # seconds before the deadline, to write the results and end the process
SLOTS_MOST = 30
PER_STEP = ("phase", "reserve_bytes", "step_misses", "step_stall_ns", "step_overrun_bytes")
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Trainee:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.device = asked, asked.get("device", "cuda")
        self.on_gpu = self.device == "cuda"
        self.found: dict[str, Any] = {"losses": [], "seconds": [], "steps": []}
        torch.manual_seed(0)
        torch.set_num_threads(asked.get("threads", 1))
        self._order()
        if asked.get("sanitize"):
            watch_streams()
        if "cap" in asked:
            total = torch.cuda.mem_get_info()[1]
            self.found["fraction"] = asked["cap"] / total
            torch.cuda.set_per_process_memory_fraction(asked["cap"] / total)
        self.model = self._model()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if asked.get("optimizer") == "host":
            self.optimizer = OnHost(self.model, self.optimizer)
        options = self._options() if asked["way"] == "teraio" else {}
        inner = {"inner": asked.get("inner", "inductor")}
        self.run: Any = torch.compile(self.model, backend="teraio", options={**inner, **options})
        self.slots = Slots() if asked.get("slots") else None
        self.random = torch.Generator().manual_seed(1)

    def _order(self) -> None:
        """Set torch's deterministic algorithms, and the kind of attention. If an operator has no
        deterministic version, warn, or raise an error if `deterministic` is `strict`.
        """
        order, attention = self.asked.get("deterministic", False), self.asked.get("attention")
        torch.use_deterministic_algorithms(bool(order), warn_only=order != "strict")
        if attention is not None and self.on_gpu:
            for name, enable in {
                "flash": torch.backends.cuda.enable_flash_sdp,
                "math": torch.backends.cuda.enable_math_sdp,
                "cudnn": torch.backends.cuda.enable_cudnn_sdp,
                "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
            }.items():
                enable(name == attention)

    def _options(self) -> dict[str, Any]:
        return {"memory": self.asked["memory"], "planning": "inline", **self.asked.get("options", {})}

    def _model(self) -> nn.Module:
        dtype = getattr(torch, self.asked.get("dtype", "float32"))
        made = teraio.init(**self._options()) if self.asked.get("init") else contextlib.nullcontext()
        torch.set_default_dtype(dtype)
        with torch.device(self.device), made:
            model = Llama(Shape(**self.asked["shape"]))
        torch.set_default_dtype(torch.float32)
        return model

    def batch(self) -> torch.Tensor:
        size = (self.asked["batch"], self.asked["length"] + 1)
        tokens = torch.randint(0, self.asked["shape"]["vocabulary"], size, generator=self.random)
        return tokens.to(self.device)

    def learn(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.asked.get("autocast", False)):
            loss: torch.Tensor = self.run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if clip := self.asked.get("clip"):
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self) -> None:
        """Run one more step and record its results."""
        tokens = self.batch()
        self.wait()
        self._peak_anew()
        began = time.perf_counter()
        loss = self.learn(tokens)
        self.wait()
        self.found["seconds"].append(round(time.perf_counter() - began, 5))
        self.found["losses"].append(float(loss.item()).hex())
        self._note()

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _peak_anew(self) -> None:
        """Reset torch's peak counters, and the peaks that the engine keeps.

        The engine also resets torch's counters while it measures, so it keeps the highest values itself.
        """
        if session.SESSION is not None:
            session.SESSION.device.forget_highest_counts()
        elif self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def _note(self) -> None:
        stats: dict[str, Any] = dict(teraio.stats())
        step = {name: stats[name] for name in PER_STEP if name in stats}
        if self.on_gpu:
            allocated = torch.cuda.max_memory_allocated()
            step["peak_bytes"] = max(allocated, stats.get("device_peak_bytes", 0))
            reserved = torch.cuda.max_memory_reserved()
            step["reserved_bytes"] = max(reserved, stats.get("device_reserved_peak_bytes", 0))
        self.found["steps"].append(step)
        self.found["stats"] = stats
        if self.slots is not None:
            self.found["slots"] = self.slots.highest()
        beginning.write(self.found)

    def train(self) -> None:
        count = 0
        while count < self.asked.get("warmup", 3) or not self._is_steady(count):
            if not self._has_time():
                return
            self.step()
            count += 1
        self.found["first_measured"] = count
        for _ in range(self.asked["steps"]):
            if not self._has_time():
                return
            self.step()
        beginning.write({**self.found, "ended": True})

    def _is_steady(self, steps: int) -> bool:
        steady = teraio.stats().get("steady", False)
        waits = self.asked["way"] == "teraio" and not self.asked.get("unplanned")
        return not waits or steps >= PLANNED_MOST or steady

    def _has_time(self) -> bool:
        """Return True if one more step, as long as the longest step so far, ends before the deadline."""
        usual = max(self.found["seconds"][1:], default=0.0)
        enough = beginning.left_s() > END_S + usual
        if not enough:
            beginning.write({**self.found, "ended": True, "short": True})
        return enough


class OnHost:
    """An optimizer whose first step runs on the device and creates the states. All later steps run in RAM."""

    def __init__(self, model: nn.Module, first: torch.optim.Optimizer) -> None:
        self.parameters = list(model.parameters())
        self.first = first
        self.rest: torch.optim.Optimizer | None = None
        self.copies: list[torch.Tensor] = []

    def step(self) -> None:
        if not self.copies:
            self.first.step()
            self.copies = [p.detach().cpu().requires_grad_() for p in self.parameters]
            self.rest = torch.optim.AdamW(self.copies, lr=1e-4, fused=True)
            self.rest.load_state_dict(self.first.state_dict())
            self.first.state.clear()
            return
        assert self.rest is not None
        with torch.no_grad():
            for copy, parameter in zip(self.copies, self.parameters):
                copy.grad = None if parameter.grad is None else parameter.grad.cpu()
            self.rest.step()
            for copy, parameter in zip(self.copies, self.parameters):
                parameter.copy_(copy)

    def zero_grad(self) -> None:
        self.first.zero_grad()


class Slots:
    """The most bytes allocated (1) during each kernel, (2) during the slot before each kernel."""

    def __init__(self) -> None:
        self.most: dict[tuple[str, str, int, str], int] = {}
        engine = importlib.import_module("teraio.runtime.engine.engine").Engine
        visit = engine.visit

        def seen(self_: Any, program: Any, index: int, *rest: Any) -> Any:
            kernel = torch.cuda.max_memory_allocated()
            kind = str(program.schedule.kind)
            if index:
                self._keep((kind, program.stops[index - 1].kernel, index - 1, "kernel"), kernel)
            found = visit(self_, program, index, *rest)
            if (slot := torch.cuda.max_memory_allocated()) > kernel:
                self._keep((kind, program.stops[index].kernel, index, "slot before"), slot)
            torch.cuda.reset_peak_memory_stats()
            return found

        engine.visit = seen

    def _keep(self, key: tuple[str, str, int, str], bytes_: int) -> None:
        self.most[key] = max(self.most.get(key, 0), bytes_)

    def highest(self) -> list[list[Any]]:
        ordered = sorted(self.most.items(), key=lambda item: -item[1])
        return [[bytes_, *key] for key, bytes_ in ordered[:SLOTS_MOST]]


def watch_streams() -> None:
    """Turn on torch's stream sanitizer, as TORCH_CUDA_SANITIZER does, and let Dynamo still compile.

    The sanitizer is a dispatch mode. Dynamo compiles no frame under a dispatch mode, unless the mode declares
    that compilation may ignore it.
    """
    sanitizer: Any = importlib.import_module("torch.cuda._sanitizer")
    sanitizer.CUDASanitizerDispatchMode.ignore_compile_internals = classmethod(lambda cls: True)
    sanitizer.enable_cuda_sanitizer()


def without_attention(name: str) -> str:
    """Return an empty string if this kind of attention runs on this machine, otherwise the error.

    Call this function only in a process that ends soon after the call.
    """
    try:
        q, k, v = (
            torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        with sdpa_kernel(ATTENTION[name]):
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0][:300] or "RuntimeError"
    return ""


@contextlib.contextmanager
def errors_kept(found: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Write the class and text of an error to the result file, and raise the error again."""
    try:
        yield
    except BaseException as error:
        name = type(error).__name__
        beginning.write({**found(), "error": name, "said": str(error)[-1500:]})
        raise


def main(asked: dict[str, Any]) -> None:
    trainee: Trainee | None = None
    beginning.stand_in()
    with errors_kept(lambda: trainee.found if trainee else {}):
        if asked.get("attention") == "cudnn" and (reason := without_attention("cudnn")):
            beginning.write({"not available": reason, "ended": True})
            return
        trainee = Trainee(asked)
        trainee.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
