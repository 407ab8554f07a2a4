"""The check of an installed wheel. It runs in an environment without a compiler, and needs only torch.

In: nothing. Out: one line of JSON with measurements; an exit code other than 0 if a check fails.

    check_installed.py              all checks
    check_installed.py train        a training; its last line has the digest of all losses and weights
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
WIDTH, LAYERS, STEPS, BATCH = 512, 8, 6, 16
MEMORY = "16MiB"  # the weights, gradients and states of the model take 32 MiB
IMPORTS = 5
IMPORT_CODE = """
import time, {first}
began, used = time.perf_counter(), time.process_time()
import {name}
print(time.perf_counter() - began, time.process_time() - used)
"""
# Modules that an import of the backend may not load.
LATE = ("ortools", "networkx", "pandas", "transformers")
# The log lines of a lost observer and of a lost allocator.
FALLBACKS = ("are kept resident, because their readers cannot be observed", "goes back to the system at once")


def train() -> None:
    """Train a small model within MEMORY, and print what happened as one line of JSON."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="teraio", options={"inner": "eager", "memory": MEMORY})
    digest = hashlib.sha256()
    for _ in range(STEPS):
        loss = compiled(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
    for weight in model.parameters():
        digest.update(weight.detach().clone().numpy().tobytes())
    print(json.dumps({"digest": digest.hexdigest(), "torch": torch.__version__, **_engine_facts()}))


def _engine_facts() -> dict[str, Any]:
    """Return facts about the engine of this process. Without an engine, the result is empty."""
    if os.environ.get("TERAIO_DISABLE"):
        return {}
    import teraio
    from teraio.runtime.torch_extension import allocator
    from teraio.runtime.torch_extension.observer import observer_of_process

    observer = observer_of_process()
    libraries = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line
    }
    stats = teraio.stats()
    return {
        "observer": Path(observer.library._name).name if observer else "",
        "allocator": allocator.install(),
        "shims": sorted(Path(each).name for each in libraries if "torch_extension/shims/" in each),
        "written_bytes": stats["written_bytes"],
        "peak_bytes": stats["step_peak_bytes"],
    }


def main() -> None:
    found = [name for name in COMPILERS if shutil.which(name)] + [n for n in ("CC", "CXX") if n in os.environ]
    _require(not found, f"the environment has compilers: {found}")
    import teraio

    folder = Path(teraio.__file__).parent
    _require(folder.parent == Path(sysconfig.get_path("platlib")), f"teraio is not the wheel: {folder}")
    plain, _ = _run([sys.executable, "-P", __file__, "train"], TERAIO_DISABLE="1")
    ran, log = _run([sys.executable, "-P", __file__, "train"])
    budgeted, unlimited = json.loads(ran.splitlines()[-1]), json.loads(plain.splitlines()[-1])
    _require(budgeted["digest"] == unlimited["digest"], "the training with a budget gave other numbers")
    _require(not any(line in log for line in FALLBACKS), f"a feature is lost: {log}")
    _require(budgeted["written_bytes"] > 0, "the budget evicted nothing")
    _require(budgeted["allocator"] == "", f"the allocator is not active: {budgeted['allocator']}")
    _require([name.split("-")[0] for name in budgeted["shims"]] == ["allocator", "observer"], f"{budgeted}")
    _require(not list(Path.home().rglob("built/*.so")), "teraio has compiled a library")
    teraio_program = str(Path(sys.executable).with_name("teraio"))
    doctor, _ = _run([teraio_program, "doctor", "--json"], codes=(0, 1))
    _require("prebuilt for this torch" in doctor, doctor)
    _run(
        [
            teraio_program,
            "plan",
            "gpt2-b16",
            "--machine",
            "rtx4090-1ssd",
            "--planner",
            "greedy",
            "--memory",
            "60%",
        ]
    )
    print(json.dumps({"run": budgeted, "wheel": _wheel_tags(), "imports": _import_seconds()}))


def _wheel_tags() -> list[str]:
    """Return the tags of the installed wheel."""
    import importlib.metadata

    text = importlib.metadata.distribution("teraio").read_text("WHEEL") or ""
    return [line.split(": ")[1] for line in text.splitlines() if line.startswith("Tag: ")]


def _import_seconds() -> dict[str, dict[str, float]]:
    """Return the median seconds of imports, by the clock and of CPU time, each in new processes. Check that
    no late package is loaded."""
    code = "import sys, torch, teraio.backend; print([n for n in sys.argv[1:] if n in sys.modules])"
    loaded, _ = _run([sys.executable, "-P", "-c", code, *LATE])
    _require(loaded.strip() == "[]", f"the backend loads {loaded.strip()}")
    medians = {}
    for name, first in (("teraio", "torch"), ("teraio.backend", "torch._dynamo")):
        code = IMPORT_CODE.format(first=first, name=name)
        runs = [_run([sys.executable, "-P", "-c", code])[0].split() for _ in range(IMPORTS)]
        clock, cpu = (round(statistics.median(map(float, column)), 3) for column in zip(*runs))
        medians[f"{name} after {first}"] = {"clock_s": clock, "cpu_s": cpu}
    return medians


def _run(command: list[str], codes: tuple[int, ...] = (0,), **variables: str) -> tuple[str, str]:
    ran = subprocess.run(
        command, env={**os.environ, **variables}, check=False, capture_output=True, text=True, timeout=600
    )
    tail = (ran.stdout + ran.stderr)[-3000:]
    _require(ran.returncode in codes, f"{' '.join(command[1:4])}: exit code {ran.returncode}\n{tail}")
    return ran.stdout, ran.stderr


def _require(holds: bool, failure: str) -> None:
    if not holds:
        raise SystemExit(f"check_installed.py: {failure}")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
