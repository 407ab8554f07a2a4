"""Which branches of the engine and of the readers the tests take.

    python tests/long/branches.py [tests ...] [--jobs 2] [--report FILE] [--after FILE]

Runs the tests (all of them, or those that are named) under coverage.py, their child processes too, and prints
each file's share of branches with the lines where the rest begins, worst first; then `name value target
PASS|FAIL`. What needs a GPU is in a row of its own: without one it cannot be taken. Needs `pip install
coverage`. An hour for all; times of tests are not held to their rows. In parts: what the report of an earlier
run has taken, of files that are as they were, counts with `--after`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from says import at_least

ROOT = Path(__file__).resolve().parents[2]
ENGINE_AND_READERS = ("runtime/", "teraio/formats/", "teraio/options.py", "teraio/units.py")
ON_A_GPU = (
    "runtime/device/cuda.py",
    "runtime/device/cuda_memory.py",
    "runtime/device/pinned_host.py",
    "runtime/store/gds.py",
)
LEAST_PERCENT = 95
# `_exit`: forked children end by os._exit, and what they did counts.
SETTINGS = """\
[run]
branch = true
parallel = true
concurrency = thread
patch = subprocess, _exit
data_file = {folder}/data
source = {root}/runtime, {root}/teraio
disable_warnings = no-data-collected, module-not-imported, module-not-measured
[report]
exclude_also =
    if TYPE_CHECKING:
    raise NotImplementedError
    ^\\s*\\.\\.\\.$
    assert_never
"""


@dataclass(frozen=True, slots=True)
class File:
    name: str
    taken: int
    branches: int
    missing: tuple[tuple[int, int], ...]  # from line, to line; a negative one leaves the function

    @property
    def percent(self) -> float:
        return 100 * self.taken / self.branches if self.branches else 100.0


def counted(name: str) -> bool:
    """Whether this file is of the engine, or reads files that others wrote."""
    return name.startswith(ENGINE_AND_READERS)


def measured(tests: list[str], jobs: int) -> dict[str, Any]:
    """coverage's own report."""
    with tempfile.TemporaryDirectory(prefix="branches-") as folder:
        settings, found = Path(folder) / "settings", Path(folder) / "found.json"
        settings.write_text(SETTINGS.format(folder=folder, root=ROOT))
        coverage = [sys.executable, "-m", "coverage"]
        how = ["-o", "addopts=", "-q", "--strict-markers", "-p", "no:cacheprovider"]
        how += ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"] if jobs > 1 else []
        command = [*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *how, *tests]
        subprocess.run(command, cwd=ROOT, check=False)  # what fails is for the tests to say
        subprocess.run([*coverage, "combine", "-q", f"--rcfile={settings}"], cwd=ROOT, check=True)
        write = [*coverage, "json", "-q", f"--rcfile={settings}", "-o", str(found)]
        subprocess.run(write, cwd=ROOT, check=True)
        told: dict[str, Any] = json.loads(found.read_text())
    for path, file in told["files"].items():
        file["sha256"] = sha256_of(path)
    return told


def sha256_of(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def add(told: dict[str, Any], earlier: dict[str, Any]) -> None:
    """What either has taken."""
    for path, before in earlier["files"].items():
        file = told["files"].get(path)
        if file is None and before["sha256"] == sha256_of(path):
            told["files"][path] = before
        elif file is not None and file["sha256"] == before["sha256"]:
            still = {*map(tuple, file["missing_branches"])} & {*map(tuple, before["missing_branches"])}
            file["missing_branches"] = sorted(still)


def files_of(told: dict[str, Any]) -> list[File]:
    """The worst first."""
    return sorted(map(file_of, told["files"].items()), key=lambda file: file.percent)


def file_of(entry: tuple[str, dict[str, Any]]) -> File:
    path, told = entry
    name = os.path.relpath((ROOT / path).resolve(), ROOT)
    branches, missing = told["summary"]["num_branches"], tuple(map(tuple, told["missing_branches"]))
    return File(name, branches - len(missing), branches, missing)


def row(name: str, files: list[File], least: float) -> bool:
    """False: too few."""
    taken, branches = sum(file.taken for file in files), sum(file.branches for file in files)
    percent = 100 * taken / max(branches, 1)
    return at_least(f"branches-{name}-percent", percent, least)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="files, folders or node ids; all if none is given")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="what was taken, as JSON of coverage's form")
    parser.add_argument("--after", type=Path, help="such a report: what it has taken counts, too")
    args = parser.parse_args()
    if importlib.util.find_spec("coverage") is None:
        print("this needs coverage.py: pip install coverage", file=sys.stderr)
        return 2
    earlier = json.loads(args.after.read_text()) if args.after else {"files": {}}
    told = measured(args.tests, args.jobs)
    add(told, earlier)
    if args.report:
        args.report.write_text(json.dumps(told))
    files = [file for file in files_of(told) if counted(file.name)]
    for file in files:
        lines = " ".join(f"{first}->{to}" if to > 0 else f"{first}->end" for first, to in file.missing[:12])
        print(f"{file.percent:6.1f} %  {file.taken:>4} of {file.branches:>4}  {file.name}  {lines}")
    here = [file for file in files if file.name not in ON_A_GPU]
    row("that-need-a-gpu", [file for file in files if file.name in ON_A_GPU], 0)
    return 0 if row("of-engine-and-readers", here, LEAST_PERCENT) else 1


if __name__ == "__main__":
    sys.exit(main())
