"""The check of an installed wheel. It runs in an environment without a compiler, and needs only torch.

In: nothing. Out: one line of JSON with measurements; an exit code other than 0 if a check fails.

    check_installed.py                  all checks
    check_installed.py train MEMORY     a training; its last line has the digest of all losses and weights

The last check hides the prebuilt libraries, so that teraio has neither a library nor a compiler.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
MEMORY = "16MiB"  # the weights, gradients and states of the model take 32 MiB
ENOUGH = "48MiB"  # the whole model fits
UNCHANGED = Path(__file__).with_name("unchanged_train.py")
IMPORTS = 5
# Each measured import, and the module that is imported before the measurement begins.
IMPORTED = (("teraio", "torch"), ("teraio.backend", "torch"), ("teraio.backend", "torch._dynamo"))
IMPORT_CODE = """
import time, {first}
began, used = time.perf_counter(), time.process_time()
import {name}
print(time.perf_counter() - began, time.process_time() - used)
"""
# Modules that an import of the backend may not load.
LATE = ("ortools", "networkx", "pandas", "transformers")
# Packages that a metric may not need. The clean environment has none of them.
OPTIONAL = ("prometheus_client", "opentelemetry", "wandb", "tensorboard", "lightning", "transformers")
# The log lines of a lost observer and of a lost allocator.
FALLBACKS = ("are kept resident, because their readers cannot be observed", "goes back to the system at once")


def train(memory: str) -> None:
    """Train a small model within `memory`, and print what happened as one line of JSON."""
    sys.path.append(str(UNCHANGED.parent))  # the flag -P has left this folder out
    import torch
    import unchanged_train

    options: dict[str, Any] = {"inner": "eager", "memory": memory}
    digest = unchanged_train.train(lambda model: torch.compile(model, backend="teraio", options=options))
    print(json.dumps({"digest": digest, "torch": torch.__version__, **_engine_facts()}))


def _engine_facts() -> dict[str, Any]:
    """Return facts about the engine of this process. Without an engine, the result is empty."""
    if os.environ.get("TERAIO_DISABLE"):
        return {}
    import teraio
    from teraio.integrations import prometheus
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
        "metrics": prometheus.exposition().count("# TYPE "),
        "packages": [name for name in OPTIONAL if name in sys.modules],
    }


def main() -> None:
    found = [name for name in COMPILERS if shutil.which(name)] + [n for n in ("CC", "CXX") if n in os.environ]
    _require(not found, f"the environment has compilers: {found}")
    import teraio

    folder = Path(teraio.__file__).parent
    _require(folder.parent == Path(sysconfig.get_path("platlib")), f"teraio is not the wheel: {folder}")
    unlimited, _ = _train(MEMORY, disabled="1")
    budgeted, log = _train(MEMORY)
    _require(budgeted["digest"] == unlimited["digest"], "the training with a budget gave other numbers")
    _require(not any(line in log for line in FALLBACKS), f"a feature is lost: {log}")
    _require(budgeted["written_bytes"] > 0, "the budget evicted nothing")
    _require(budgeted["allocator"] == "", f"the allocator is not active: {budgeted['allocator']}")
    _require([name.split("-")[0] for name in budgeted["shims"]] == ["allocator", "observer"], f"{budgeted}")
    _require(budgeted["metrics"] > 0, "the training gave no figures to Prometheus")
    _require(not budgeted["packages"], f"a metric loads {budgeted['packages']}")
    _require(not list(Path.home().rglob("built/*.so")), "teraio has compiled a library")
    _check_commands()
    facts: dict[str, Any] = {"run": budgeted, "unchanged_script": _check_unchanged_script()}
    facts |= {"wheel": _wheel_tags(), "imports": _import_seconds()}
    print(json.dumps(facts | {"without_library": _check_without_library(folder, budgeted)}))


def _train(memory: str, disabled: str = "") -> tuple[dict[str, Any], str]:
    """Run `train` in a new process, with TERAIO_DISABLE set to `disabled`. Return its facts and its log."""
    printed, log = _run([sys.executable, "-P", __file__, "train", memory], TERAIO_DISABLE=disabled)
    return json.loads(printed.splitlines()[-1]), log


def _check_commands() -> None:
    doctor, _ = _run([_program(), "doctor", "--json"], codes=(0, 1))
    _require("prebuilt for this torch" in doctor, doctor)
    plan = ["plan", "gpt2-b16", "--machine", "rtx4090-1ssd", "--planner", "greedy", "--memory", "60%"]
    _run([_program(), *plan])


def _program() -> str:
    return str(Path(sys.executable).with_name("teraio"))


def _check_unchanged_script() -> dict[str, str]:
    """Run a script that does not name teraio: alone, with `teraio run`, and with TERAIO_DISABLE."""
    command = [_program(), "run", "--inner", "eager", "--memory", MEMORY, str(UNCHANGED)]
    ran, log = _run(command)
    disabled, _ = _run(command, TERAIO_DISABLE="1")
    alone, _ = _run([sys.executable, str(UNCHANGED)])
    _require(ran == disabled, "teraio run: the budget gave other numbers than TERAIO_DISABLE=1")
    _require(ran == alone, "teraio run gave other numbers than the script alone")
    _require(not any(line in log for line in FALLBACKS), f"teraio run: a feature is lost: {log}")
    figures = re.search(r"teraio: the run: (.*; wrote [1-9][\d.]* [KMG]iB and .*)", log)
    _require(figures is not None, f"teraio run evicted nothing: {log}")
    return {"digest": ran.strip(), "figures": figures[1] if figures else ""}


def _check_without_library(folder: Path, budgeted: dict[str, Any]) -> list[dict[str, Any]]:
    """Hide libraries, and train. Without a compiler, a training that fits goes on, and the log has the reason
    and the remedy. A training that does not fit ends with BudgetError."""
    shims, release = folder / "runtime" / "torch_extension" / "shims", budgeted["torch"].partition("+")[0]
    others = [name for name in _releases(shims) if name != release]
    facts = []
    for case, hidden, texts in (
        (
            "no library for this torch",
            [*shims.glob(f"*-{release}-*.json")],
            ["has no prebuilt observer", *others],
        ),
        ("no library", [shims], ["install g++"]),
    ):
        with _hidden(hidden):
            fits, log = _train(ENOUGH)
            _, error = _run([sys.executable, "-P", __file__, "train", MEMORY], codes=(1,))
        _require(fits["digest"] == budgeted["digest"], f"{case}: other numbers")
        _require(fits["observer"] == "" and fits["shims"] == [], f"{case}: {fits}")
        for text in (*FALLBACKS, "there is no C++ compiler", *texts):
            _require(text in log, f"{case}: the log lacks {text!r}: {log}")
        last = error.strip().splitlines()[-1]
        _require("BudgetError: the step needs" in last and "no observer sees who reads it" in last, last)
        warning = next(line for line in log.splitlines() if FALLBACKS[0] in line)
        facts.append({"case": case, "warning": warning, "error": last.partition(". ")[0]})
    return facts


def _releases(shims: Path) -> list[str]:
    return sorted({path.name.split("-")[1] for path in shims.glob("*.json")})


@contextmanager
def _hidden(paths: list[Path]) -> Iterator[None]:
    """Rename these files and folders, and give them their names again at the end."""
    _require(bool(paths), "there is no library to hide")
    for path in paths:
        path.rename(path.with_name(f"{path.name}.hidden"))
    try:
        yield
    finally:
        for path in paths:
            path.with_name(f"{path.name}.hidden").rename(path)


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
    for name, first in IMPORTED:
        code = IMPORT_CODE.format(first=first, name=name)
        runs = [_run([sys.executable, "-P", "-c", code])[0].split() for _ in range(IMPORTS)]
        clock, cpu = (round(statistics.median(map(float, column)), 4) for column in zip(*runs))
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
    train(sys.argv[2]) if sys.argv[1:2] == ["train"] else main()
