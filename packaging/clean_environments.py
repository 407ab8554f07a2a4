"""The test of wheels in clean environments: a new virtual environment, without a compiler.

In: a folder of wheels, and pairs of a Python version and a torch release. Out: a row per pair.

For each pair, pip installs torch and the wheel that fits this Python. Then check_installed.py runs there. Its
`PATH` has only the programs of the environment. `CC` and `CXX` are not set, and teraio's folder of compiled
libraries is empty. The environment is deleted after the test.

A row has `passed`: true or false. It is null, with the reason in `not_available_here`, if this machine has no
such Python, or if pip finds no such release of torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECK = Path(__file__).with_name("check_installed.py")
LIMIT_S = 1200
# One pair per series of torch with the oldest Python, then later versions of Python with the abi3 wheel.
PAIRS = (
    "3.11=2.13.0",
    "3.11=2.11.0",
    "3.11=2.12.1",
    "3.11=2.14.1",
    "3.11=2.15.0",
    "3.12=2.13.0",
    "3.13=2.15.0",
)
# What pip writes if the index, or a constraint of this machine, has no such release.
MISSING = ("No matching distribution found for torch", "ResolutionImpossible")


class NotAvailable(Exception):
    """The error for a version of Python or a release of torch that this machine cannot get."""


def test_wheels(folder: Path, pairs: Sequence[str]) -> list[dict[str, Any]]:
    """Test each pair, and print its row."""
    rows = []
    for pair in pairs:
        python, _, torch = pair.partition("=")
        row: dict[str, Any] = {"python": python, "torch": torch, "passed": False}
        try:
            row |= _test_pair(folder, python, torch)
        except NotAvailable as error:
            row |= {"passed": None, "not_available_here": str(error)}
        except RuntimeError as error:
            row["failure"] = str(error)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _test_pair(folder: Path, python: str, torch: str) -> dict[str, Any]:
    program = find_python(python)
    if program is None:
        raise NotAvailable(f"Python {python} is not installed")
    with tempfile.TemporaryDirectory(prefix="teraio-clean-") as name:
        clean = Path(name)
        _run([program, "-m", "venv", str(clean / "venv")])
        began = time.monotonic()
        python_of_venv = str(clean / "venv" / "bin" / "python")
        installer = [python_of_venv, "-m", "pip", "install", "--no-cache-dir", "--only-binary=:all:"]
        _install_torch(installer, torch)
        # pip chooses the wheel for this Python, and may not fall back to another teraio or to a source.
        _run([*installer, "--find-links", str(folder), "teraio"])
        installed_s = round(time.monotonic() - began, 1)
        printed = _run([python_of_venv, "-P", str(CHECK)], _environ_without_compiler(clean))
        checked: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return {"passed": True, "install_s": installed_s, **checked}


def _install_torch(installer: list[str], release: str) -> None:
    try:
        _run([*installer, f"torch=={release}", "numpy"])
    except RuntimeError as error:
        if not any(text in str(error) for text in MISSING):
            raise
        # A line such as "The user requested (constraint) torch<=2.14.1", or the line that pip ends with.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        causes = [line for line in lines if "(constraint)" in line] or [lines[-1]]
        raise NotAvailable(f"torch {release}: {causes[0]}") from error


def _environ_without_compiler(clean: Path) -> dict[str, str]:
    (clean / "home").mkdir()
    return {
        "PATH": str(clean / "venv" / "bin"),
        "HOME": str(clean / "home"),
        "TMPDIR": str(clean),
        "LANG": "C.UTF-8",
    }


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of this version, or None."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return str(Path(sys.base_prefix) / "bin" / f"python{version}")
    candidates = [shutil.which(f"python{version}")]
    candidates += map(str, Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"))
    for found in filter(None, candidates):
        ran = subprocess.run([found, "-c", "import ssl"], check=False, capture_output=True)
        if ran.returncode == 0:
            return found
    return None


def _run(command: list[str], environ: dict[str, str] | None = None) -> str:
    environ = dict(os.environ) if environ is None else environ
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=LIMIT_S)
    if ran.returncode != 0:
        tail = (ran.stdout + ran.stderr)[-3000:]
        raise RuntimeError(f"{' '.join(command[1:4])} failed with exit code {ran.returncode}: {tail}")
    return ran.stdout
